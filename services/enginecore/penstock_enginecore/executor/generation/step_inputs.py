"""What the persistent batch says of a step."""

from dataclasses import dataclass

import numpy as np

from penstock_enginecore.attention.base import AttentionMetadata, IntArray
from penstock_enginecore.lora.adapter import LoraSegment


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A step laid out flat. ``token_ids`` and ``positions`` int64 ``[tokens]``; ``attention``: one entry per KV cache
    group.

    ``sampling_requests``: which requests of the step get a token, ``logits_indices``: the last token of each of those.
    ``drafts``: of each of these the tokens that were drafted behind its final ones, where any has some; each of them has a row of
    logits for its last final token, and one for each draft.
    ``unknown``: which of the tokens are not on the host yet, int64 ``[n]``, ``unknown_rows``: the rows of the batch whose newest
    they are; their ids are 0 here. ``segments``: the tokens that have adapters.
    """

    request_ids: list[str]
    token_ids: IntArray
    positions: IntArray
    attention: list[AttentionMetadata]
    sampling_requests: IntArray
    logits_indices: IntArray
    unknown: IntArray
    unknown_rows: IntArray
    drafts: list[list[int]] | None = None
    segments: tuple[LoraSegment, ...] = ()

    @property
    def sampling_ids(self) -> list[str]:
        """The requests that get tokens."""
        return [self.request_ids[i] for i in self.sampling_requests]

    @property
    def rows(self) -> "SampledRows":
        """The rows of logits."""
        sampling_ids = self.sampling_ids
        if self.drafts is None:
            return SampledRows(sampling_ids, None)
        lengths = [len(drafts) + 1 for drafts in self.drafts]
        request_ids = [key for key, length in zip(sampling_ids, lengths, strict=True) for _ in range(length)]
        return SampledRows(request_ids, np.concatenate([np.arange(length) for length in lengths]))


@dataclass(frozen=True, slots=True)
class SampledRows:
    """Rows of logits: of which request each is, and behind how many of its drafts, int64 ``[rows]``; None: behind none."""

    request_ids: list[str]
    offsets: IntArray | None


@dataclass(frozen=True, slots=True)
class PromptTargets:
    """Prompt tokens of a request that a step can score: ``rows`` of the flat batch, whose logits predict ``token_ids``.
    ``count``: how many of the likeliest tokens to report beside each.
    """

    request_id: str
    rows: IntArray
    token_ids: IntArray
    count: int


@dataclass(frozen=True, slots=True)
class ExpectedTokens:
    """Tokens that were chosen and are not on the host yet: ``rows`` int64 ``[n]`` of the batch, the ``places`` of the tokens in
    these, and the ``tenants`` that the rows had.
    """

    rows: IntArray
    places: IntArray
    tenants: IntArray
