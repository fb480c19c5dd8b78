"""Lists arguments of vLLM's ``LLM`` that the guide does not name.

Run ``python -m tests.peers.arguments --peer DIR`` with vLLM in DIR/venv.
"""

import argparse
import fnmatch
import json
import re
import subprocess
import sys
from pathlib import Path

from tests.documents.pages import ROOT

_ASK = """
import dataclasses, inspect, json
from vllm import LLM, EngineArgs
names = {*inspect.signature(LLM.__init__).parameters, *(field.name for field in dataclasses.fields(EngineArgs))}
methods = {name: [*inspect.signature(each).parameters] for name, each in inspect.getmembers(LLM, callable) if name[0] != "_"}
print(json.dumps([sorted(names - {"self", "kwargs"}), methods]))
"""
_NAME = re.compile(r"`([a-z0-9_*]+)`")


def section() -> str:
    """Return the guide for users of vLLM."""
    return (ROOT / "docs/guides/migrate-from-vllm.md").read_text(encoding="utf-8")


def unnamed(names: list[str], text: str) -> list[str]:
    """Return the names that the text does not contain as code, neither in full nor as a pattern such as ``mm_*``."""
    patterns = _NAME.findall(text)
    return [name for name in names if not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]


def main() -> int:
    """Print the missing names. Returns 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", type=Path, required=True, help="folder whose venv/ holds vLLM")
    command = [str(parser.parse_args().peer / "venv/bin/python"), "-c", _ASK]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    names, methods = json.loads(told.splitlines()[-1])
    text = section()
    rows = {
        name: row for row in text.splitlines() if row.startswith("| `") for name in _NAME.findall(row.split("|")[1])
    }
    missing = unnamed(names, text)
    for method, parameters in methods.items():
        if method in rows and method not in names:
            missing += [f"{method}({name})" for name in unnamed(parameters, rows[method]) if name != "self"]
        elif unnamed([method], text):
            missing.append(f"{method}()")
    print(f"{len(names)} arguments, {len(methods)} methods; not named: {', '.join(missing) or 'none'}")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
