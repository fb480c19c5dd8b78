"""One sequence on its way from a frontend to an engine."""

import msgspec

from penstock_common.lora.registration import LoraAdapter
from penstock_common.types.kv_transfer import KvSource
from penstock_common.types.media import MultiModalFeature
from penstock_common.types.pooling import PoolingParams
from penstock_common.types.prompt_embeds import PromptEmbeds
from penstock_common.types.request_context import RequestContext
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
    lease_kv: bool = False
    """Whether the blocks are kept for a while when the request ends as it should."""
    kv_transfer_params: str = ""
    """For the connector that a plugin has added to the engine, a JSON object; empty: nothing is said."""

    @property
    def skips_prefix_cache(self) -> bool:
        """Whether the whole prompt is computed, whatever is cached of it: every prompt token's hidden state is wanted then, and
        cached blocks do not hold them.
        """
        params = self.sampling_params
        return params.skip_reading_prefix_cache or params.prompt_logprobs is not None or self.pooling_params is not None
