"""Page ``docs/reference/settings.md`` with every setting of every service, generated from the services' config structs."""

from collections.abc import Iterator, Mapping, Sequence

from charts.config_schema import STRUCTS
from penstock_common.config.setting_dependencies import Need, needs_of
from penstock_common.config.settings import Section, Setting, sections_of

_ABOUT = {
    "frontend": ("Frontend", "penstock_frontend"),
    "enginecore": ("Engine", "penstock_enginecore"),
    "coordinator": ("Coordinator", "penstock_coordinator"),
}
"""Heading and module of each service."""

_HEAD = """\
# Settings

<!-- Written by `make settings` from the structs in the services' `config`; change those. -->

This page lists every setting of the three services. `--help` of a service's module prints the same.

**Where settings come from.** A service reads a YAML file (`--config FILE`), then environment variables, then flags. A later
source overrides an earlier one. The dots of a name are sections. For example, `scheduler.max_num_seqs` is:

- `max_num_seqs` under `scheduler` in the file,
- `PENSTOCK_SCHEDULER__MAX_NUM_SEQS` in the environment,
- `--scheduler.max-num-seqs` on the command line.

**Errors.** A service refuses an unknown name and suggests the nearest one. It refuses a value out of range and names the range.
It refuses a value without effect and names the setting that is missing.

**Other programs.** `penstock serve` takes these settings as `--set engine.scheduler.max_num_seqs=64`
([command line](cli.md)). Settings that the command chooses itself are refused. The chart takes them in `frontend.config`,
`enginecore.config` and `coordinator.config` ([chart](../../charts/penstock/README.md)).

**Values.** A size is a number of bytes, or `512MiB`, `4GiB` and so on. K, M, G, T and KiB, MiB, ... count in 1024s; KB, MB, ...
count in 1000s. Lists are written `[a, b]` and mappings `{a: 1}`, in variables and flags too. `unset` is `null` in a file.
"""


def page() -> str:
    """Return the page in Markdown."""
    return "\n".join([_HEAD, *(line for component in STRUCTS for line in _service(component))]) + "\n"


def _service(component: str) -> Iterator[str]:
    heading, module = _ABOUT[component]
    yield f"## {heading}\n\nSettings of `python -m {module}`.\n"
    needs = needs_of(STRUCTS[component])
    for section in sections_of(STRUCTS[component]):
        yield from _section(section, needs)


def _section(section: Section, needs: Mapping[str, tuple[Need, ...]]) -> Iterator[str]:
    if section.key:
        yield f"**`{section.key}`**: {section.description.replace('``', '`')}\n"
    yield "| Setting | Default | Values | Meaning |\n|---|---|---|---|"
    for setting in section.settings:
        yield _row(setting, needs.get(setting.key, ()))
    yield ""


def _row(setting: Setting, needs: Sequence[Need]) -> str:
    needed = "".join(f" Needs {need.words}." for need in needs)
    default = setting.default_text if setting.required else f"`{setting.default_text}`"
    return f"| `{setting.key}` | {default} | {_values(setting)} | {setting.kind.description}{needed} |"


def _values(setting: Setting) -> str:
    kind = setting.kind
    if kind.choices:
        words = ", ".join(f"`{choice}`" if choice else '`""`' for choice in kind.choices)
        return f"list of {words}" if kind.shape == "list" else words
    name = (
        "size" if kind.is_size else {int: "integer", float: "number", bool: "`true`, `false`", str: "text"}[kind.type]
    )
    name = {"one": name, "list": "list of texts", "mapping": f"{name}s by name"}[kind.shape]
    return f"{name} {kind.range}".strip()
