"""Inputs of a step, as the persistent batch prepares them."""

from dataclasses import dataclass

import numpy as np

from penstock_enginecore.attention.base import AttentionMetadata, IntArray
from penstock_enginecore.lora.adapter import LoraSegment


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A step in a flat batch.

    Attributes:
        request_ids: Requests of the step, in batch order.
        token_ids: int64 ``[tokens]``. Tokens that are not on the host yet have the ID 0.
        positions: int64 ``[tokens]``.
        attention: One entry per KV cache group.
        sampling_requests: Indices of the requests that get a token.
        logits_indices: Rows of the flat batch whose logits are needed. For each sampling request, these are the last
            token that is not a draft, and all drafts.
        unknown: Indices in the flat batch of tokens that are not on the host yet, int64 ``[n]``.
        unknown_rows: Row of the persistent batch for each of these tokens. The token is the row's newest.
        drafts: Drafted tokens of each sampling request, or None if no request has drafts.
        segments: Ranges of tokens that use a LoRA adapter.
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
        """IDs of the requests that get tokens."""
        return [self.request_ids[i] for i in self.sampling_requests]

    @property
    def rows(self) -> "SampledRows":
        """Request and draft position of each row of logits."""
        sampling_ids = self.sampling_ids
        if self.drafts is None:
            return SampledRows(sampling_ids, None)
        lengths = [len(drafts) + 1 for drafts in self.drafts]
        request_ids = [key for key, length in zip(sampling_ids, lengths, strict=True) for _ in range(length)]
        return SampledRows(request_ids, np.concatenate([np.arange(length) for length in lengths]))


@dataclass(frozen=True, slots=True)
class SampledRows:
    """Rows of logits. ``request_ids`` has the request of each row.

    ``offsets``, int64 ``[rows]``, is the number of drafts before each row. It is None if no request has drafts.
    """

    request_ids: list[str]
    offsets: IntArray | None


@dataclass(frozen=True, slots=True)
class PromptTargets:
    """Prompt tokens of a request that a step can score.

    Attributes:
        rows: Rows of the flat batch whose logits predict ``token_ids``.
        count: Number of most likely tokens to report for each of ``token_ids``.
    """

    request_id: str
    rows: IntArray
    token_ids: IntArray
    count: int


@dataclass(frozen=True, slots=True)
class ExpectedTokens:
    """Tokens that a step has chosen, but that are not on the host yet.

    Attributes:
        rows: Rows of the batch, int64 ``[n]``.
        places: Positions of the tokens in these rows.
        tenants: Number of requests that each row had had when the step was launched. A different number later shows
            that the row now belongs to another request.
    """

    rows: IntArray
    places: IntArray
    tenants: IntArray
