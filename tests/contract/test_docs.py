"""Checks that commands, settings, files and code in the pages exist. tests/e2e/test_docs.py runs the commands."""

import argparse
import ast
import importlib
import importlib.util
import json
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from google.protobuf import json_format, message_factory, symbol_database
from google.protobuf.descriptor import ServiceDescriptor

from penstock.admin.v1 import service_pb2 as admin_service
from penstock.coordinator.v1 import service_pb2 as coordinator_service
from penstock.enginecore.v1 import service_pb2 as engine_service
from penstock.inference.v1 import service_pb2 as inference_service
from penstock_common.config.settings import ENV_PREFIX, settings_of
from penstock_coordinator.config import CoordinatorConfig
from penstock_enginecore.config import EngineCoreConfig
from penstock_frontend.api.http.openapi import document
from penstock_frontend.config import FrontendConfig
from penstock_local.cli import build_parser
from penstock_local.rpc.connect import VARIABLES
from penstock_local.settings import parse_settings
from tests.documents.pages import PAGES, ROOT, Block, Span, anchors, blocks, links, spans
from tests.documents.shell import Command, commands

CONFIGS = {"coordinator": CoordinatorConfig, "engine": EngineCoreConfig, "frontend": FrontendConfig}
KEYS = {service: {setting.key for setting in settings_of(config)} for service, config in CONFIGS.items()}
SERVICES = {f"penstock_{service.replace('engine', 'enginecore')}": service for service in CONFIGS}
SECTIONS = {key.partition(".")[0] for keys in KEYS.values() for key in keys if "." in key}
CHART = "charts/penstock/README.md"

OTHER_PROGRAMS = frozenset(
    {
        "./client",
        "aider",
        "alias",
        "apt-get",
        "buf",
        "build/client",
        "cargo",
        "cd",
        "client",
        "cline",
        "cmake",
        "curl",
        "echo",
        "export",
        "ghz",
        "go",
        "grpc_health_probe",
        "helm",
        "hf",
        "kubectl",
        "mkdir",
        "mvn",
        "node",
        "npm",
        "openssl",
        "pip",
        "sh",
        "smg",
        "source",
        "tar",
        "umask",
    }
)
"""Other programs that pages call: third-party programs, shell builtins, and programs that the page builds."""
OTHER_FLAGS = {"--worker-urls": "of smg, a gateway", "--reuse-values": "of helm"}
OTHER_YAML = {"models": "of Continue", "rules": "of the Prometheus adapter"}
OTHER_NAMES = {
    "docs/reference/chat.md": {"chat_template.jinja", "tokenizer_config.json"},
    "docs/guides/clients/node.md": {"@grpc/proto-loader"},
    "docs/reference/pooling-api.md": {"1_Pooling/config.json"},
    "examples/clients/go/README.md": {"go.sum"},
}
"""Code spans that look like a path of this repository but are not paths, by page."""


