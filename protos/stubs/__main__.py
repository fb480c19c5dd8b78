"""Build client packages of the contracts: ``python protos/stubs [--out FOLDER] [--released FILE] [LANGUAGE...]``."""

import argparse
import importlib
import shutil
import sys
import time
from pathlib import Path

import source

LANGUAGES = ("python", "node", "go", "java", "kotlin", "rust")
ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    """Build the requested packages.

    A language whose tools are missing is skipped. If it was requested by name, return 1.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("languages", nargs="*", choices=[[], *LANGUAGES], metavar="LANGUAGE", help=", ".join(LANGUAGES))
    parser.add_argument(
        "--out", type=Path, default=ROOT / "build/stubs", help="output folder of the packages (default: build/stubs)"
    )
    parser.add_argument(
        "--released",
        type=Path,
        help="descriptor set in protos/released to build from (default: the current contracts)",
    )
    args = parser.parse_args()
    out = args.out.resolve()
    contracts = source.released(args.released, out) if args.released else source.current(out)
    absent = 0
    for language in args.languages or LANGUAGES:
        module = importlib.import_module(language)
        if missing := [name for name in module.NEEDS if shutil.which(name) is None]:
            print(f"{language}: skipped, no {', '.join(missing)} on PATH", flush=True)
            absent += 1
            continue
        begun = time.monotonic()
        built = module.build(contracts, out)
        print(f"{language}: {built} ({time.monotonic() - begun:.0f} s)", flush=True)
    return 1 if args.languages and absent else 0


if __name__ == "__main__":
    sys.exit(main())
