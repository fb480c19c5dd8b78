"""``make bench-gpu``: how near an engine comes to what the GPU can do, in phases of their own processes and limits.

Results are written after each phase, so that a run that is cut short leaves what it had. Without a GPU it prints what is
unmeasured; ``--tiny`` runs every phase on the CPU with a tiny shape.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.gpu import ceilings, engine, invariant, kernels, lora, machine, passes, peers, report, verify
from tests.benchmarks.gpu.shapes import FULL, SMALL, SMOKE, Plan

Measure = Callable[[Plan, torch.device], dict[str, Any]]
PHASES: dict[str, tuple[Measure, int]] = {
    "ceilings": (ceilings.measure, 30),
    "kernels": (kernels.measure, 60),
    "passes": (passes.measure, 140),
    "invariant": (invariant.measure, 110),
    "idle": (passes.idle, 50),
    "verify": (verify.measure, 60),
    "lora": (lora.measure, 90),
    "engine": (engine.measure, 180),
    "peers": (peers.measure, 90),
}
"""What measures, and how many seconds it may take on a GPU: under fourteen minutes in all."""
PATIENCE = 20
"""How much longer it may take on a CPU, where nobody pays for a machine and others may be busy."""
PLANS = {"8B": FULL, "1B": SMALL, "tiny": SMOKE}


def run_phase(name: str, plan: str, *, seconds: float) -> dict[str, Any]:
    """In a process of its own: what it leaves on the device goes with it. ``error`` says what went wrong."""
    command = [sys.executable, "-m", "tests.benchmarks.gpu", "--shape", plan, "--phase", name]
    begun = time.monotonic()
    try:
        done = subprocess.run(
            command, check=False, stdout=subprocess.PIPE, text=True, timeout=seconds, env=_environment(plan)
        )
    except subprocess.TimeoutExpired:
        return {"error": f"not within {seconds:.0f} s"}
    if done.returncode:
        return {"error": f"exit status {done.returncode}; its own words are above"}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found | {"seconds": round(time.monotonic() - begun, 1)}


def _environment(plan: str) -> dict[str, str]:
    """On a CPU Triton's kernels are interpreted."""
    return {**os.environ, "TRITON_INTERPRET": "1"} if plan == "tiny" else dict(os.environ)


def main() -> int:
    """Exit code 1 when a phase failed."""
    parser = argparse.ArgumentParser(prog="make bench-gpu", description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="all phases on the CPU, to see that they run")
    parser.add_argument("--shape", choices=list(PLANS), default="8B", help="shape of the model")
    parser.add_argument("--only", choices=list(PHASES), action="append", help="just this phase; may be given again")
    parser.add_argument("--phase", choices=list(PHASES), help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, default=Path("build/bench-gpu/results.json"), help="where the numbers go")
    args = parser.parse_args()
    shape = "tiny" if args.tiny else args.shape
    plan, tiny = PLANS[shape], shape == "tiny"
    if args.phase:
        print(json.dumps(PHASES[args.phase][0](plan, machine.pick(tiny=tiny))))
        return 0
    results: dict[str, Any] = {"shape": shape}
    if tiny or torch.cuda.is_available():
        results["device"] = machine.name(machine.pick(tiny=tiny))
        _measure(shape, args.only or list(PHASES), args.json, results)
    else:
        print("torch finds no CUDA device here: nothing is measured")
    print("\n".join(report.lines(plan, results)))
    if {"ceilings", "passes"} <= {
        name for name, found in results.items() if isinstance(found, dict) and "error" not in found
    }:
        report.plot(plan, results, args.json.with_suffix(".png"))
    return int(any(isinstance(found, dict) and "error" in found for found in results.values()))


def _measure(shape: str, names: list[str], path: Path, results: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    for name in names:
        print(f"{name} ...", file=sys.stderr, flush=True)
        results[name] = run_phase(name, shape, seconds=PHASES[name][1] * (PATIENCE if shape == "tiny" else 1))
        path.write_text(json.dumps(results, indent=2), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
