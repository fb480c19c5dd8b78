"""Every public production method has a docstring, in its class or in the interface that the class implements."""

import ast
from collections.abc import Iterator, Mapping, Set
from pathlib import Path

SERVICES = Path(__file__).resolve().parents[2] / "services"


def classes(source: str) -> Iterator[ast.ClassDef]:
    """Return all classes of a file, including inner classes."""
    return (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef))


def methods(node: ast.ClassDef) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Return the methods that the class itself defines."""
    return (item for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef))


def bases(node: ast.ClassDef) -> set[str]:
    """Return the names of the base classes, without packages and type arguments."""
    return {ast.unparse(base).split("[")[0].rpartition(".")[2] for base in node.bases}


def documented(sources: Mapping[str, str]) -> tuple[dict[str, set[str]], set[str]]:
    """Return the documented methods of each class, and the documented methods of all interfaces."""
    by_class: dict[str, set[str]] = {}
    of_interfaces: set[str] = set()
    for source in sources.values():
        for node in classes(source):
            names = {method.name for method in methods(node) if ast.get_docstring(method)}
            by_class.setdefault(node.name, set()).update(names)
            if bases(node) & {"Protocol", "ABC"}:
                of_interfaces |= names
    return by_class, of_interfaces


def silent(sources: Mapping[str, str]) -> list[str]:
    """Return the public methods of public classes that have no docstring, neither in the class nor in an interface."""
    by_class, of_interfaces = documented(sources)
    found = []
    for path, source in sources.items():
        for node in classes(source):
            known: Set[str] = of_interfaces.union(*(by_class.get(base, set()) for base in bases(node)))
            found += [
                f"{path}: {node.name}.{method.name}"
                for method in methods(node)
                if not method.name.startswith("_") and not node.name.startswith("_")
                if method.name[0].islower()
                or not any(base.endswith("Servicer") for base in bases(node))  # the .proto files describe the RPCs
                if not ast.get_docstring(method) and method.name not in known
                if not any(
                    "setter" in ast.unparse(item) or "overload" in ast.unparse(item) for item in method.decorator_list
                )
            ]
    return found


def test_public_methods_say_what_they_do() -> None:
    sources = {str(path.relative_to(SERVICES)): path.read_text() for path in SERVICES.glob("*/penstock_*/**/*.py")}
    assert silent(sources) == []


def test_methods_that_say_nothing_are_found_unless_their_interface_speaks() -> None:
    port = 'class Port(Protocol):\n    def send(self):\n        """Send."""\n'
    assert silent({"a.py": port, "b.py": "class Pipe:\n    def send(self): ...\n    def read(self): ...\n"}) == [
        "b.py: Pipe.read"
    ]
    base = 'class Base:\n    def close(self):\n        """Close."""\n'
    assert silent({"a.py": base, "b.py": "class Pipe(Base):\n    def close(self): ...\n"}) == []
    assert silent({"a.py": base, "b.py": "class Other:\n    def close(self): ...\n"}) == ["b.py: Other.close"]
