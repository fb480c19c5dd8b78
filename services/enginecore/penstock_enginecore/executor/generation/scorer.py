"""Log-probabilities of a step, as its output reports them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from penstock_common.types.logprobs import Logprobs
from penstock_enginecore.attention.base import IntArray
from penstock_enginecore.executor.generation.step_inputs import PromptTargets
from penstock_enginecore.forward.base import ForwardBatch, ForwardOutput, ForwardPass
from penstock_enginecore.sample.logprobs import token_logprobs

_MAX_LOGITS_BYTES = 64 * 2**20
"""Float32 logits of prompt tokens at one time, at most, unless a single row has more."""


@dataclass(frozen=True, slots=True)
class OutputScores:
    """Raw ``logits`` ``[len(wanted), vocab]`` of the requests that want log-probabilities. ``wanted``: which rows they are of
    those that sample, and of how many of the likeliest tokens.
    """

    logits: torch.Tensor
    wanted: Sequence[tuple[int, int]]

    @classmethod
    def of(cls, logits: torch.Tensor, wanted: Sequence[tuple[int, int]], *, overwritten: bool) -> "OutputScores":
        """Of the rows of ``logits`` that ``wanted`` names: copies where the sampler overwrites them."""
        if not wanted or (len(wanted) == len(logits) and not overwritten):
            return cls(logits, wanted)
        rows = torch.tensor([row for row, _ in wanted], dtype=torch.int64, device=logits.device)
        return cls(logits[rows], wanted)

    def logprobs(self, request_ids: Sequence[str], token_ids: IntArray) -> dict[str, Logprobs]:
        """Those of the sampled ``token_ids``, by request id; both parallel to the rows that were sampled. A request with several
        rows has those of all of them, in their order.
        """
        if not self.wanted:
            return {}
        chosen = token_ids[[row for row, _ in self.wanted]]
        vocab = self.logits.shape[1]
        counts = [_count(count, vocab) for _, count in self.wanted]
        scored = token_logprobs(self.logits, torch.from_numpy(chosen).to(self.logits.device), max(counts))
        result: dict[str, Logprobs] = {}
        for i, (row, _) in enumerate(self.wanted):
            scored.add_to(result.setdefault(request_ids[row], Logprobs()), i, counts[i])
        return result


def score_prompts(
    forward: ForwardPass, batch: ForwardBatch, sampled_rows: IntArray, targets: Sequence[PromptTargets]
) -> tuple[ForwardOutput, dict[str, Logprobs]]:
    """Run a step: its output with logits ``[len(sampled_rows), vocab]``, and log-probabilities of ``targets`` by request id.

    The logits of prompt tokens are made from the hidden states of the forward pass, a few rows at a time, so that a long prompt
    needs no more memory than a short one. Where the head does not run on its own they come out of the pass itself.
    """
    separate = forward.separate_head
    rows = sampled_rows if separate else np.concatenate([sampled_rows, *(target.rows for target in targets)])
    output = forward.run(batch, rows, keep_states=separate)
    logits = output.logits
    result: dict[str, Logprobs] = {}
    start = len(sampled_rows)
    for target in targets:
        own = None if separate else logits[start : start + len(target.rows)]
        start += len(target.rows)
        result[target.request_id] = _score(forward, target, output.states, own, logits.shape[1])
    return replace(output, logits=logits[: len(sampled_rows)], states=None, launched=None), result


def _score(
    forward: ForwardPass, target: PromptTargets, states: Any, logits: torch.Tensor | None, vocab: int
) -> Logprobs:
    """Log-probabilities of ``target``. Its ``logits`` ``[rows, vocab]``, or the ``states`` to make them of."""
    scored = Logprobs()
    size = max(1, _MAX_LOGITS_BYTES // (4 * vocab))
    count = _count(target.count, vocab)
    for start in range(0, len(target.rows), size):
        part = slice(start, start + size)
        rows = torch.from_numpy(target.rows[part]).to(forward.device)
        token_ids = torch.from_numpy(target.token_ids[part]).to(forward.device)
        part_logits = forward.head(states, rows) if logits is None else logits[part]
        of_part = token_logprobs(part_logits, token_ids, count)
        for row in range(len(rows)):
            of_part.add_to(scored, row, count)
    return scored


def _count(count: int, vocab: int) -> int:
    """How many of the likeliest tokens: -1 is all."""
    return vocab if count < 0 else min(count, vocab)
