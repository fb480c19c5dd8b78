"""Engines of a group with distributed experts, as threads of the test. Each is a complete engine with its own requests."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from penstock_common.types.request import EngineCoreRequest
from penstock_enginecore.core.engine_core import EngineCore
from tests.fakes.engines.in_process import Run, answer, build_engine, generate
from tests.fakes.engines.thread_group import thread_group


class Watched:
    """``ForwardPass`` that records ``logits``: all rows that it has returned."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.logits: list[torch.Tensor] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def run(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        output = self._inner.run(batch, *args, **kwargs)
        self.logits += output.logits.clone().unbind()
        return output


class ExpertRanks:
    """``size`` engines, by rank, with the checkpoint at ``path``. If ``slots`` is 0, it is the minimum for all experts."""

    def __init__(self, path: Path, size: int, *, slots: int = 0, dispatch: str = "allgather", **sections: Any) -> None:
        shared = {
            "coordinator": {"address": "none:1"},
            "data_parallel": {"size": max(size, 2), "min_size": size},
            "expert_parallel": {"enabled": True, "slots": slots, "dispatch": dispatch},
        }
        self.engines = [build_engine(path, **shared, **sections) for _ in range(size)]
        self.forwards = [watch(engine) for engine in self.engines]
        self._groups = thread_group(size)
        with ThreadPoolExecutor(size) as pool:
            list(pool.map(self._join, range(size)))

    def _join(self, rank: int) -> None:
        link: Any = SimpleNamespace(collectives=self._groups[rank])
        experts: Any = self.engines[rank].executor.experts
        experts.prepare(1, link, lambda: False)
        experts.join(1, link)

    def generate(self, requests: Sequence[Sequence[Any]]) -> list[Run]:
        """Run each rank's requests, in the form of ``in_process.generate`` or as they come from a frontend.

        A rank that has finished takes part in the steps of the others.
        """

        @torch.inference_mode()
        def run(rank: int) -> Run:
            try:
                done = _run(self.engines[rank], requests[rank]) if requests[rank] else Run()
                while any(runner_of(self.engines[rank]).experts.spread.take_part()):
                    pass
            except BaseException:
                self._groups[rank].abort()
                raise
            return done

        with ThreadPoolExecutor(len(self.engines)) as pool:
            return list(pool.map(run, range(len(self.engines))))

    def rows(self) -> set[bytes]:
        """Return the logits of all rows from which any rank has sampled."""
        return {row.numpy().tobytes() for forward in self.forwards for row in forward.logits}


def _run(engine: EngineCore, requests: Sequence[Any]) -> Run:
    whole = isinstance(requests[0], EngineCoreRequest)
    return answer(engine, requests) if whole else generate(engine, requests)


def runner_of(engine: Any) -> Any:
    """Return the ``GenerationRunner`` of an engine in this process."""
    return engine.executor._worker.runner


def watch(engine: EngineCore) -> Watched:
    """Record the rows of an engine from now on."""
    runner = runner_of(engine)
    runner._forward = Watched(runner._forward)
    return runner._forward  # type: ignore[no-any-return]
