"""The import graph has no cycles between files or between rooms.

A room is a folder directly below a package with all its contents, or a module directly below a package. The ``core``
folders of the engine's features belong to the room ``core``.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping, Set
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

SERVICES = Path(__file__).resolve().parents[2] / "services"


def files() -> dict[str, Path]:
    """Return the modules by name."""
    found = {}
    for path in SERVICES.glob("*/penstock_*/**/*.py"):
        parts = path.relative_to(SERVICES).with_suffix("").parts[1:]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(source: str, modules: Set[str]) -> Iterator[str]:
    """Return the names in ``modules`` that the file imports anywhere."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module in modules:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in modules else node.module


def graph(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """Return the imports of each module, without itself."""
    return {name: set(imports(source, sources.keys())) - {name} for name, source in sources.items()}


def of_rooms(graph: Mapping[str, Set[str]]) -> dict[str, set[str]]:
    """Return the rooms that each room imports, without itself. A package's own ``__init__`` belongs to no room."""
    rooms: defaultdict[str, set[str]] = defaultdict(set)
    for name, imported in graph.items():
        for other in imported:
            if "." in name and "." in other and _room(name) != _room(other):
                rooms[_room(name)].add(_room(other))
    return rooms


def circle(graph: Mapping[str, Set[str]]) -> list[str]:
    """Return one cycle of the graph, or an empty list."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as e:
        return list(e.args[1])
    return []


def _room(name: str) -> str:
    package, room, *inner = name.split(".")
    return f"{package}.core" if inner[:1] == ["core"] else f"{package}.{room}"


def test_no_files_import_each_other_in_a_circle() -> None:
    assert circle(graph({name: path.read_text() for name, path in files().items()})) == []


def test_no_rooms_import_each_other_in_a_circle() -> None:
    assert circle(of_rooms(graph({name: path.read_text() for name, path in files().items()}))) == []


def test_circles_are_found_also_between_the_depths_of_rooms() -> None:
    sources = {
        "a": "",
        "a.b": "",
        "a.b.c": "from a.d import e",
        "a.d": "",
        "a.d.e": "if True:\n    import a.b.f",
        "a.b.f": "",
    }
    made = graph(sources)
    assert made["a.b.c"] == {"a.d.e"}
    assert circle(made) == []
    assert set(circle(of_rooms(made))) == {"a.b", "a.d"}
    assert set(circle(graph({**sources, "a.b.f": "from a.b import c"}))) == {"a.b.c", "a.d.e", "a.b.f"}
