"""Engines of a group that share the experts of a model, as threads of the test: a whole engine each, with requests of its own."""

import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from penstock_enginecore.config import ExpertParallelConfig
from penstock_enginecore.core.engine_core import EngineCore
from penstock_enginecore.executor import worker as worker_module
from penstock_enginecore.executor.loading import load_runner
from penstock_enginecore.experts.placement import Placement, fewest_slots
from penstock_enginecore.experts.rank import ExpertRank
from penstock_enginecore.experts.spread import SpreadExperts
from tests.fakes.engines.in_process import Run, build_engine, generate
from tests.fakes.engines.thread_group import ThreadGroup, thread_group

_COUNT = struct.Struct("<q")


class InStep:
    """A ``ForwardPass`` that tells the others of its tokens before it computes. ``logits``: all rows that it gave."""

    def __init__(self, inner: Any, experts: SpreadExperts | None, group: ThreadGroup | None) -> None:
        self._inner, self._experts, self._group = inner, experts, group
        self.logits: list[torch.Tensor] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def run(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if self._experts is not None:
            self._experts.begin_step(self._counts(len(batch.token_ids)))
        output = self._inner.run(batch, *args, **kwargs)
        self.logits += output.logits.clone().unbind()
        return output

    def take_part(self) -> None:
        """Until nobody has tokens."""
        assert self._experts is not None
        while max(counts := self._counts(0)):
            self._experts.begin_step(counts)
            self._experts.take_part()

    def give_up(self) -> None:
        """Let nobody wait for this rank."""
        assert self._group is not None
        self._group.abort()

    def _counts(self, own: int) -> list[int]:
        assert self._group is not None
        return [_COUNT.unpack(row)[0] for row in self._group.exchange(_COUNT.pack(own))]


class ExpertRanks:
    """``size`` engines, by rank, over the checkpoint at ``path``. ``slots`` 0: as few as hold all experts."""

    def __init__(self, path: Path, size: int, *, slots: int = 0, dispatch: str = "allgather", **sections: Any) -> None:
        self.engines: list[EngineCore] = []
        self.forwards: list[InStep] = []
        for rank, group in enumerate(thread_group(size)):
            own = ExpertRank.of(rank, size, ExpertParallelConfig(slots=slots, dispatch=dispatch))

            def load(*args: Any, own: ExpertRank = own, **kwargs: Any) -> Any:
                return load_runner(*args, **kwargs, rank=own)

            with patch.object(worker_module, "load_runner", load):
                engine = build_engine(path, **sections)
            runner = runner_of(engine)
            layers, experts = len(runner.experts.layers), len(runner.experts.layers[0].routed)
            placement = Placement.even(layers, experts, size, slots or fewest_slots(experts, size))
            runner.experts.join(group, placement)
            runner._forward = InStep(runner._forward, runner.experts, group)
            self.engines.append(engine)
            self.forwards.append(runner._forward)

    def generate(self, requests: Sequence[Sequence[Any]]) -> list[Run]:
        """Each rank's requests, as ``in_process.generate`` takes them. A rank that is done takes part in the others' steps."""

        @torch.inference_mode()
        def run(rank: int) -> Run:
            try:
                done = generate(self.engines[rank], requests[rank]) if requests[rank] else Run()
                self.forwards[rank].take_part()
            except BaseException:
                self.forwards[rank].give_up()
                raise
            return done

        with ThreadPoolExecutor(len(self.engines)) as pool:
            return list(pool.map(run, range(len(self.engines))))

    def rows(self) -> set[bytes]:
        """Logits of every row that any rank sampled from."""
        return {row.numpy().tobytes() for forward in self.forwards for row in forward.logits}


def runner_of(engine: Any) -> Any:
    """The ``GenerationRunner`` of an engine in this process."""
    return engine.executor._worker.runner


def watch(engine: EngineCore) -> InStep:
    """An engine that holds all experts: its rows."""
    runner = runner_of(engine)
    runner._forward = InStep(runner._forward, None, None)
    return runner._forward  # type: ignore[no-any-return]
