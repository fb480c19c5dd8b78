"""One sequence on its way from a frontend to an engine."""

import msgspec

from penstock_common.types.pooling import PoolingParams
from penstock_common.types.prompt_embeds import PromptEmbeds
from penstock_common.types.sampling import SamplingParams

NO_SAMPLING = SamplingParams(temperature=0.0, max_tokens=1)
"""Stands in a pooling request, which samples nothing."""


MIN_TENANT_WEIGHT = 0.001
MAX_TENANT_WEIGHT = 1000.0


class ReasoningTokens(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a model's reasoning stands between."""

    begin_token_id: int
    end_token_id: int


class EngineCoreRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Field for field ``penstock.enginecore.v1.EngineCoreRequest``, as far as engines serve it.

    ``attempt`` counts the engines that were given this request; ``never_admitted``: each of them refused it.
    ``prior_output_token_ids`` are the tokens an earlier
    attempt delivered: they count as output (max_tokens, stops, seeded draws), never as prompt.
    With ``pooling_params`` the request produces vectors, and ``sampling_params`` means nothing. ``second_text_start``: where
    the second text of a pair begins in the prompt. Where ``prompt_embeds`` has a vector, the token id means nothing.
    With ``reasoning_parser_kwargs`` a constraint holds behind the reasoning. ``reasoning_ended``: whether the prompt has ended
    that; False: it has begun it; None: the engine looks at the prompt's last tokens.
    ``arrival_time`` and ``deadline`` are seconds since the Unix epoch. Tenants share engines by ``tenant_weight``.
    ``request_number`` stands for request and attempt in ``TokenColumns``; 0: it has none.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams = NO_SAMPLING
    pooling_params: PoolingParams | None = None
    external_request_id: str = ""
    arrival_time: float = 0.0
    cache_salt: str = ""
    data_parallel_rank: int | None = None
    current_wave: int = 0
    priority: int = 0
    attempt: int = 0
    never_admitted: bool = False
    prior_output_token_ids: list[int] = []
    deadline: float | None = None
    second_text_start: int | None = None
    prompt_embeds: PromptEmbeds | None = None
    trace_context: dict[str, str] = {}
    tenant: str = ""
    tenant_weight: float = 1.0
    request_number: int = 0
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: ReasoningTokens | None = None
