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

This page lists every setting of the three services. `--help` of a service's Python module prints the same list.

**Sources of settings.** A service reads a YAML file (`--config FILE`), then environment variables, then flags. A later
source overrides an earlier one. A dot in a name separates a section from a setting. These forms set `scheduler.max_num_seqs`:

- `max_num_seqs` under `scheduler` in the file,
- `PENSTOCK_SCHEDULER__MAX_NUM_SEQS` in the environment,
- `--scheduler.max-num-seqs` on the command line.

**Errors.** A service does not start in three cases. If a name is unknown, the error suggests the most similar name. If a value is
out of range, the error states the range. If a setting has no effect without another setting, the error names the other setting.

**Other programs.** `penstock serve` accepts these settings as `--set engine.scheduler.max_num_seqs=64`
([command line](cli.md)), except settings that the command itself chooses. The chart accepts them in `frontend.config`,
`enginecore.config` and `coordinator.config` ([chart](../../charts/penstock/README.md)).

**Values.** A size is a number of bytes, or a number with a unit, such as `512MiB` or `4GiB`. The units K, M, G, T and KiB, MiB,
... are powers of 1024. The units KB, MB, ... are powers of 1000. Write lists as `[a, b]` and mappings as `{a: 1}`, also in
variables and flags. In a file, write `null` for `unset`.
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
        "size"
        if kind.is_size
        else {int: "integer", float: "number", bool: "`true`, `false`", str: "string"}.get(kind.type, "mapping")
    )
    name = {"one": name, "list": "list", "mapping": f"map from names to {name}s"}[kind.shape]
    return f"{name} {kind.range}".strip()
