"""Messages between scheduler and executor: the work of one step, and the results of the step."""

import msgspec
import numpy as np
import numpy.typing as npt

from penstock_common.types.media import Modality, MultiModalFeature, TensorData
from penstock_common.types.outputs import Logprobs
from penstock_common.types.prompt_embeds import PromptEmbeds
from penstock_common.types.request import PoolingParams, RequestContext, Vectors
from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.core.request import Request
from penstock_enginecore.lora.core.request import LoraRequest
from penstock_enginecore.states.core.spec import StateStep
from penstock_enginecore.structured_output.core.reasoning import ReasoningBudget

_NO_DRAFTS: list[int] = []
MAX_SMALL_BYTES = 1024
"""Maximum size in bytes of a media tensor that is sent to every worker with its request."""


class NewRequestData(msgspec.Struct, kw_only=True):
    """All data of a request for workers that have no state of the request. The request is new, or the workers dropped
    their state of the request when it was preempted.

    Attributes:
        token_ids: The prompt and all output tokens known so far.
        block_ids: KV block ids, one list per KV cache group.
        mm_features: Media items with only their small tensors (at most ``MAX_SMALL_BYTES``): sizes and grids, but no
            pixels.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: tuple[list[int], ...]
    sampling_params: SamplingParams
    pooling_params: PoolingParams | None = None
    second_text_start: int | None = None
    unattended_start: int | None = None
    prompt_embeds: PromptEmbeds | None = None
    lora: LoraRequest | None = None
    context: RequestContext = RequestContext()
    prediction_token_ids: list[int] = []
    mm_features: list[MultiModalFeature] = []
    reasoning_budget: ReasoningBudget | None = None


class EncoderStart(msgspec.Struct, kw_only=True):
    """A media item to encode. If the item has a tensor named "embeds", that tensor is used as the embeddings.

    Attributes:
        num_embeds: Number of embeddings that the encoder must return.
        data: All tensors of the item, including large tensors such as pixels.
    """

    identifier: str
    modality: Modality
    num_embeds: int
    data: dict[str, TensorData]


class CachedRequestData(msgspec.Struct, kw_only=True):
    """Changes of requests that the workers already know, as parallel lists.

    ``new_block_ids[i]`` is None if request i got no block in this step. Output tokens are not included, because the
    worker that sampled these tokens already has them.
    """

    request_ids: list[str] = []
    num_computed_tokens: list[int] = []
    new_block_ids: list[tuple[list[int], ...] | None] = []


class SchedulerOutput(msgspec.Struct, kw_only=True):
    """The work of one step.

    Attributes:
        step: Step number. Only steps that compute something are numbered.
        num_scheduled_tokens: By request id in batch order, the number of tokens to compute.
        finished_request_ids: Ids of requests that ended since the last step. Workers drop the state of these requests.
        preempted_request_ids: Ids of requests that lost their KV blocks since the last step. Workers drop the state of
            these requests. When such a request resumes, it is sent as a new request.
        scheduled_spec_decode_tokens: By request id, the draft tokens to verify. The draft tokens are the last of the
            request's scheduled tokens.
        num_drafts_wanted: By request id, the maximum number of tokens to draft after the step. KV blocks for these
            tokens are already allocated.
        encoder_starts: Media items to append to the encoder queue, in this order.
        encoder_budget: Amount of encoder work before this step's forward pass, in embeddings times encoder layers. If
            an item's last encoder layer is computed before this forward pass, the forward pass can use the item.
        freed_identifiers: Media items to drop before other work of the step. Workers drop the items' embeddings, or
            their places in the encoder queue.
        states: By request id, the recurrent states that the step reads and writes. Empty for a model without recurrent
            layers.
    """

    step: int = 0
    new_requests: list[NewRequestData] = []
    cached_requests: CachedRequestData = msgspec.field(default_factory=CachedRequestData)
    num_scheduled_tokens: dict[str, int] = {}
    total_num_scheduled_tokens: int = 0
    finished_request_ids: list[str] = []
    preempted_request_ids: list[str] = []
    scheduled_spec_decode_tokens: dict[str, list[int]] = {}
    num_drafts_wanted: dict[str, int] = {}
    encoder_starts: list[EncoderStart] = []
    encoder_budget: int = 0
    freed_identifiers: list[str] = []
    states: dict[str, StateStep] = {}

    def add_new(self, request: Request, num_tokens: int, block_ids: tuple[list[int], ...]) -> None:
        """Schedule ``num_tokens`` tokens of a request that starts or resumes."""
        self._count(request, num_tokens)
        features = request.mm_features
        self.new_requests.append(
            NewRequestData(
                request_id=request.key,
                token_ids=request.all_token_ids.copy(),
                num_prompt_tokens=request.num_prompt_tokens,
                num_computed_tokens=request.num_computed_tokens,
                block_ids=block_ids,
                sampling_params=request.sampling_params,
                pooling_params=request.pooling_params,
                second_text_start=request.second_text_start,
                unattended_start=request.unattended_start,
                prompt_embeds=request.prompt_embeds,
                lora=request.lora,
                context=request.context,
                prediction_token_ids=request.prediction_token_ids,
                mm_features=[_without_large(feature) for feature in features] if features else features,
                reasoning_budget=request.reasoning_budget,
            )
        )

    def add_known(
        self, request: Request, num_tokens: int, new_block_ids: tuple[list[int], ...], drafts: list[int] = _NO_DRAFTS
    ) -> None:
        """Schedule ``num_tokens`` tokens of a running request.

        Args:
            request: The request.
            num_tokens: Number of tokens to compute.
            new_block_ids: Ids of the blocks that the request got in this step, one list per group. Empty if the request
                got no blocks.
            drafts: Draft tokens, which are the last of the ``num_tokens`` tokens.
        """
        self._count(request, num_tokens)
        if drafts:
            self.scheduled_spec_decode_tokens[request.key] = drafts
        cached = self.cached_requests
        cached.request_ids.append(request.key)
        cached.num_computed_tokens.append(request.num_computed_tokens)
        cached.new_block_ids.append(new_block_ids or None)

    def add_blocks(self, request: Request, block_ids: tuple[list[int], ...]) -> None:
        """Add more blocks, one list per group, to a request that is already in the step."""
        cached = self.cached_requests
        if request.key in cached.request_ids:
            index = cached.request_ids.index(request.key)
            known = cached.new_block_ids[index]
            cached.new_block_ids[index] = block_ids if known is None else _joined(known, block_ids)
            return
        new = next(new for new in self.new_requests if new.request_id == request.key)
        new.block_ids = _joined(new.block_ids, block_ids)

    @property
    def concerns_workers(self) -> bool:
        """Whether the executor must get the step. The value is true if the step computes tokens or media, or lets
        workers drop the state of requests. The executor may also get other steps, which compute nothing.
        """
        return bool(
            self.num_scheduled_tokens
            or self.finished_request_ids
            or self.preempted_request_ids
            or self.encoder_budget
            or self.encoder_starts
        )

    @property
    def num_tokens_after(self) -> dict[str, int]:
        """Number of computed tokens of each request after the step, by request id."""
        computed = {new.request_id: new.num_computed_tokens for new in self.new_requests}
        cached = self.cached_requests
        computed.update(zip(cached.request_ids, cached.num_computed_tokens, strict=True))
        return {key: computed[key] + count for key, count in self.num_scheduled_tokens.items()}

    def remove(self, request: Request) -> None:
        """Remove a request from the step, if the step includes the request."""
        count = self.num_scheduled_tokens.pop(request.key, None)
        if count is None:
            return
        self.total_num_scheduled_tokens -= count
        self.scheduled_spec_decode_tokens.pop(request.key, None)
        cached = self.cached_requests
        if request.key not in cached.request_ids:
            self.new_requests = [new for new in self.new_requests if new.request_id != request.key]
            return
        index = cached.request_ids.index(request.key)
        for entries in (cached.request_ids, cached.num_computed_tokens, cached.new_block_ids):
            del entries[index]

    def _count(self, request: Request, num_tokens: int) -> None:
        self.num_scheduled_tokens[request.key] = num_tokens
        self.total_num_scheduled_tokens += num_tokens


def _without_large(feature: MultiModalFeature) -> MultiModalFeature:
    """Return the media item without its tensors of more than ``MAX_SMALL_BYTES``, because not every worker gets these
    tensors.
    """
    small = {name: tensor for name, tensor in feature.data.items() if len(tensor.data) <= MAX_SMALL_BYTES}
    return feature if len(small) == len(feature.data) else msgspec.structs.replace(feature, data=small)


def _joined(first: tuple[list[int], ...], second: tuple[list[int], ...]) -> tuple[list[int], ...]:
    """Return one list of new block ids per group: the list of the group in ``first``, followed by the list in
    ``second``.
    """
    return tuple([[*a, *b] for a, b in zip(first, second, strict=True)])


class DraftTokenIds(msgspec.Struct, kw_only=True):
    """Tokens that were drafted after a step.

    Attributes:
        request_ids: The requests in the step's ``num_drafts_wanted``.
        draft_token_ids: One list of draft tokens per request. A list may be empty.
        seconds: Time in seconds that drafting took.
        failure: The reason why the drafter was switched off, or empty.
    """

    request_ids: list[str] = []
    draft_token_ids: list[list[int]] = []
    seconds: float = 0.0
    failure: str = ""


class GrammarBitmask(msgspec.Struct, frozen=True):
    """Bit masks of the tokens that grammars allow in a step.

    Requests without a grammar, or without a sampled token in the step, have no row in the mask. If a draft position of
    a request with a grammar has no row, no token is sampled at that position.

    Attributes:
        request_ids: Id of the request to which each row belongs.
        bitmask: int32 ``[rows, ceil(vocab / 32)]``. Bit t % 32 of word t // 32 is set if token t is allowed.
        offsets: For each row, the number of the request's draft tokens before the position of the row. Empty means 0
            for all rows.
    """

    request_ids: list[str]
    bitmask: npt.NDArray[np.int32]
    offsets: list[int] = []


class ModelRunnerOutput(msgspec.Struct, kw_only=True):
    """Results of a step. The keys of dictionaries are request ids, except where noted.

    Attributes:
        request_ids: Ids of the requests in the step.
        sampled_token_ids: New tokens of each request: the accepted draft tokens and one more token. The list of a
            request is empty if its prompt is not fully computed.
        logprobs: Log-probabilities of the sampled tokens, if requested.
        prompt_logprobs: Log-probabilities of the prompt tokens that this step scored, if requested. The step that
            computes position i - 1 scores the token at position i. The first prompt token has no score.
        pooled: Results of pooling requests whose last token was computed.
        num_nans_in_logits: Number of NaN or infinite logits of each request with such logits.
        encoder_failures: By media identifier, the reason why an item could not be encoded. The step computed the item's
            positions anyway, so the results of these positions are invalid.
        seconds: Time that the step took to compute, or 0 if it was not measured.
    """

    request_ids: list[str] = []
    sampled_token_ids: list[list[int]] = []
    logprobs: dict[str, Logprobs] = {}
    prompt_logprobs: dict[str, Logprobs] = {}
    pooled: dict[str, Vectors] = {}
    num_nans_in_logits: dict[str, int] = {}
    encoder_failures: dict[str, str] = {}
    seconds: float = 0.0
