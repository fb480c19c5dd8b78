"""What an autoscaler does over time: load, wanted and ready engines, as numbers and as a plot."""

import itertools
import json
import threading
import time
from pathlib import Path

import msgspec
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from tests.cluster.release import Release
from tests.cluster.system.programs import NotUpError

EVERY = 1.0


class Sample(msgspec.Struct, frozen=True):
    """``at``: seconds from the beginning. ``streams``: what the clients keep open."""

    at: float
    streams: int
    wanted: int
    ready: int


class Watch:
    """``with Watch(release) as watch``: samples a workload each second. ``streams`` is set by whoever makes the load."""

    def __init__(self, release: Release, workload: str) -> None:
        self._release = release
        self._workload = workload
        self._over = threading.Event()
        self._began = time.monotonic()
        self.streams = 0
        self.samples: list[Sample] = []

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
            except NotUpError:
                continue  # the API server is what some tests stop
            ready = found["status"].get("readyReplicas", 0)
            at = time.monotonic() - self._began
            self.samples.append(Sample(at=at, streams=self.streams, wanted=found["spec"]["replicas"], ready=ready))

    def changes(self, since: float = 0.0) -> list[int]:
        """The numbers of engines wanted after ``since``, one for each change."""
        wanted = [sample.wanted for sample in self.samples if sample.at >= since]
        return [number for index, number in enumerate(wanted) if index == 0 or number != wanted[index - 1]]

    @property
    def now(self) -> float:
        """Seconds from the beginning."""
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
    """How often a row of numbers changes its direction."""
    steps = [after - before for before, after in itertools.pairwise(numbers) if after != before]
    return sum((before > 0) != (after > 0) for before, after in itertools.pairwise(steps))
