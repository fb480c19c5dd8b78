"""Requests on their way from a frontend to an engine: one sequence, its pooling parameters and its context."""

import enum

import msgspec

from penstock_common.lora_registry import LoraAdapter
from penstock_common.types.kv_transfer import KvParams, KvSource
from penstock_common.types.media import MultiModalFeature
from penstock_common.types.octets import Octets
from penstock_common.types.prompt_embeds import PromptEmbeds
from penstock_common.types.sampling import SamplingParams

# What a request says besides what is to be computed.


class RequestContext(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Whose a request is, where and until when it should run, and what it may share.

    ``context_of`` of each protocol makes it, the frontend's ``InputProcessor.checked_context`` completes it, and whatever passes
    the request on, to the scheduler and the workers, passes it on whole. So a new field of this kind is added here, to the
    message under the same name where it crosses the wire, in the protocols that have it, and where it is read.
    """

    external_request_id: str = ""
    """Id that the client knows the request by. The frontend chooses one where the client gave none."""
    model: str = ""
    """The model that the client asked for; empty: the one that is served. It does not cross the wire: an engine serves one."""
    lora: str = ""
    """The LoRA adapter that the client asked for; ``model`` may name one as well. Empty: none. It does not cross the wire:
    ``EngineCoreRequest.lora`` does."""
    data_parallel_rank: int | None = None
    """Rank of the engine that the request must run on; None: any. Engines that get it serve rank 0."""
    priority: int = 0
    """Under the priority policy lower numbers run first. An int32."""
    tenant: str = ""
    """Whose share of the engines the request takes; empty: of all requests that name no tenant."""
    tenant_weight: float = 1.0
    """The tenant's share relative to that of others, from MIN_TENANT_WEIGHT to MAX_TENANT_WEIGHT."""
    cache_salt: str = ""
    """Requests share cached prefixes only with those that have the same salt."""
    arrival_time: float = 0.0
    """When the frontend got the request, in seconds since the Unix epoch."""
    deadline: float | None = None
    """When the request ends with DEADLINE_EXCEEDED, in seconds since the Unix epoch; None: never."""
    kv: KvParams = KvParams()
    """What a gateway says of its keys and values. Of ``source`` an engine hears by ``EngineCoreRequest.kv_source``, which changes
    with the attempts.
    """
    trace_context: dict[str, str] = {}
    """W3C Trace Context headers of the span whose children the next service's spans are; empty: the request is not traced."""


# Requests that produce vectors rather than tokens.


class PoolingTask(enum.IntEnum):
    """What is computed from the hidden states. Values equal ``penstock.common.v1.PoolingTask``."""

    EMBED = 1
    CLASSIFY = 2
    SCORE = 3
    TOKEN_EMBED = 4
    TOKEN_CLASSIFY = 5


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Field for field ``penstock.common.v1.PoolingParams``. ``dimensions`` None keeps all, ``normalize`` None does as the
    model's config says.
    """

    task: PoolingTask
    dimensions: int | None = None
    normalize: bool | None = None
    use_activation: bool = True


class Vectors(msgspec.Struct, frozen=True):
    """Result of a pooling request: float32, row-major, little-endian. ``shape`` ``(n,)``, or ``(tokens, n)`` for token tasks."""

    shape: tuple[int, ...]
    data: Octets


NO_SAMPLING = SamplingParams(temperature=0.0, max_tokens=1)
"""Stands in a pooling request, which samples nothing."""


MIN_TENANT_WEIGHT = 0.001
MAX_TENANT_WEIGHT = 1000.0


class ReasoningTokens(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a model's reasoning stands between."""

    begin_token_id: int
    end_token_id: int


class EngineCoreRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What ``penstock.enginecore.v1.EngineCoreRequest`` says, as far as engines serve it."""

    request_id: str
    """Unique among the requests of a frontend; the same in every attempt."""
    prompt_token_ids: list[int]
    """Never holds output tokens. An id means nothing where ``prompt_embeds`` has a vector."""
    sampling_params: SamplingParams = NO_SAMPLING
    """Means nothing beside ``pooling_params``."""
    pooling_params: PoolingParams | None = None
    """With these the request produces vectors, and no tokens."""
    lora: LoraAdapter | None = None
    """What is applied to the model's weights; None: nothing."""
    context: RequestContext = RequestContext()
    current_wave: int = 0
    """The wave of data-parallel engines that the frontend saw last."""
    group_epoch: int = 0
    """The epoch of the group whose wave that is; 0: the frontend knows none."""
    attempt: int = 0
    """How many engines were given the request before this one."""
    never_admitted: bool = False
    """Whether each of those engines refused it."""
    prior_output_token_ids: list[int] = []
    """What earlier attempts delivered. These tokens count as output (max_tokens, stops, seeded draws), never as prompt."""
    second_text_start: int | None = None
    """Where the second text of a pair begins in the prompt, in tokens; None: the prompt is one text."""
    prompt_embeds: PromptEmbeds | None = None
    """Vectors that stand at some positions of the prompt, or at all."""
    mm_features: list[MultiModalFeature] = []
    """Items of media in the order of their places, which do not overlap. The ids at their embeddings' positions mean nothing."""
    request_number: int = 0
    """Stands for request and attempt in ``TokenColumns``; 0: it has none."""
    reasoning_ended: bool | None = None
    """Whether the prompt has ended the reasoning (True) or begun it (False); None: the engine looks at its last tokens."""
    reasoning_parser_kwargs: ReasoningTokens | None = None
    """Set where a constraint holds only behind the reasoning."""
    prediction_token_ids: list[int] = []
    """What the output may turn out to be: drafts are looked up in it. It changes no token."""
    kv_source: KvSource | None = None
    """Who has keys and values of the sequence; None: nobody is known."""
    handoff_after_tokens: int = 0
    """Output tokens of this attempt after which the request is handed over; 0: never."""

    @property
    def skips_prefix_cache(self) -> bool:
        """Whether the whole prompt is computed, whatever is cached of it: every prompt token's hidden state is wanted then, and
        cached blocks do not hold them.
        """
        params = self.sampling_params
        return params.skip_reading_prefix_cache or params.prompt_logprobs is not None or self.pooling_params is not None
