"""Log-probabilities of a step, as its output reports them."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from penstock_common.types.logprobs import Logprobs
from penstock_enginecore.attention.base import IntArray
from penstock_enginecore.executor.input_batch import PromptTargets
from penstock_enginecore.sample.logprobs import token_logprobs

_CHUNK_BYTES = 64 * 2**20
"""Float32 logits of prompt tokens at one time, at most, unless a single row has more."""


class Head(Protocol):
    """The last part of a model on its own, see ``models.head``. What ``capture`` keeps is its own affair."""

    def capture(self) -> AbstractContextManager[Any]:
        """Keep the hidden states of the forward pass in the ``with`` block, for ``logits``."""

    def logits(self, states: Any, rows: torch.Tensor) -> torch.Tensor:
        """Logits ``[len(rows), vocab]`` at ``rows`` (int64) of the flat batch of the pass that gave ``states``."""


@dataclass(frozen=True, slots=True)
class OutputScores:
    """Raw logits ``[len(counts), vocab]`` of the requests that want log-probabilities: see ``InputBatch.logprobs``."""

    logits: torch.Tensor
    wanted: Sequence[tuple[int, int]]

    @classmethod
    def of(cls, logits: torch.Tensor, wanted: Sequence[tuple[int, int]], *, overwritten: bool) -> "OutputScores":
        """Of the rows of ``logits`` that ``wanted`` names: copies where the sampler overwrites them."""
        if len(wanted) == len(logits) and not overwritten:
            return cls(logits, wanted)
        rows = torch.tensor([row for row, _ in wanted], dtype=torch.int64, device=logits.device)
        return cls(logits[rows], wanted)

    def logprobs(self, request_ids: Sequence[str], token_ids: IntArray) -> dict[str, Logprobs]:
        """Those of the sampled ``token_ids``, by request id; both parallel to the rows that were sampled."""
        if not self.wanted:
            return {}
        chosen = token_ids[[row for row, _ in self.wanted]]
        vocab = self.logits.shape[1]
        counts = [_count(count, vocab) for _, count in self.wanted]
        scored = token_logprobs(self.logits, torch.from_numpy(chosen).to(self.logits.device), max(counts))
        result = {}
        for i, (row, _) in enumerate(self.wanted):
            result[request_ids[row]] = Logprobs()
            scored.add_to(result[request_ids[row]], i, counts[i])
        return result


class PromptScorer:
    """Scores prompt tokens. Their logits are made from the hidden states of the forward pass, a few rows at a time, so that
    a long prompt needs no more memory than a short one. A model that does not come apart puts them out in the pass itself.
    """

    def __init__(self, head: Head, device: torch.device, *, comes_apart: bool) -> None:
        self._head = head
        self._device = device
        self._comes_apart = comes_apart

    def run(
        self, forward: Callable[[IntArray], torch.Tensor], sampled_rows: IntArray, targets: Sequence[PromptTargets]
    ) -> tuple[torch.Tensor, dict[str, Logprobs]]:
        """Logits ``[len(sampled_rows), vocab]``, and log-probabilities of ``targets`` by request id. ``forward`` runs the
        step and returns the logits of the rows of the flat batch it is given.
        """
        if not targets:
            return forward(sampled_rows), {}
        rows = np.concatenate([target.rows for target in targets])
        with self._head.capture() as states:
            logits = forward(sampled_rows if self._comes_apart else np.concatenate([sampled_rows, rows]))
        result: dict[str, Logprobs] = {}
        start = len(sampled_rows)
        for target in targets:
            own = None if self._comes_apart else logits[start : start + len(target.rows)]
            start += len(target.rows)
            result[target.request_id] = self._score(target, states, own, logits.shape[1])
        return logits[: len(sampled_rows)], result

    def _score(self, target: PromptTargets, states: Any, logits: torch.Tensor | None, vocab: int) -> Logprobs:
        scored = Logprobs()
        size = max(1, _CHUNK_BYTES // (4 * vocab))
        count = _count(target.count, vocab)
        for start in range(0, len(target.rows), size):
            part = slice(start, start + size)
            rows = torch.from_numpy(target.rows[part]).to(self._device)
            token_ids = torch.from_numpy(target.token_ids[part]).to(self._device)
            part_logits = self._head.logits(states, rows) if logits is None else logits[part]
            of_part = token_logprobs(part_logits, token_ids, count)
            for row in range(len(rows)):
                of_part.add_to(scored, row, count)
        return scored


def _count(count: int, vocab: int) -> int:
    """How many of the likeliest tokens: -1 is all."""
    return vocab if count < 0 else min(count, vocab)
