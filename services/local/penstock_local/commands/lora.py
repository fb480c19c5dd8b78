"""Implementation of ``penstock lora``, which manages LoRA adapters of a running server, and parsers of the LoRA flags."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from penstock_common.errors import ConfigError, PenstockError
from penstock_local.commands.models import size_text
from penstock_local.console import fail
from penstock_local.rpc.admin import AdminClient, ListedAdapter
from penstock_local.rpc.client import of_operators_api

EXIT_FAILED = 1
FLAG = "--lora"
_TIMEOUT = 300.0
"""Timeout in seconds. The timeout is long because engines may read adapters from slow remote disks."""
_COLUMNS = ("name", "source", "rank", "size", "pinned", "engines", "path")


class LoraOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of ``penstock lora``."""

    admin_address: str
    """Address of the admin API of any frontend of the cluster, as host:port."""
    action: Literal["load", "unload", "list", "pin"]
    name: str = ""
    path: str = ""
    inplace: bool = False
    pin: bool = False
    unpin: bool = False
    json: bool = False


def parse_adapters(texts: Sequence[str]) -> dict[str, str]:
    """Parse texts of the form ``NAME=PATH``. Returns the adapters' directories by name.

    Raises:
        ConfigError: A text has another form, a name is repeated or invalid, or a path has no adapter.
    """
    from penstock_frontend.config.models import (
        name_refusal,
    )  # Imported here because the other commands do not need it.

    adapters: dict[str, str] = {}
    for text in texts:
        name, separator, path = text.partition("=")
        if not separator or not name or not path:
            raise ConfigError(f"{FLAG} {text}: write NAME=PATH, e.g. pirate=./adapters/pirate")
        if name in adapters:
            raise ConfigError(
                f"{FLAG} {text}: the name {name!r} is already given to {adapters[name]}; choose another name"
            )
        if refusal := name_refusal(name):
            raise ConfigError(f"{FLAG} {text}: the name {name!r} {refusal}")
        adapters[name] = adapter_folder(path, of=f"{FLAG} {text}")
    return adapters


def adapter_folder(path: str, *, of: str) -> str:
    """Return the absolute path of an adapter's directory on this machine.

    Errors begin with ``of``, the flag that named the directory. Raises ConfigError if the directory does not exist or
    has no adapter.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise ConfigError(
            f"{of}: directory {path} does not exist; an adapter must be a local directory in PEFT's format. To download an "
            "adapter from the Hugging Face hub to DIR, run: hf download ORG/NAME --local-dir DIR"
        )
    if not (folder / "adapter_config.json").is_file():
        model = (folder / "config.json").is_file()
        what = (
            "the directory contains a model; serve the model as MODEL"
            if model
            else "the directory does not contain a LoRA adapter"
        )
        raise ConfigError(f"{of}: {path} has no adapter_config.json: {what}")
    return str(folder.resolve())


def parse_directory(text: str) -> str:
    """Return the absolute path of ``--lora-directory``, or empty if the flag is not given. Raises ConfigError if the
    directory does not exist.
    """
    if not text:
        return ""
    folder = Path(text).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"--lora-directory {text}: this directory does not exist")
    if (folder / "adapter_config.json").is_file() and not any(folder.glob("*/adapter_config.json")):
        raise ConfigError(
            f"--lora-directory {text}: this is the directory of one adapter; give its parent directory, or use "
            f"{FLAG} NAME={text}"
        )
    return str(folder.resolve())


def path_of(text: str) -> str:
    """Return the absolute path of a directory if it exists here.

    Otherwise return the text, which may be a path on another machine.
    """
    return str(Path(text).resolve()) if Path(text).is_dir() else text


async def lora(options: LoraOptions) -> int:
    """Run the action. Returns the exit code."""
    async with AdminClient(options.admin_address) as admin:
        try:
            text = await _done(admin, options)
        except PenstockError as e:
            # The message names the field of the API. The command has a flag for this field.
            fail(of_operators_api(e).replace("set load_inplace", "use --inplace"))
            return EXIT_FAILED
    sys.stdout.write(text)
    return 0


async def _done(admin: AdminClient, options: LoraOptions) -> str:
    """Run the action, and return the text to print."""
    name = options.name
    match options.action:
        case "load":
            loaded = await admin.load_lora(
                name, options.path, inplace=options.inplace, pinned=options.pin, deadline=_TIMEOUT
            )
            return f"{name}: loaded from {options.path}, rank {loaded.rank}, {size_text(loaded.num_bytes)}\n"
        case "unload":
            await admin.unload_lora(name, deadline=_TIMEOUT)
            return f"{name}: unloaded\n"
        case "pin":
            await admin.pin_lora(name, pinned=not options.unpin, deadline=_TIMEOUT)
            return f"{name}: {'not ' if options.unpin else ''}pinned\n"
        case _:
            adapters = await admin.list_loras(deadline=_TIMEOUT)
            return f"{msgspec.json.encode(adapters).decode()}\n" if options.json else _table(adapters)


def _table(adapters: Sequence[ListedAdapter]) -> str:
    rows = [_COLUMNS, *map(_row, adapters)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    lines = ("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "".join(f"{line}\n" for line in lines)


def _row(each: ListedAdapter) -> tuple[str, ...]:
    held = bool(each.engine_ids)
    return (
        each.name,
        each.source,
        str(each.rank) if held else "-",
        size_text(each.num_bytes) if held else "-",
        "yes" if each.pinned else "no",
        ",".join(each.engine_ids) or "-",
        each.path,
    )
