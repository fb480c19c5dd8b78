"""Names of the API that no .proto defines: error reasons and metadata keys, read from the services' sources.

``python -m tests.contract.words VERSION`` stores them as the names of a release.
"""

import ast
import functools
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RELEASED = ROOT / "protos" / "released"
REASON = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)*")
METADATA = re.compile(r"x-[a-z]+(-[a-z]+)+|authorization|traceparent|tracestate")
NAMES_OF_REASONS = {"reason", "default_reason"}
"""Names of keywords, parameters and variables whose values are error reasons."""


@functools.cache
def current(root: Path = ROOT) -> dict[str, list[str]]:
    """Return the sorted names in the services under ``root``."""
    trees = [ast.parse(path.read_text()) for path in sorted((root / "services").rglob("*.py"))]
    constants = {
        target.id: statement.value.value
        for tree in trees
        for statement in tree.body
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant)
        for target in statement.targets
        if isinstance(target, ast.Name) and isinstance(statement.value.value, str)
    }
    reasons = {
        word for tree in trees for node in given(tree) for word in texts(node, constants) if REASON.fullmatch(word)
    }
    literals = {
        node.value
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    return {"metadata": sorted(filter(METADATA.fullmatch, literals)), "reasons": sorted(reasons)}


def given(tree: ast.Module) -> Iterator[ast.expr]:
    """Yield every expression that is used as an error reason."""
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg in NAMES_OF_REASONS:
            yield node.value
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id in NAMES_OF_REASONS for target in targets):
                yield node.value


def texts(node: ast.expr, constants: dict[str, str]) -> Iterator[str]:
    """Yield the texts that an expression may evaluate to, including texts of named constants."""
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.value
        elif isinstance(part, ast.Name) and part.id in constants:
            yield constants[part.id]


def released() -> Path:
    """Return the names of the last release."""
    return max(RELEASED.glob("*.words.json"), key=lambda path: [int(n) for n in re.findall(r"\d+", path.name)])


if __name__ == "__main__":
    kept = RELEASED / f"v{sys.argv[1]}.words.json"
    kept.write_text(json.dumps(current(), indent=2) + "\n")
    print(f"wrote {kept.relative_to(ROOT)}")
