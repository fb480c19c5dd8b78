"""What the persistent batch says of a step."""

from dataclasses import dataclass

from penstock_enginecore.attention.base import AttentionMetadata, IntArray


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A step laid out flat. ``token_ids`` and ``positions`` int64 ``[tokens]``; ``attention``: one entry per KV cache
    group.

    ``sampling_requests``: which requests of the step get a token, ``logits_indices``: the last token of each of those.
    ``unknown``: which of the tokens are not on the host yet, int64 ``[n]``, ``unknown_rows``: the rows of the batch whose newest
    they are; their ids are 0 here.
    """

    request_ids: list[str]
    token_ids: IntArray
    positions: IntArray
    attention: list[AttentionMetadata]
    sampling_requests: IntArray
    logits_indices: IntArray
    unknown: IntArray
    unknown_rows: IntArray


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
