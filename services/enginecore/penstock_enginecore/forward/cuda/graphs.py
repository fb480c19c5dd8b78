"""CUDA graphs: steps that are captured once and then replayed with a single launch.

The first step of a shape is launched kernel by kernel, which also compiles the kernels, and is then captured. Later
steps of the shape are replayed. Replays use the input and result tensors of the first step.
"""

import logging
from collections import Counter
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from msgspec.structs import replace

from penstock_enginecore.core.worker_stats import GraphStats

logger = logging.getLogger(__name__)

Launch = Callable[[], torch.Tensor]
"""Function that launches the work of a step and returns the tensor for its results."""


class Graph(Protocol):
    """Graph that can contain the captured work of one step."""

    def capture(self, launch: Launch) -> torch.Tensor:
        """Capture the work that ``launch`` launches, and return its result. Raises RuntimeError if a part of the work
        cannot be captured.
        """

    def replay(self) -> None:
        """Launch the captured work again."""


@dataclass(slots=True)
class _Captured:
    graph: Graph
    result: torch.Tensor
    replays: int = 0


@dataclass(frozen=True, slots=True)
class Padded:
    """Size of a padded step.

    Attributes:
        tokens: Number of tokens, including padding.
        padding_tokens: Number of padding tokens.
        padding_rows: Number of padding rows among the rows that get logits.
    """

    tokens: int = 0
    padding_tokens: int = 0
    padding_rows: int = 0


UNPADDED = Padded()


_MAX_SHORTAGES = 3
"""Number of captures of one shape that may run out of memory before the shape is launched without a graph."""
_MAX_FAILURES = 3
"""Number of shapes whose capture may fail before the first capture succeeds. Then no shape is captured, because the
model's work cannot be captured.
"""


class StepGraphs:
    """Captured graphs by step shape.

    A failed capture affects only its own shape, whose steps are then launched without a graph. A capture that runs out
    of memory drops the quarter of the graphs that were replayed least, and the next step of the shape is captured
    again. Steps of a dropped shape are launched until ``clear`` is called, so that shapes do not displace each other
    again and again.

    Args:
        make_graph: Returns an empty graph.
        renew: Called after all graphs were dropped.
        make_room: Called after a capture ran out of memory and graphs were dropped, to free unused memory.
    """

    def __init__(
        self,
        make_graph: Callable[[], Graph],
        renew: Callable[[], None] = lambda: None,
        make_room: Callable[[], None] = lambda: None,
    ) -> None:
        self._make_graph = make_graph
        self._renew = renew
        self._make_room = make_room
        self._captured: dict[Hashable, _Captured] = {}
        self._failures: dict[Hashable, str] = {}
        """Reasons of failed captures by shape, without captures that ran out of memory."""
        self._shortages: Counter[Hashable] = Counter()
        """Numbers of captures that ran out of memory, by shape, since the last ``clear``."""
        self._dropped: set[Hashable] = set()
        self._counts = GraphStats()

    @property
    def failure(self) -> str:
        """Reason of the last failed capture if captures have failed and none has succeeded, or empty."""
        return "" if self._counts.captures else next(reversed(self._failures.values()), "")

    @property
    def stats(self) -> GraphStats:
        """Numbers of captured graphs, captures, replays, launched steps and padding rows so far. Thread-safe."""
        return replace(self._counts, captured=len(self._captured))

    def refuses(self, shape: Hashable) -> bool:
        """Return whether steps of ``shape`` are launched without a graph and are not captured."""
        given_up = len(self._failures) >= _MAX_FAILURES and not self._counts.captures
        short = self._shortages[shape] >= _MAX_SHORTAGES
        return given_up or short or shape in self._failures or shape in self._dropped

    def run(self, shape: Hashable, launch: Launch, padded: Padded = UNPADDED) -> torch.Tensor:
        """Return the results of a step of ``shape``, whose inputs are already on the device. If the step is replayed,
        ``padded`` is added to the statistics.
        """
        known = self._captured.get(shape)
        if known is not None:
            known.graph.replay()
            known.replays += 1
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
        if not self.refuses(shape):
            self._capture(shape, launch)
        return result

    def count_launched(self) -> None:
        """Count a step that is launched without a graph."""
        self._counts = replace(self._counts, launched=self._counts.launched + 1)

    def clear(self) -> None:
        """Drop all graphs, because the tensors that the graphs use will be freed."""
        self._shortages.clear()
        self._dropped.clear()
        if self._captured:
            self._captured.clear()
            self._renew()

    def _capture(self, shape: Hashable, launch: Launch) -> None:
        graph = self._make_graph()
        try:
            self._captured[shape] = _Captured(graph, graph.capture(launch))
            self._counts = replace(self._counts, captures=self._counts.captures + 1)
            return
        except RuntimeError as e:
            reason, short = str(e), _is_shortage(e)
        # Only here has the error, whose traceback references the tensors of the failed capture, been freed.
        del graph
        self._counts = replace(self._counts, failures=self._counts.failures + 1)
        if short:
            self._handle_shortage(shape, reason)
            return
        self._failures[shape] = reason
        logger.warning(
            "cannot capture steps of this shape as a CUDA graph, so these steps launch each kernel separately (slower) "
            "shape=%s reason=%s",
            shape,
            reason,
        )

    def _handle_shortage(self, shape: Hashable, reason: str) -> None:
        """Drop the graphs that were replayed least, after the capture of ``shape`` ran out of memory."""
        self._shortages[shape] += 1
        by_use = sorted(self._captured, key=lambda other: self._captured[other].replays)
        least = by_use[: -(-len(by_use) // 4)]
        for other in least:
            del self._captured[other]
        self._dropped.update(least)
        if least and not self._captured:
            self._renew()
        self._make_room()
        logger.warning(
            "too little device memory to capture a step as a CUDA graph; dropped the least used graphs, whose steps launch "
            "each kernel separately (slower); lower cache.memory_utilization shape=%s dropped=%d left=%d attempts_left=%d "
            "reason=%s",
            shape,
            len(least),
            len(self._captured),
            _MAX_SHORTAGES - self._shortages[shape],
            reason,
        )


def _is_shortage(error: RuntimeError) -> bool:
    """Return whether a capture failed because the device has too little memory. The driver reports a shortage while it
    creates a graph as an error of another type than torch's allocator.
    """
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower()


class CudaGraph:
    """CUDA graph, captured on ``stream``. Graphs of one ``pool`` share their internal memory, so only one of them may
    run at a time.
    """

    def __init__(self, stream: torch.cuda.Stream, pool: Any) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._stream = stream
        self._pool = pool

    def capture(self, launch: Launch) -> torch.Tensor:
        """Capture the work of ``launch`` and return its result. Other threads may call CUDA during the capture."""
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = launch()
            except BaseException:
                with suppress(RuntimeError):  # capture_end only reports that an earlier call failed
                    self._graph.capture_end()
                raise
            self._graph.capture_end()
            return result

    def replay(self) -> None:
        """Launch the graph on the current stream."""
        self._graph.replay()


class _SharedPool:
    """Memory pool that all graphs share. PyTorch frees a pool together with the last graph in it, and then no graph can
    be captured into that pool.
    """

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Create a new memory pool."""
        self.handle: Any = torch.cuda.graph_pool_handle()


def cuda_graphs() -> StepGraphs:
    """Return an empty collection of CUDA graphs for the current device."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    pool = _SharedPool()
    return StepGraphs(lambda: CudaGraph(stream, pool.handle), pool.renew, torch.cuda.empty_cache)
