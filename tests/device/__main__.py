"""``make check-gpu``: what engines compute on a GPU beside what they should, each check in a process of its own.

Greedy tokens of every family against transformers' on the CPU, in float32, and what computes them; the same in bfloat16; and what
only a device has: graphs, sleeping weights, an 8-bit cache, kernels whose bits do not depend on the batch, draws; and tokens with
and without drafts.
``--device cpu`` runs the checks that a CPU can, to see that they run.
"""

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from tests.device.checks import CHECKS

# Forked, which spares each check the import of torch and transformers. Nothing here touches a device.
_FORK = multiprocessing.get_context("fork")


class Running:
    """A check that runs, for ``limit`` seconds at most."""

    def __init__(self, name: str, device: str, limit: float, folder: Path) -> None:
        self.name = name
        self._limit = limit
        self._began = time.monotonic()
        self._result, self._words = folder / f"{name}.json", folder / f"{name}.txt"
        self._process = _FORK.Process(target=_run, args=(name, device, self._result, self._words))
        self._process.start()

    @property
    def over(self) -> bool:
        """Whether it has ended, or must."""
        return not self._process.is_alive() or time.monotonic() - self._began > self._limit

    def found(self) -> dict[str, Any]:
        """What it found, or ``error``: why it did not end."""
        seconds = round(time.monotonic() - self._began, 1)
        late = self._process.is_alive()
        if late:
            self._process.kill()
        self._process.join()
        if self._result.exists():
            found: dict[str, Any] = json.loads(self._result.read_text())
            return found | {"seconds": seconds}
        said = self._words.read_text(errors="replace") if self._words.exists() else ""
        lines = [line for line in said.splitlines() if line.strip()]
        why = lines[-1][:300] if lines else f"exit status {self._process.exitcode}"
        error = f"not within {self._limit:.0f} s" if late else why
        return {"error": error, "words": said[-4000:], "seconds": seconds}


def run_all(names: list[str], device: str, jobs: int, limit: float, budget: float) -> dict[str, Any]:
    """Results by name. No check is begun when ``budget`` seconds are over."""
    results: dict[str, Any] = {}
    ends = time.monotonic() + budget
    waiting, running = list(names), list[Running]()
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            while waiting and len(running) < jobs:
                name, left = waiting.pop(0), ends - time.monotonic()
                if left < 5:
                    results[name] = {"error": "no time left"}
                else:
                    running.append(Running(name, device, min(limit, left), Path(folder)))
            for check in [check for check in running if check.over]:
                running.remove(check)
                results[check.name] = check.found()
            time.sleep(0.05)
    return results


def _run(name: str, device: str, result: Path, words: Path) -> None:
    with words.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            found = CHECKS[name](device)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        part = result.with_suffix(".part")
        part.write_text(json.dumps(found))
        part.rename(result)
        os._exit(0)  # what the engine has started need not be taken apart


def main() -> int:
    """Exit code 1 when a check failed."""
    parser = argparse.ArgumentParser(prog="make check-gpu", description=__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--only", action="append", help="checks whose name begins so; may be given again")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="checks at once")
    parser.add_argument("--limit", type=float, default=120, help="seconds for each check")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds after which none is begun")
    parser.add_argument("--json", type=Path, default=Path("build/check-gpu/results.json"), help="where all is written")
    args = parser.parse_args()
    names = [name for name in CHECKS if not args.only or name.startswith(tuple(args.only))]
    results = run_all(names, args.device, args.jobs, args.limit, args.budget)
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(results, indent=1), encoding="utf-8")
    for name in names:
        found = results[name]
        good = "error" not in found and found.get("ok", False)
        words = found.get("error") or found.get("says", "")
        print(f"{'ok  ' if good else 'FAIL'} {name:28s} {found.get('seconds', 0):5.1f} s  {words}"[:230])
    return int(any("error" in found or not found.get("ok", False) for found in results.values()))


if __name__ == "__main__":
    sys.exit(main())
