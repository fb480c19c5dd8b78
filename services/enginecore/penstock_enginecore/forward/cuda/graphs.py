"""Steps that were captured once and are replayed: one launch for all of a step's.

The first step of a shape is launched one by one, which also compiles what it needs, and is captured behind that. Later ones are
replays: they read their inputs from, and leave their results in, the tensors that the first one used.
"""

import logging
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from msgspec.structs import replace

from penstock_enginecore.core.worker_stats import GraphStats

logger = logging.getLogger(__name__)

Launch = Callable[[], torch.Tensor]
"""Launches the work of a step and returns the tensor that its results will be in."""


class Graph(Protocol):
    """The work of a step."""

    def capture(self, launch: Launch) -> torch.Tensor:
        """Keep what ``launch`` launches, and return what it returns. RuntimeError where something of it cannot be captured."""

    def replay(self) -> None:
        """Launch it again."""


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: Graph
    result: torch.Tensor


@dataclass(frozen=True, slots=True)
class Padded:
    """What a step computes: ``tokens``, ``padding_tokens`` among them, and ``padding_rows`` among the rows that get logits."""

    tokens: int = 0
    padding_tokens: int = 0
    padding_rows: int = 0


UNPADDED = Padded()


class StepGraphs:
    """Graphs by the shape of a step. ``make_graph`` makes an empty one. ``renew`` is called when the last of them has gone, and
    with it what they shared.
    """

    def __init__(self, make_graph: Callable[[], Graph], renew: Callable[[], None] = lambda: None) -> None:
        self._make_graph = make_graph
        self._renew = renew
        self._captured: dict[Hashable, _Captured] = {}
        self.failure = ""
        """Why steps are not captured any more; empty while they are."""
        self._counts = GraphStats()

    @property
    def stats(self) -> GraphStats:
        """Any thread may ask."""
        return replace(self._counts, captured=len(self._captured))

    def run(self, shape: Hashable, launch: Launch, padded: Padded = UNPADDED) -> torch.Tensor:
        """The results of a step of ``shape``, whose inputs have been brought. ``padded``: how much of it nobody asked for."""
        known = self._captured.get(shape)
        if known is not None:
            known.graph.replay()
            counts = self._counts
            self._counts = replace(
                counts,
                replays=counts.replays + 1,
                tokens=counts.tokens + padded.tokens,
                padding_tokens=counts.padding_tokens + padded.padding_tokens,
                padding_rows=counts.padding_rows + padded.padding_rows,
            )
            return known.result
        self.count_launched()
        result = launch()
        if not self.failure:
            self._capture(shape, launch)
        return result

    def count_launched(self) -> None:
        """A step that is launched piece by piece."""
        self._counts = replace(self._counts, launched=self._counts.launched + 1)

    def clear(self) -> None:
        """Forget all of them: the tensors that they read or write are going."""
        if self._captured:
            self._captured.clear()
            self._renew()

    def _capture(self, shape: Hashable, launch: Launch) -> None:
        graph = self._make_graph()
        try:
            self._captured[shape] = _Captured(graph, graph.capture(launch))
        except RuntimeError as e:
            self.failure = str(e)
            logger.warning("steps are launched one by one from now on, which is slower: capturing %s: %s", shape, e)


class CudaGraph:
    """A ``Graph`` by CUDA, captured on ``stream``. Graphs of one ``pool`` share what memory of their own they need, and so must
    not run at once.
    """

    def __init__(self, stream: torch.cuda.Stream, pool: Any) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._stream = stream
        self._pool = pool

    def capture(self, launch: Launch) -> torch.Tensor:
        """Other threads may go on calling CUDA meanwhile."""
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = launch()
            except BaseException:
                with suppress(RuntimeError):  # that says no more than that something went wrong before
                    self._graph.capture_end()
                raise
            self._graph.capture_end()
            return result

    def replay(self) -> None:
        """On the current stream."""
        self._graph.replay()


class _SharedPool:
    """The pool of graphs that live together. PyTorch gives it up with the last of them, and refuses to capture into it then."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Take another one."""
        self.handle: Any = torch.cuda.graph_pool_handle()


def cuda_graphs() -> StepGraphs:
    """Graphs of the current device."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    pool = _SharedPool()
    return StepGraphs(lambda: CudaGraph(stream, pool.handle), pool.renew)
