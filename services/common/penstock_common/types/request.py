"""Requests from a frontend to an engine: one sequence, its parameters and its context."""

import enum

import msgspec

from penstock_common.lora_registry import LoraAdapter
from penstock_common.types.kv_transfer import KvParams, KvSource
from penstock_common.types.media import MultiModalFeature
from penstock_common.types.octets import Octets
from penstock_common.types.prompt_embeds import PromptEmbeds
from penstock_common.types.sampling import SamplingParams

# The context of a request: all data that do not describe the computation itself.


class RequestContext(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Context of a request: its owner, rank, priority, deadline, and the requests with which it shares cached prefixes.

    Each protocol's ``context_of`` creates the context, and the frontend's ``InputProcessor.checked_context`` completes
    it. All later stages pass the same object on, to the scheduler and the workers. To add a field, change this struct,
    the protocols that support the field, and its readers. If engines need the field, also change the message field of
    the same name.
    """

    external_request_id: str = ""
    """ID by which the client knows the request. If the client sent no ID, the frontend generates one."""
    model: str = ""
    """Model that the client asked for. Empty means the served model.

    Engines do not get this field, because an engine serves only one model.
    """
    lora: str = ""
    """Name of the LoRA adapter that the client asked for, or empty. ``model`` may also name an adapter.

    Engines read ``EngineCoreRequest.lora`` instead.
    """
    data_parallel_rank: int | None = None
    """Rank of the engine that must run the request, or None for any engine. Only the frontend uses this field."""
    priority: int = 0
    """Priority as an int32. Under the priority policy, requests with lower numbers run first."""
    tenant: str = ""
    """Name of the request's tenant, for fair sharing of the engines. Empty for requests without a tenant."""
    tenant_weight: float = 1.0
    """Weight of the tenant relative to other tenants, from MIN_TENANT_WEIGHT to MAX_TENANT_WEIGHT."""
    cache_salt: str = ""
    """Requests share cached prefixes only with requests that have the same salt."""
    arrival_time: float = 0.0
    """Time when the frontend received the request, in seconds since the Unix epoch."""
    deadline: float | None = None
    """Time when the request ends with DEADLINE_EXCEEDED, in seconds since the Unix epoch, or None for no deadline."""
    kv: KvParams = KvParams()
    """Settings of a gateway for the request's KV blocks.

    Engines read the source from ``EngineCoreRequest.kv_source`` instead, because the source changes with each attempt.
    """
    trace_context: dict[str, str] = {}
    """W3C trace context headers of the span that is the parent of the next service's spans. Empty if not traced."""


# Requests that produce vectors rather than tokens.


class PoolingTask(enum.IntEnum):
    """Task of a pooling request: the result to compute from the hidden states. Values equal
    ``penstock.common.v1.PoolingTask``.
    """

    EMBED = 1
    CLASSIFY = 2
    SCORE = 3
    TOKEN_EMBED = 4
    TOKEN_CLASSIFY = 5
    SPARSE_EMBED = 6


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Pooling parameters, with the fields of ``penstock.common.v1.PoolingParams``.

    Attributes:
        dimensions: Number of dimensions of an embedding to keep, or None for all dimensions.
        normalize: Whether embeddings are normalized, or None for the model's default.
    """

    task: PoolingTask
    dimensions: int | None = None
    normalize: bool | None = None
    use_activation: bool = True


class Vectors(msgspec.Struct, frozen=True):
    """Result of a pooling request: float32, row-major, little-endian.

    ``shape`` is ``(n,)``, or ``(tokens, n)`` for tasks that return one vector per token. For sparse embeddings it is
    ``(2, n)``: token IDs in ascending order, and their weights.
    """

    shape: tuple[int, ...]
    data: Octets


NO_SAMPLING = SamplingParams(temperature=0.0, max_tokens=1)
"""Placeholder for the sampling parameters of a pooling request, which samples no tokens."""


MIN_TENANT_WEIGHT = 0.001
MAX_TENANT_WEIGHT = 1000.0


class ReasoningTokens(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tokens that begin and end a model's reasoning."""

    begin_token_id: int
    end_token_id: int


class EngineCoreRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Request to an engine, with the fields of ``penstock.enginecore.v1.EngineCoreRequest`` that engines support."""

    request_id: str
    """Request ID, unique among the requests of a frontend and equal in every attempt."""
    prompt_token_ids: list[int]
    """Token IDs of the prompt, without output tokens of earlier attempts. An ID is ignored at positions where
    ``prompt_embeds`` has a vector.
    """
    sampling_params: SamplingParams = NO_SAMPLING
    """Sampling parameters, ignored if ``pooling_params`` is set."""
    pooling_params: PoolingParams | None = None
    """Pooling parameters. If set, the request produces vectors and no tokens."""
    lora: LoraAdapter | None = None
    """LoRA adapter, or None."""
    context: RequestContext = RequestContext()
    current_wave: int = 0
    """Last wave of the data-parallel group that is known to the frontend."""
    group_epoch: int = 0
    """Epoch of the data-parallel group to which ``current_wave`` belongs. 0 if the frontend knows no group."""
    attempt: int = 0
    """Number of engines that received the request before this engine."""
    never_admitted: bool = False
    """Whether all engines that received the request before this engine refused it."""
    prior_output_token_ids: list[int] = []
    """Output tokens of earlier attempts. These tokens count as output (max_tokens, stops, seeded draws), never as
    prompt.
    """
    second_text_start: int | None = None
    """First position, in the prompt, of the second text of a pair. None if the prompt is a single text."""
    unattended_start: int | None = None
    """First position, in the prompt, of a query's expansion tokens, to which no token attends. None if all tokens attend
    to each other. Only for encoder models.
    """
    prompt_embeds: PromptEmbeds | None = None
    """Prompt embeddings for some or all positions of the prompt, or None."""
    mm_features: list[MultiModalFeature] = []
    """Media items in order of position, without overlaps.

    The token IDs in ``prompt_token_ids`` are ignored at positions of media embeddings.
    """
    request_number: int = 0
    """Number that identifies request and attempt in ``TokenColumns``, or 0 if the request has no number."""
    reasoning_ended: bool | None = None
    """Whether the reasoning ends within the prompt (True), or is still open at its end (False).

    If None, the engine checks the last prompt tokens.
    """
    reasoning_parser_kwargs: ReasoningTokens | None = None
    """Tokens that begin and end the reasoning. Set if a constraint applies only after the reasoning."""
    prediction_token_ids: list[int] = []
    """The client's prediction of the output. The engine looks up drafts in the prediction, which does not change any
    output token.
    """
    kv_source: KvSource | None = None
    """Engine that stores KV blocks of the sequence, or None if no such engine is known."""
    handoff_after_tokens: int = 0
    """Number of output tokens of this attempt after which the engine hands the request over. 0 means no handoff."""

    @property
    def skips_prefix_cache(self) -> bool:
        """Whether the engine computes all prompt tokens, even those in cached blocks.

        That is necessary if the result needs the hidden state of every prompt token, because cached blocks do not
        contain hidden states.
        """
        params = self.sampling_params
        return params.skip_reading_prefix_cache or params.prompt_logprobs is not None or self.pooling_params is not None
