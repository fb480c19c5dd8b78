"""The arguments about LoRA adapters: of ``penstock serve``, and the command ``penstock lora``."""

import argparse
import asyncio
from typing import Any

from penstock_local import flags


def add_adapter(group: argparse._ArgumentGroup) -> None:
    """Add the flag that names an adapter."""
    group.add_argument(
        "--lora",
        action="append",
        dest="lora",
        metavar="NAME=PATH",
        help="serve the LoRA adapter in the directory PATH as NAME; may be repeated",
    )


def add_adapters(group: argparse._ArgumentGroup) -> None:
    """The adapters that are served from the start."""
    add_adapter(group)
    group.add_argument(
        "--lora-directory",
        metavar="DIR",
        help="serve each subdirectory of DIR as the LoRA adapter of its name, as they come and go; more may be loaded from there",
    )


def add_lora(commands: Any) -> None:
    """The commands on the adapters of a running server."""
    parser = commands.add_parser(
        "lora",
        help="load, unload, list and pin LoRA adapters of a running server",
        description="The LoRA adapters that requests to a running server can name. What is changed is changed on all "
        "frontends of its coordinator.",
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True, title="actions")
    load = _action(actions, "load", "have every engine read an adapter, and give it a name")
    load.add_argument("name", metavar="NAME", help="what requests call it")
    load.add_argument("path", metavar="PATH", help="its directory on the engines' machines, below one of lora.roots")
    load.add_argument("--inplace", action="store_true", help="take the place of an adapter of that name")
    load.add_argument("--pin", action="store_true", help="engines keep it in memory")
    unload = _action(actions, "unload", "take the name of an adapter away; requests that run end as if nothing were")
    unload.add_argument("name", metavar="NAME", help="what requests call it")
    listing = _action(actions, "list", "show the adapters and which engines have them in memory")
    listing.add_argument("--json", action="store_true", help="a JSON list instead of a table")
    pin = _action(actions, "pin", "have every engine keep an adapter in memory")
    pin.add_argument("name", metavar="NAME", help="what requests call it")
    pin.add_argument("--unpin", action="store_true", help="let it go when others need the room")


def _action(actions: Any, name: str, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(
        name, help=text, description=f"{text[0].upper()}{text[1:]}.", allow_abbrev=False
    )
    parser.set_defaults(run=_run, action=name)
    parser.add_argument(
        "--admin-address",
        default=flags.DEFAULT_ADMIN_ADDRESS,
        metavar="ADDRESS",
        help="of the operators' API of any of the frontends (default: %(default)s)",
    )
    return parser


def _run(arguments: argparse.Namespace) -> int:
    from penstock_local.commands.lora import LoraOptions, lora, path_of

    given = {name: value for name, value in vars(arguments).items() if name in LoraOptions.__struct_fields__}
    if "path" in given:
        given["path"] = path_of(given["path"])
    return asyncio.run(lora(LoraOptions(**given)))
