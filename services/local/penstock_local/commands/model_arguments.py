"""The arguments of ``penstock models`` and ``penstock pull``."""

import argparse
from typing import Any


def add_models(commands: Any) -> None:
    """The commands on models in the cache."""
    parser = commands.add_parser(
        "models",
        help="list the models in this machine's cache",
        description="List the models in this machine's cache of the Hugging Face hub: name, size on disk, and whether their "
        "files are all there.",
        allow_abbrev=False,
    )
    parser.set_defaults(run=_run_models)
    parser.add_argument("--json", action="store_true", help="a JSON list instead of a table")
    parser = commands.add_parser(
        "pull",
        help="download a model from the Hugging Face hub",
        description="Download what is needed to serve a model into this machine's cache, and print the directory. What is there "
        "already is not downloaded again. HF_TOKEN opens private models and those that ask for consent.",
        allow_abbrev=False,
    )
    parser.set_defaults(run=_run_pull)
    parser.add_argument("model", metavar="MODEL", help="id on the hub, such as Qwen/Qwen3-0.6B")
    parser.add_argument(
        "--revision", metavar="NAME", default="", help="branch, tag or commit (default: the default branch)"
    )


def _run_models(arguments: argparse.Namespace) -> int:
    from penstock_local.commands.models import models

    return models(as_json=arguments.json)


def _run_pull(arguments: argparse.Namespace) -> int:
    from penstock_local.commands.models import pull

    return pull(arguments.model, revision=arguments.revision)
