"""Import of an example's modules, which are files in a directory and not a package."""

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace


@contextmanager
def example_modules(folder: Path, names: Sequence[str]) -> Iterator[SimpleNamespace]:
    """Import modules from a directory. At the end of the block, forget them and the modules that they import from
    there.
    """
    before, ours = dict(sys.modules), {path.stem for path in folder.glob("*.py")}
    for name in ours:
        sys.modules.pop(name, None)
    sys.path.insert(0, str(folder))
    try:
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    finally:
        sys.path.remove(str(folder))
        for name in ours:
            sys.modules.pop(name, None)
        sys.modules.update({name: module for name, module in before.items() if name in ours})
