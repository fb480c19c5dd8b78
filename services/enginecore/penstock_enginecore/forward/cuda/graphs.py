"""CUDA graphs: steps that are captured once and then replayed with a single launch.

The first step of a shape is launched kernel by kernel, which also compiles the kernels, and is then captured. Later
steps of the shape are replayed. Replays use the input and result tensors of the first step.
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
"""Function that launches the work of a step and returns the tensor for its results."""


class Graph(Protocol):
    """Graph that can contain the captured work of one step."""

    def capture(self, launch: Launch) -> torch.Tensor:
        """Capture the work that ``launch`` launches, and return its result. Raises RuntimeError if a part of the work
        cannot be captured.
        """

    def replay(self) -> None:
        """Launch the captured work again."""


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: Graph
    result: torch.Tensor


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


class StepGraphs:
    """Captured graphs by step shape. ``make_graph`` returns an empty graph. ``clear`` calls ``renew`` after it has
    dropped all graphs.
    """

    def __init__(self, make_graph: Callable[[], Graph], renew: Callable[[], None] = lambda: None) -> None:
        self._make_graph = make_graph
        self._renew = renew
        self._captured: dict[Hashable, _Captured] = {}
        self.failure = ""
        """Reason why new shapes are no longer captured, or empty if no capture has failed."""
        self._counts = GraphStats()

    @property
    def stats(self) -> GraphStats:
        """Numbers of captured graphs, replays, launched steps and padding rows so far. Thread-safe."""
        return replace(self._counts, captured=len(self._captured))

    def run(self, shape: Hashable, launch: Launch, padded: Padded = UNPADDED) -> torch.Tensor:
        """Return the results of a step of ``shape``, whose inputs are already on the device. If the step is replayed,
        ``padded`` is added to the statistics.
        """
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
        """Count a step that is launched without a graph."""
        self._counts = replace(self._counts, launched=self._counts.launched + 1)

    def clear(self) -> None:
        """Drop all graphs, because the tensors that the graphs use will be freed."""
        if self._captured:
            self._captured.clear()
            self._renew()

    def _capture(self, shape: Hashable, launch: Launch) -> None:
        graph = self._make_graph()
        try:
            self._captured[shape] = _Captured(graph, graph.capture(launch))
        except RuntimeError as e:
            self.failure = str(e)
            logger.warning(
                "cannot capture a step of this shape as a CUDA graph; no more shapes are captured, and steps of shapes without a "
                "graph launch each kernel separately (slower) shape=%s reason=%s",
                shape,
                e,
            )


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
    return StepGraphs(lambda: CudaGraph(stream, pool.handle), pool.renew)
