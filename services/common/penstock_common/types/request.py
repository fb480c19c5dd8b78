"""Requests from a frontend to an engine: one sequence, its pooling parameters and its context."""

import enum

import msgspec

from penstock_common.lora_registry import LoraAdapter
from penstock_common.types.kv_transfer import KvParams, KvSource
from penstock_common.types.media import MultiModalFeature
from penstock_common.types.octets import Octets
from penstock_common.types.prompt_embeds import PromptEmbeds
from penstock_common.types.sampling import SamplingParams

# The context of a request, in addition to the computation that it asks for.


class RequestContext(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Owner of a request, where and until when it should run, and what it may share.

    Each protocol's ``context_of`` creates the context, and the frontend's ``InputProcessor.checked_context`` completes
    it. All later stages pass it on as a whole, to the scheduler and the workers. To add a field, change this struct,
    the message field of the same name if it is sent to engines, the protocols that support it, and the readers.
    """

    external_request_id: str = ""
    """ID by which the client knows the request. The frontend generates one if the client gave none."""
    model: str = ""
    """Model that the client asked for. Empty means the served model. The field is not sent to engines, because an
    engine serves one model.
    """
    lora: str = ""
    """LoRA adapter that the client asked for, or empty. ``model`` may also name an adapter. Engines read
    ``EngineCoreRequest.lora`` instead.
    """
    data_parallel_rank: int | None = None
    """Rank of the engine on which the request must run, or None for any. Engines that get the request serve rank 0."""
    priority: int = 0
    """Under the priority policy, lower numbers run first. An int32."""
    tenant: str = ""
    """Tenant whose share of the engines the request uses. Requests without a tenant share the empty name."""
    tenant_weight: float = 1.0
    """The tenant's share relative to others, from MIN_TENANT_WEIGHT to MAX_TENANT_WEIGHT."""
    cache_salt: str = ""
    """Requests share cached prefixes only with requests that have the same salt."""
    arrival_time: float = 0.0
    """Time when the frontend received the request, in seconds since the Unix epoch."""
    deadline: float | None = None
    """Time when the request ends with DEADLINE_EXCEEDED, in seconds since the Unix epoch, or None for no deadline."""
    kv: KvParams = KvParams()
    """Gateway settings for the request's keys and values. Engines get the source from ``EngineCoreRequest.kv_source``,
    which changes with each attempt.
    """
    trace_context: dict[str, str] = {}
    """W3C Trace Context headers of the parent span for the next service's spans. Empty if the request is not traced."""


# Requests that produce vectors rather than tokens.


class PoolingTask(enum.IntEnum):
    """Result to compute from the hidden states. Values equal ``penstock.common.v1.PoolingTask``."""

    EMBED = 1
    CLASSIFY = 2
    SCORE = 3
    TOKEN_EMBED = 4
    TOKEN_CLASSIFY = 5


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Field for field ``penstock.common.v1.PoolingParams``.

    Attributes:
        dimensions: Number of dimensions to keep, or None for all.
        normalize: Whether to normalize, or None for the model's default.
    """

    task: PoolingTask
    dimensions: int | None = None
    normalize: bool | None = None
    use_activation: bool = True


class Vectors(msgspec.Struct, frozen=True):
    """Result of a pooling request: float32, row-major, little-endian. ``shape`` is ``(n,)``, or ``(tokens, n)`` for
    token tasks.
    """

    shape: tuple[int, ...]
    data: Octets


NO_SAMPLING = SamplingParams(temperature=0.0, max_tokens=1)
"""Placeholder in a pooling request, which samples nothing."""


MIN_TENANT_WEIGHT = 0.001
MAX_TENANT_WEIGHT = 1000.0


class ReasoningTokens(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tags around a model's reasoning."""

    begin_token_id: int
    end_token_id: int


class EngineCoreRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The fields of ``penstock.enginecore.v1.EngineCoreRequest`` that engines support."""

    request_id: str
    """Request ID, unique among the requests of a frontend and equal in every attempt."""
    prompt_token_ids: list[int]
    """Prompt tokens, never output tokens. An ID is ignored at positions where ``prompt_embeds`` has a vector."""
    sampling_params: SamplingParams = NO_SAMPLING
    """Sampling parameters, ignored if ``pooling_params`` is set."""
    pooling_params: PoolingParams | None = None
    """Pooling parameters. If set, the request produces vectors and no tokens."""
    lora: LoraAdapter | None = None
    """LoRA adapter, or None."""
    context: RequestContext = RequestContext()
    current_wave: int = 0
    """The wave of data-parallel engines that the frontend saw last."""
    group_epoch: int = 0
    """Epoch of the group to which that wave belongs. 0 if the frontend knows no group."""
    attempt: int = 0
    """Number of engines that were given the request before this one."""
    never_admitted: bool = False
    """Whether each of the engines in ``attempt`` refused the request."""
    prior_output_token_ids: list[int] = []
    """Tokens delivered by earlier attempts. They count as output (max_tokens, stops, seeded draws), never as prompt."""
    second_text_start: int | None = None
    """Position of the second text of a pair in the prompt, in tokens. None if the prompt is a single text."""
    prompt_embeds: PromptEmbeds | None = None
    """Vectors at some or all positions of the prompt."""
    mm_features: list[MultiModalFeature] = []
    """Media items in order of position, without overlaps. Token IDs at the positions of their embeddings are ignored.
    """
    request_number: int = 0
    """Number that identifies request and attempt in ``TokenColumns``, or 0 for none."""
    reasoning_ended: bool | None = None
    """Whether the prompt has ended the reasoning (True) or begun it (False). With None, the engine looks at the last
    prompt tokens.
    """
    reasoning_parser_kwargs: ReasoningTokens | None = None
    """Tags around the reasoning. Set if a constraint applies only after the reasoning."""
    prediction_token_ids: list[int] = []
    """The client's prediction of the output, in which drafts are looked up. It does not change any token."""
    kv_source: KvSource | None = None
    """Engine that has keys and values of the sequence, or None if unknown."""
    handoff_after_tokens: int = 0
    """Number of output tokens of this attempt after which the request is handed over. 0 means never."""

    @property
    def skips_prefix_cache(self) -> bool:
        """Whether the whole prompt is computed, regardless of cached blocks. This is needed when the hidden state of
        every prompt token is wanted, because cached blocks do not contain hidden states.
        """
        params = self.sampling_params
        return params.skip_reading_prefix_cache or params.prompt_logprobs is not None or self.pooling_params is not None
