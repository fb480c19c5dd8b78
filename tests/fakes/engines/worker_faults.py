"""Plugin that kills or stops a worker, or corrupts a logit, at a named point.

``installed`` puts it on the plugin path of engines and their workers. A ``Fault`` is armed by writing it to the file
that ``VARIABLE`` names. The worker that it names removes the file when it reaches the point, and records the time.
"""

import dataclasses
import functools
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

NAME = "worker-faults"
VARIABLE = "PENSTOCK_WORKER_FAULT"

Point = Literal[
    "loading",
    "loaded",
    "idle",
    "receiving",
    "forward",
    "collective",
    "executed",
    "sampled",
    "writing",
    "between steps",
    "draining",
    "ending",
]
POINTS: tuple[Point, ...] = get_args(Point)
"""Points of a worker: loading: The weights are read on all workers, but not split yet. loaded: There is no KV cache
    yet. idle: No step is running. receiving: A step has arrived. forward: In a layer. collective: The other workers
    wait in a sum. executed: Before sampling. sampled: The result is not written yet. writing: The result is in the
    ring, but not published. between steps: One step is answered, the next has arrived. draining: In a step, after
    SIGTERM. ending: The worker was told to end.
"""
_FROM_OUTSIDE = ("idle", "draining")
"""Points at which the test itself, not the worker, causes the fault."""


class Fault(msgspec.Struct, frozen=True):
    """Fault that happens when the worker of ``rank`` next reaches ``point``. flip: its largest logit changes sign."""

    rank: int
    point: str
    does: Literal["kill", "stop", "flip"]
    pid: int = 0
    """Process that the fault affects; 0: the worker."""

    def arm(self, path: Path) -> None:
        """Write the fault to the file atomically, so that the worker never reads a part of it."""
        new = path.with_suffix(".new")
        new.write_bytes(msgspec.json.encode(self))
        new.rename(path)


def fired(path: Path) -> float | None:
    """Return when a fault of that file happened, in seconds of ``time.monotonic``. None if it has not."""
    done = path.with_suffix(".done")
    return float(done.read_text()) if done.exists() else None


def installed(directory: Path, name: str = NAME, module: str = __name__) -> Mapping[str, str]:
    """Create a distribution in ``directory`` with the plugin ``name``, which is ``install`` of a module.

    Returns the environment variables with which a process finds the plugin and the tests.
    """
    described = directory / f"penstock_{name.replace('-', '_')}-1.dist-info"
    described.mkdir(parents=True)
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: penstock-{name}\nVersion: 1\n")
    (described / "entry_points.txt").write_text(f"[penstock.plugins]\n{name} = {module}:install\n")
    root = Path(__file__).parents[3]
    return {
        "PYTHONPATH": os.pathsep.join([str(directory), str(root), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    }


class Faults:
    """Faults of one process."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.rank = -1

    def due(self, point: str, *does: str) -> Fault | None:
        """Return the fault armed for this point with this effect, and disarm it."""
        try:
            fault = msgspec.json.decode(self._path.read_bytes(), type=Fault)
        except FileNotFoundError:
            return None
        armed = "receiving" if fault.point in _FROM_OUTSIDE else fault.point
        if (fault.rank, armed) != (self.rank, point) or fault.does not in does:
            return None
        self._path.unlink()
        done = self._path.with_suffix(".now")
        done.write_text(str(time.monotonic()))
        done.rename(self._path.with_suffix(".done"))
        return fault

    def at(self, point: str) -> None:
        """Report that the process has reached a point, and cause the fault that is armed for it."""
        fault = self.due(point, "kill", "stop")
        if fault is not None:
            os.kill(fault.pid or os.getpid(), signal.SIGKILL if fault.does == "kill" else signal.SIGSTOP)


def install() -> None:
    """Install the plugin. It has no effect in an engine, which loads it as well."""
    loop = getattr(sys.modules["__main__"], "WorkerLoop", None)
    path = os.environ.get(VARIABLE)
    if loop is None or path is None:
        return
    faults = Faults(Path(path))
    _watch_steps(loop, faults)
    _watch_worker(faults)


def _watch_steps(loop: Any, faults: Faults) -> None:
    import torch

    from penstock_enginecore.executor.generation.runner import GenerationRunner
    from penstock_enginecore.executor.multiproc.ring import RingMemory
    from penstock_enginecore.worker.messages import Sampled

    wrap(loop, "_execute", before=lambda *_: faults.at("receiving"), after=lambda *_: faults.at("executed"))
    wrap(loop, "_sampled", after=lambda *_: faults.at("sampled"))
    telling: list[Any] = [None]

    def tells(self: Any, answer: Any) -> None:
        telling[0] = answer

    def told(self: Any, answer: Any) -> None:
        memory, rank = self._calls._memory, self._calls._index
        telling[0] = None
        if isinstance(answer, Sampled) and memory.written()[0] != memory.read(rank)[0]:
            faults.at("between steps")

    wrap(loop, "_answer", before=tells, after=told)
    wrap(
        RingMemory,
        "add_written",
        before=lambda *_: faults.at("writing") if isinstance(telling[0], Sampled) else None,
    )

    def flip(self: Any, *_: Any) -> None:
        if self._pending is not None and len(self._pending.logits) and faults.due("executed", "flip") is not None:
            row = self._pending.logits[0]
            row[row.argmax()] *= -1

    wrap(GenerationRunner, "sample", before=torch.inference_mode()(flip))

    def in_layer(module: torch.nn.Module, _: Any) -> None:
        if type(module).__name__.endswith("MLP"):
            faults.at("forward")

    torch.nn.modules.module.register_module_forward_pre_hook(in_layer)


def _watch_worker(faults: Faults) -> None:
    from penstock_enginecore.executor import loading
    from penstock_enginecore.executor.worker import Worker

    def made(self: Any, *_: Any) -> None:
        faults.rank = self._config.rank
        if self._collectives is not None:
            reduce = self._collectives.all_reduce
            self._collectives.all_reduce = lambda tensor: (faults.at("collective"), reduce(tensor))[1]

    wrap(Worker, "__init__", after=made)
    wrap(Worker, "load_model", after=lambda *_: faults.at("loaded"))
    wrap(Worker, "shutdown", before=lambda *_: faults.at("ending"))
    split = loading.split_model

    def splits(*args: Any, **kwargs: Any) -> Any:
        faults.at("loading")
        # Every rank has all logits, so change them only on this rank.
        return dataclasses.replace(split(*args, **kwargs), vocabulary=None)

    loading.split_model = splits


def _nothing(*_: Any) -> None: ...


def wrap(owner: Any, name: str, *, before: Callable[..., Any] = _nothing, after: Callable[..., Any] = _nothing) -> None:
    """Call ``before`` and ``after`` around a method, with the method's arguments."""
    method = getattr(owner, name)

    @functools.wraps(method)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        before(self, *args)
        result = method(self, *args, **kwargs)
        after(self, *args)
        return result

    setattr(owner, name, wrapped)
