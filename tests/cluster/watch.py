"""Behavior of an autoscaler over time: load, desired engines and ready engines, as numbers and as a plot."""

import itertools
import json
import threading
import time
from pathlib import Path

import msgspec
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from tests.cluster.release import Release, is_ready
from tests.cluster.system.programs import NotUpError

EVERY = 1.0
COST = "controller.kubernetes.io/pod-deletion-cost"


class Sample(msgspec.Struct, frozen=True):
    """A sample, taken ``at`` seconds after the beginning. ``streams`` is the number of open streams of clients."""

    at: float
    streams: int
    wanted: int
    ready: int


class Engine(msgspec.Struct, frozen=True):
    """A ready pod in a sample.

    Attributes:
        cost: Deletion cost that the coordinator has written.
        leaving: Whether the pod is being deleted.
    """

    cost: int
    leaving: bool


class Watch:
    """Samples the engines' workload each second: ``with Watch(release, workload) as watch``.

    Attributes:
        streams: Number of streams, set by the load generator.
        dearer: Pods that were removed although another ready pod had a lower deletion cost, as text.
    """

    def __init__(self, release: Release, workload: str) -> None:
        self._release = release
        self._workload = workload
        self._over = threading.Event()
        self._began = time.monotonic()
        self._engines: dict[str, Engine] = {}
        self.streams = 0
        self.samples: list[Sample] = []
        self.taken = 0
        self.dearer: list[str] = []

    def __enter__(self) -> "Watch":
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(EVERY):
            try:
                found = json.loads(self._release.kubectl("get", self._workload, "-o", "json"))
                self._compare(self._now_ready())
            except NotUpError:
                continue  # some tests stop the API server
            ready = found["status"].get("readyReplicas", 0)
            at = time.monotonic() - self._began
            self.samples.append(Sample(at=at, streams=self.streams, wanted=found["spec"]["replicas"], ready=ready))

    def _now_ready(self) -> dict[str, Engine]:
        pods = self._release.objects("pods", "app.kubernetes.io/component=enginecore")
        return {
            pod["metadata"]["name"]: Engine(
                cost=int(pod["metadata"].get("annotations", {}).get(COST, 0)),
                leaving="deletionTimestamp" in pod["metadata"],
            )
            for pod in pods
            if is_ready(pod)
        }

    def _compare(self, engines: dict[str, Engine]) -> None:
        """Check that the removed pods had the lowest deletion costs, according to the costs before or after the
        removal.
        """
        before, self._engines = self._engines, engines
        there = before.keys() & engines.keys()
        taken = [name for name in there if engines[name].leaving and not before[name].leaving]
        kept = [name for name in there if not engines[name].leaving]
        self.taken += len(taken)
        for name in taken if kept else ():
            if all(costs[name].cost > min(costs[each].cost for each in kept) for costs in (before, engines)):
                costs = {each: engines[each].cost for each in kept}
                self.dearer.append(f"{name}, cost {engines[name].cost}, while there were {costs}")

    def changes(self, since: float = 0.0) -> list[int]:
        """Return the desired numbers of engines after ``since``, one for each change."""
        wanted = [sample.wanted for sample in self.samples if sample.at >= since]
        return [number for index, number in enumerate(wanted) if index == 0 or number != wanted[index - 1]]

    @property
    def now(self) -> float:
        """Return the seconds since the beginning."""
        return time.monotonic() - self._began

    def plot(self, path: Path) -> None:
        """Draw the samples into a PNG."""
        at = [sample.at for sample in self.samples]
        figure = Figure(figsize=(10, 4.5), dpi=110, layout="constrained")
        engines = figure.subplots()
        engines.step(at, [sample.wanted for sample in self.samples], where="post", label="engines wanted", color="C0")
        engines.step(at, [sample.ready for sample in self.samples], where="post", label="engines ready", color="C2")
        engines.set(xlabel="seconds", ylabel="engines")
        engines.set_ylim(bottom=0)
        streams = engines.twinx()
        streams.step(
            at, [sample.streams for sample in self.samples], where="post", label="streams", color="C7", alpha=0.5
        )
        streams.set(ylabel="streams of clients")
        streams.set_ylim(bottom=0)
        figure.legend(loc="outside upper center", ncols=3)
        FigureCanvasAgg(figure)  # draws without a display
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)


def turns(numbers: list[int]) -> int:
    """Return the number of times that a sequence of numbers changes direction."""
    steps = [after - before for before, after in itertools.pairwise(numbers) if after != before]
    return sum((before > 0) != (after > 0) for before, after in itertools.pairwise(steps))
