"""``make parallel-matrix``: prints a table of all model types over several workers. Fails if tokens are wrong.

Each model type runs in a separate process with a time limit. If a process hangs, the table says so, and the other types
continue.
"""

import argparse
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import msgspec

from tests.fakes.models.tiny_models import ARCHITECTURES, RECURRENT_ARCHITECTURES
from tests.parallel_matrix.family import SIZES, Cell, cells

_FAMILIES = (*ARCHITECTURES, *RECURRENT_ARCHITECTURES)
LIMIT = 600.0
"""Time limit for a model type in seconds."""


def measured(family: str) -> list[Cell]:
    """Return the cells of a model type, measured in a separate process."""
    command = [sys.executable, "-m", "tests.parallel_matrix", "--one", family]
    try:
        done = subprocess.run(command, capture_output=True, timeout=LIMIT, check=False)
    except subprocess.TimeoutExpired:
        return [Cell(*size, served=False, wrong=True, why=f"nothing within {LIMIT:g} s") for size in SIZES]
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        return [Cell(*size, served=False, wrong=True, why=" ".join(last)) for size in SIZES]
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=list[Cell])


def row(family: str, found: list[Cell]) -> str:
    """Return a row of the table."""
    marks = ["yes" if cell.served else "wrong" if cell.wrong else "-" for cell in found]
    reasons = list(dict.fromkeys(re.sub(r"^worker \d+: ", "", cell.why) for cell in found if cell.why))
    return f"| `{family}` | " + " | ".join(marks) + f" | {'; '.join(reasons)} |"


def main() -> int:
    """Print the table and return the number of model types with wrong tokens."""
    parser = argparse.ArgumentParser(prog="python -m tests.parallel_matrix")
    parser.add_argument("--one", metavar="FAMILY", choices=_FAMILIES, help="this one, as JSON")
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="these; all without any")
    options = parser.parse_args()
    if options.one:
        print(msgspec.json.encode(cells(options.one)).decode(), flush=True)
        os._exit(0)  # native libraries may have threads that do not end
    families = options.families or list(_FAMILIES)
    names = [" x ".join(f"{word} {n}" for word, n in zip(("TP", "PP"), size, strict=True) if n > 1) for size in SIZES]
    print(f"| model type | {' | '.join(names)} | reason for the refusal |\n" + "|---" * (len(SIZES) + 2) + "|")
    wrong = 0
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1))) as pool:
        for family, found in zip(families, pool.map(measured, families), strict=True):
            wrong += any(cell.wrong for cell in found)
            print(row(family, found), flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(main())
