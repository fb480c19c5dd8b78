"""Measurements and checks on a GPU, also on a machine that has torch, Triton and transformers but no package index.

``pack`` runs on a machine with an index and collects the packages that the GPU machine lacks. ``run`` unpacks them on
the GPU machine and runs all phases within a time budget in seconds. Both need only the standard library.
"""

import argparse
import importlib
import importlib.util
import os
import signal
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)  # in place of this file's folder

from tests.device import environment, packing  # noqa: E402 - found by the line above


def main() -> int:
    """Run the command line and return the exit status.

    The status is 1 if a row failed or did not run, or if a GPU did not use the fused decoder and its graphs.
    """
    parser = argparse.ArgumentParser(prog="bare.py", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    _add_pack(commands.add_parser("pack", help="collect packages for a machine without a package index"))
    _add_run(commands.add_parser("run", help="run phases on this machine"))
    report = commands.add_parser("report", help="print the tables of an earlier run")
    report.add_argument("--out", type=Path, default=Path("build/bench-gpu"), help="folder of the run")
    args = parser.parse_args()
    if args.command == "pack":
        _use_project_environment()
        return packing.pack(args.into, args.python, args.has, args.limit_mib)
    if args.command == "report":
        from tests.benchmarks.gpu import report as tables

        return tables.show(args.out)
    if not args.prepared:
        return environment.run_prepared(args.pack, installed=args.installed, interpreted=args.tiny and not args.checks)
    return _run(args)


def _use_project_environment() -> None:
    """Restart this program with the project's Python if the current Python lacks the project's packages."""
    if importlib.util.find_spec("penstock_common") is not None:
        return
    python = ROOT / ".venv/bin/python"
    if not python.exists():
        sys.exit("the project's packages are not installed here: run `make setup` before `pack`")
    os.execv(python, [str(python), *sys.argv])


def _add_pack(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--python", default="3.12", help="Python version of the machine (default: %(default)s)")
    parser.add_argument("--into", type=Path, default=packing.FOLDER, help="folder of the pack (default: %(default)s)")
    parser.add_argument("--has", nargs="*", default=[], help="more packages that the machine has, which are left out")
    parser.add_argument(
        "--limit-mib", type=float, default=64, help="largest total of pack and tracked files, in MiB (default: 64)"
    )


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--installed", action="store_true", help="use the packages of this Python, without a pack")
    parser.add_argument("--pack", type=Path, default=packing.FOLDER, help="folder of the pack (default: %(default)s)")
    parser.add_argument("--checks", action="store_true", help="check the results of engines, instead of measuring")
    parser.add_argument(
        "--tiny", action="store_true", help=("run all phases on the CPU with a tiny model, as a test of the phases")
    )
    parser.add_argument("--shape", choices=("8B", "1B"), default="8B", help="shape of the model (default: 8B)")
    parser.add_argument(
        "--only", action="append", default=[], help="name of a phase, or prefix of row names; repeatable"
    )
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds for everything (default: no limit)")
    parser.add_argument("--limit", type=float, help="seconds for each row (default: the row's own limit)")
    parser.add_argument(
        "--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="processes that compile or check at once"
    )
    parser.add_argument("--out", type=Path, help="folder of the results (default: build/bench-gpu or build/check-gpu)")
    parser.add_argument(
        "--capability",
        type=int,
        help="compile kernels for this compute capability, 90 is 9.0 (default: the installed GPU)",
    )
    parser.add_argument("--fault", action="append", default=[], metavar="ROW=KIND", help=argparse.SUPPRESS)
    parser.add_argument("--phases", help=argparse.SUPPRESS)
    parser.add_argument("--prepared", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--began", type=float, default=time.monotonic(), help=argparse.SUPPRESS)


def _run(args: argparse.Namespace) -> int:
    """Run the phases in this environment, and print a line for each row, the tables and the result."""
    from tests.device.phases import Settings
    from tests.device.session import Options, Session
    from tests.device.verdict import row_line, verdict

    kind = "check" if args.checks else "bench"
    where = args.phases or {"check": "tests.device.check_phases", "bench": "tests.benchmarks.gpu.phases"}[kind]
    out = args.out or Path(f"build/{kind}-gpu")
    settings = Settings("tiny" if args.tiny else args.shape, args.tiny, args.capability, args.jobs)
    options = Options(
        out=out,
        until=args.began + args.budget - _REPORT_SECONDS,
        patience=_CPU_PATIENCE if args.tiny else 1.0,
        limit=args.limit,
        only=args.only,
        faults=dict(fault.split("=") for fault in args.fault),
        tell=lambda record: print(row_line(record), flush=True),
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    session = Session(importlib.import_module(where).PHASES, settings, options)
    told = {"shape": settings.shape, "cpu": settings.cpu, "only": args.only, "command": sys.argv[1:]}
    session.note(**told)
    stopped = False
    try:
        session.run()
    except KeyboardInterrupt:
        stopped = True
    if kind == "bench" and not args.phases:
        from tests.benchmarks.gpu import report

        report.show(out)
    status, words = verdict(session.results, cpu=settings.cpu)
    seconds = time.monotonic() - args.began
    print(f"{'STOPPED: ' if stopped else ''}{words}; {seconds:.0f} s; {out / 'rows.jsonl'}", flush=True)
    return 1 if stopped else status


_REPORT_SECONDS = 5
_CPU_PATIENCE = 20
"""Factor for the time limits of rows on a CPU, which is slower and may be busy with other programs."""

if __name__ == "__main__":
    sys.exit(main())