@cache
def tracked() -> frozenset[str]:
    """Return the files and folders of the repository."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    files = listed.stdout.splitlines()
    return frozenset([*files, *(str(parent) for file in files for parent in Path(file).parents)])


@cache
def sources() -> str:
    """Return all code of the repository without the pages, to check that the code uses a name."""
    kinds = (".py", ".mjs", ".go", ".java", ".rs", ".proto", ".yaml", ".yml", ".tpl", ".toml", ".sh", ".html", ".json")
    own = Path(__file__).resolve()
    return "\n".join(
        (ROOT / file).read_text(encoding="utf-8")
        for file in sorted(tracked())
        if (file.endswith(kinds) or file == "Makefile")
        and (ROOT / file).is_file()
        and (ROOT / file) != own
        and not file.endswith(("tokenizer.json", "package-lock.json"))
    )


def targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def subparsers() -> dict[str, argparse.ArgumentParser]:
    (action,) = (a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    return dict(action.choices)


def ids(found: Command | Span | Block) -> str:
    return found.place


# Tests of commands in shell blocks.


def test_every_command_is_in_a_block_that_says_so() -> None:
    known = re.compile(
        rf"(\$ )?(\w+=\S+ )*({'|'.join(OTHER_PROGRAMS)}|penstock|make|python3?|\.venv/bin/python|grpcurl) \S"
    )
    unlabelled = [
        f"{block.place}: {line}" for block in blocks("") for line in block.code.splitlines() if known.match(line)
    ]
    assert unlabelled == [], "write ```sh, or ```console for a session with $ in front of what is typed"


@pytest.mark.parametrize("command", commands(), ids=ids)
def test_a_command_can_be_given_as_it_stands(command: Command) -> None:
    for program, *arguments in command.calls:
        if program == "penstock":
            check_penstock(command, arguments)
        elif program == "make":
            assert {word for word in arguments if "=" not in word} <= targets()
        elif program in ("python", "python3", ".venv/bin/python"):
            check_python(arguments)
        elif program == "grpcurl":
            check_grpcurl(arguments)
        else:
            assert program in OTHER_PROGRAMS, f"{command.place}: nothing is known of {program!r}"
            check_paths(command, arguments)
        if program == "curl":
            check_curl(arguments)


def check_penstock(place: Command | Span, arguments: list[str]) -> None:
    try:
        parsed = build_parser().parse_args(arguments)
    except SystemExit as e:
        raise AssertionError(f"{place.place}: penstock refuses {arguments}") from e
    if settings := getattr(parsed, "settings", None):
        parse_settings(settings)


def check_python(arguments: list[str]) -> None:
    if arguments[0] == "-m":
        _, name, *rest = arguments
        spec = importlib.util.find_spec(name)
        assert spec is not None, f"there is no module {name}"
        assert spec.origin is not None
        path = Path(spec.origin)
        if not path.is_relative_to(ROOT) or ".venv" in path.parts:
            return
        known = "\n".join(file.read_text() for file in path.parent.rglob("*.py"))
    else:
        name, *rest = arguments
        assert name in tracked(), f"there is no file {name}"
        path = ROOT / name
        known = (path / "__main__.py" if path.is_dir() else path).read_text()
    settings = KEYS.get(SERVICES.get(name, ""), set())
    for flag in (word.partition("=")[0] for word in rest if word.startswith("--")):
        own = flag.removeprefix("--").replace("-", "_")
        assert f'"{flag}"' in known or f'"{flag}"' in sources() or own in settings, f"{name} has no {flag}"


def services() -> dict[str, ServiceDescriptor]:
    modules = (admin_service, coordinator_service, engine_service, inference_service)
    return {each.full_name: each for module in modules for each in module.DESCRIPTOR.services_by_name.values()}


def check_grpcurl(arguments: list[str]) -> None:
    if "list" in arguments:
        return
    if "describe" in arguments:
        symbol_database.Default().pool.FindMessageTypeByName(arguments[-1])
        return
    service, _, method = arguments[-1].partition("/")
    described = services()[service].methods_by_name[method]
    if "-d" in arguments:
        json_format.Parse(arguments[arguments.index("-d") + 1], message_factory.GetMessageClass(described.input_type)())


def check_curl(arguments: list[str]) -> None:
    address = next(word for word in arguments if re.match(r"(https?://)?[\w.-]+:\d+", word))
    path = urlsplit(address if "://" in address else f"http://{address}").path
    assert path in document(frozenset([path]))["paths"], path
    if "-d" in arguments:
        json.loads(arguments[arguments.index("-d") + 1])


def check_paths(command: Command, arguments: list[str]) -> None:
    """Check that arguments which begin with a top-level folder are existing paths."""
    for word in arguments:
        if word.removeprefix("./").partition("/")[0] in top_folders():
            assert word.removeprefix("./").rstrip("/") in tracked(), f"{command.place}: {word} is not there"


# Tests of code spans in running text.


def top_folders() -> set[str]:
    return {name for name in tracked() if "/" not in name and name != "." and (ROOT / name).is_dir()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), f"{link}: {target.name} has {sorted(anchors(target))}"


def spans_like(pattern: str) -> list[Span]:
    return [span for span in spans() if re.fullmatch(pattern, span.text)]


def test_files_that_the_pages_name_are_there() -> None:
    missing = [
        f"{span.place}: {span.text}"
        for span in spans_like(r"[\w@.*-]+(/[\w.*-]+)+/?|[\w*-]+\.(py|md|mjs|proto|sh|toml|txt|yaml|go)")
        if span.text not in OTHER_NAMES.get(span.page, ()) and not is_there(span)
    ]
    assert missing == []


def is_there(span: Span) -> bool:
    """Return whether the path exists: from the root, from the page's folder, or as the end of a path in the repository.

    Package folders in the repository begin with ``penstock_``. Paths in ``build`` are generated, so they always count
    as existing.
    """
    text = span.text.rstrip("/")
    own = str(Path(span.page).parent / text)
    if text.partition("/")[0] == "build" or re.fullmatch(r"[A-Z]+/.*", text):
        return True
    if "/" in text and text.partition("/")[0] not in top_folders() and "." not in text.rpartition("/")[2]:
        return True  # not a file: a pair of words, a media type, or a hub id
    pattern = re.compile("(.*[/_])?" + re.escape(text).replace(r"\*", "[^/]*"))
    return own in tracked() or any(pattern.fullmatch(file) for file in tracked())


def test_settings_that_the_pages_name_are_there() -> None:
    wrong = [
        f"{span.place}: {span.text}"
        for span in spans_like(r"[a-z_]+(\.[a-z_*]+)+(=.*)?")
        if span.page != CHART
        and span.text.partition(".")[0] in SECTIONS
        and not is_setting(span.text)
        and not span.text.endswith(".py")
    ]
    assert wrong == []


def is_setting(text: str) -> bool:
    """Return whether the text is a setting of a service or of the chart, a section, a file name, or a request field."""
    name = text.partition("=")[0].removesuffix(".*")
    everything = {key for keys in (*KEYS.values(), chart_values()) for key in keys}
    if any(key == name or key.startswith(f"{name}.") or key.endswith(f".{name}") for key in everything):
        return True
    return name in ("routing.tenant", "routing.trace_context")


def test_flags_that_the_pages_name_are_there() -> None:
    known = {flag for parser in subparsers().values() for flag in parser._option_string_actions}
    known |= {f"--{key.replace('_', '-')}" for keys in KEYS.values() for key in keys} | OTHER_FLAGS.keys()
    wrong = [
        f"{span.place}: {flag}"
        for span in spans_like(r"--[a-z].*")
        if (flag := re.split(r"[ =]", span.text)[0]) not in known
        and (span.page == "docs/reference/cli.md" or f'"{flag}"' not in sources())
    ]
    assert wrong == []


def test_commands_that_running_text_names_are_there() -> None:
    for span in spans_like(r"penstock [a-zA-Z]+.*"):
        name, *rest = span.text.split()[1:]
        if name == "COMMAND":
            continue
        parser = subparsers()[name]
        for flag in (word.partition("=")[0] for word in rest if word.startswith("--")):
            assert flag in parser._option_string_actions, f"{span.place}: {span.text}"


def test_settings_given_in_running_text_can_be_set() -> None:
    for span in spans_like(r"(penstock serve .*)?--set [a-z]+\..*"):
        setting = span.text.rpartition("--set ")[2]
        assert parse_settings([setting.removesuffix("...")]), span.place


def test_targets_of_make_in_running_text_are_there() -> None:
    for span in spans_like(r"make [a-z-]+.*"):
        named = {word for word in span.text.split()[1:] if "=" not in word}
        assert named <= targets(), span.place


def test_modules_to_run_in_running_text_are_there() -> None:
    for span in spans_like(r"python -m [\w.]+.*"):
        check_python(re.sub(r"'.*'", "X", span.text).split()[1:])


def test_variables_that_the_pages_name_are_read() -> None:
    settings = {f"{ENV_PREFIX}{key.replace('.', '__').upper()}" for keys in KEYS.values() for key in keys}
    wrong = [
        f"{span.place}: {span.text}"
        for span in spans_like(r"PENSTOCK_[A-Z_]+(=.*)?")
        if (name := span.text.partition("=")[0]) not in settings | VARIABLES and name not in sources()
    ]
    assert wrong == []


# Tests of code and configuration.


NOT_INSTALLED = ("langchain_openai", "llama_index")
"""Clients with separate environments, which tests/clients/test_frameworks.py runs."""


@pytest.mark.parametrize("block", [b for b in blocks("python") if b.page != "docs/guides/clients/python.md"], ids=ids)
def test_python_code_compiles_and_finds_what_it_imports(block: Block) -> None:
    tree = ast.parse(block.code)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                importlib.import_module(name.name)
        elif isinstance(node, ast.ImportFrom):
            for name in node.names:
                if str(node.module).partition(".")[0] in NOT_INSTALLED:
                    continue
                if not hasattr(importlib.import_module(str(node.module)), name.name):
                    importlib.import_module(f"{node.module}.{name.name}")


def leaves(value: Any, prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of a YAML file's contents."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from leaves(inner, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix


@cache
def chart_values() -> set[str]:
    return set(leaves(yaml.safe_load((ROOT / "charts/penstock/values.yaml").read_text())))


def fits(keys: list[str], known: set[str]) -> bool:
    """Return whether each key is known, or is inside a mapping that is the value of a known key."""
    return all(any(key == each or key.startswith(f"{each}.") for each in known) for key in keys)


@pytest.mark.parametrize("block", blocks("yaml"), ids=ids)
def test_yaml_has_keys_that_are_there(block: Block) -> None:
    content = yaml.safe_load(block.code)
    if OTHER_YAML.keys() & content.keys():
        return
    named = re.match(r"# (\w+)\.yaml", block.code)
    keys = list(leaves(content))
    if named:
        assert fits(keys, KEYS[named[1]])
        return
    assert any(fits(keys, known) for known in (*KEYS.values(), chart_values()))


# Tests of the lists of exceptions. Each entry must still be needed, so that unused entries are removed.


@pytest.mark.parametrize("name", sorted(OTHER_PROGRAMS))
def test_an_allowed_program_is_still_called(name: str) -> None:
    assert any(call[0] == name for command in commands() for call in command.calls)


def test_allowed_names_still_stand_in_the_pages() -> None:
    named = {(span.page, span.text) for span in spans()}
    assert [(page, text) for page, texts in OTHER_NAMES.items() for text in texts if (page, text) not in named] == []
    assert [flag for flag in OTHER_FLAGS if not any(span.text == flag for span in spans())] == []
    tops = {key for block in blocks("yaml") for key in yaml.safe_load(block.code)}
    assert OTHER_YAML.keys() <= tops
