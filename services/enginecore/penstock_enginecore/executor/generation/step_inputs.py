"""Inputs of a step, which the persistent batch prepares for the forward pass and for sampling."""

from dataclasses import dataclass

import numpy as np

from penstock_enginecore.attention.base import AttentionMetadata, IntArray
from penstock_enginecore.lora.adapter import LoraSegment


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Inputs of a step, in flat arrays that join the tokens of all requests.

    Attributes:
        request_ids: IDs of the step's requests, in the order of the flat batch.
        token_ids: int64 ``[tokens]``. The ID is 0 for tokens that the host has not received yet.
        positions: int64 ``[tokens]``.
        attention: Attention metadata of each KV cache group.
        sampling_requests: Indices of the requests for which the step samples tokens.
        logits_indices: Indices in the flat batch of the tokens whose logits are needed. For each sampling request,
            these are the last token that is not a draft, and all drafts.
        unknown: Indices in the flat batch of tokens that the host has not received yet, int64 ``[n]``.
        unknown_rows: For each of these tokens, the row of the persistent batch whose newest token it is.
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
        """IDs of the requests for which the step samples tokens."""
        return [self.request_ids[i] for i in self.sampling_requests]

    @property
    def rows(self) -> "SampledRows":
        """Request of each row of logits, and the number of the request's drafts before the row."""
        sampling_ids = self.sampling_ids
        if self.drafts is None:
            return SampledRows(sampling_ids, None)
        lengths = [len(drafts) + 1 for drafts in self.drafts]
        request_ids = [key for key, length in zip(sampling_ids, lengths, strict=True) for _ in range(length)]
        return SampledRows(request_ids, np.concatenate([np.arange(length) for length in lengths]))


@dataclass(frozen=True, slots=True)
class SampledRows:
    """Requests to which the rows of a step's logits belong. ``request_ids`` has the request of each row.

    ``offsets``, int64 ``[rows]``, is the number of the request's drafts before each row. ``offsets`` is None if no
    request has drafts.
    """

    request_ids: list[str]
    offsets: IntArray | None


@dataclass(frozen=True, slots=True)
class PromptTargets:
    """Prompt tokens of a request whose log-probabilities a step can compute.

    Attributes:
        rows: Indices in the flat batch of the tokens whose logits predict ``token_ids``.
        count: Number of most likely tokens to report for each of ``token_ids``.
    """

    request_id: str
    rows: IntArray
    token_ids: IntArray
    count: int


@dataclass(frozen=True, slots=True)
class ExpectedTokens:
    """Tokens that a step has sampled, but that the host has not received yet.

    Attributes:
        rows: Row of the persistent batch for each token, int64 ``[n]``.
        places: Position of each token in its request.
        tenants: Number of requests that had owned each row when the step was launched. If this number has changed
            later, the row belongs to another request.
    """

    rows: IntArray
    places: IntArray
    tenants: IntArray
