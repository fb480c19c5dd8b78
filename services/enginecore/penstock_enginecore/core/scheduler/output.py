"""What the scheduler tells the executor to run in one step, and what comes back."""

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
from penstock_enginecore.structured_output.core.reasoning import ReasoningBudget

_NO_DRAFTS: list[int] = []
MAX_SMALL_BYTES = 1024
"""Of a tensor of media that every worker gets with its request."""


class NewRequestData(msgspec.Struct, kw_only=True):
    """A request the workers have not seen, or have forgotten since it was preempted: all of its data.

    ``token_ids``: prompt and every output token known so far. ``block_ids``: one list per KV cache group. ``mm_features``: of
    their data only what is small (``MAX_SMALL_BYTES`` a tensor): sizes and grids, but no pixels.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: tuple[list[int], ...]
    sampling_params: SamplingParams
    pooling_params: PoolingParams | None = None
    second_text_start: int | None = None
    prompt_embeds: PromptEmbeds | None = None
    lora: LoraRequest | None = None
    context: RequestContext = RequestContext()
    prediction_token_ids: list[int] = []
    mm_features: list[MultiModalFeature] = []
    reasoning_budget: ReasoningBudget | None = None


class EncoderStart(msgspec.Struct, kw_only=True):
    """An item of media whose embeddings are to be computed, or taken as they are where its data is called "embeds".
    ``data``: all of it. ``num_embeds``: rows that must come of it.
    """

    identifier: str
    modality: Modality
    num_embeds: int
    data: dict[str, TensorData]


class CachedRequestData(msgspec.Struct, kw_only=True):
    """Requests the workers know, as parallel lists: only what changed.

    ``new_block_ids[i]`` is None when request i got no block in this step. Output tokens are not repeated: the worker
    that sampled them has them.
    """

    request_ids: list[str] = []
    num_computed_tokens: list[int] = []
    new_block_ids: list[tuple[list[int], ...] | None] = []


class SchedulerOutput(msgspec.Struct, kw_only=True):
    """One step. ``step`` numbers those that compute something. ``num_scheduled_tokens`` maps request id to tokens to
    compute, in batch order.

    ``finished_request_ids``: ended since the last step, workers drop their state. ``preempted_request_ids``: lost their
    blocks, workers drop their state; they come back as new requests.
    ``scheduled_spec_decode_tokens``: by request id, the drafts among its tokens, behind those that are final.
    ``num_drafts_wanted``: by request id, how many tokens are to be drafted behind the step, at most. Their blocks are there.
    ``encoder_starts``: items of media that join the queue of those to be encoded, which is in their order. ``encoder_budget``:
    how much of that queue is computed before this step's forward pass, in embeddings times tower blocks; an item whose last block
    is computed then is there for the forward pass. ``freed_identifiers``: workers forget the rows of these items, or that they
    are to be encoded, before anything else.
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

    def add_new(self, request: Request, num_tokens: int, block_ids: tuple[list[int], ...]) -> None:
        """Schedule ``num_tokens`` tokens of a request that starts, or starts again."""
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
        """Schedule ``num_tokens`` tokens of a running request. ``new_block_ids``: empty when it got none. ``drafts``: the last of
        the tokens.
        """
        self._count(request, num_tokens)
        if drafts:
            self.scheduled_spec_decode_tokens[request.key] = drafts
        cached = self.cached_requests
        cached.request_ids.append(request.key)
        cached.num_computed_tokens.append(request.num_computed_tokens)
        cached.new_block_ids.append(new_block_ids or None)

    def add_blocks(self, request: Request, block_ids: tuple[list[int], ...]) -> None:
        """Tell of more blocks of a request that is in the step, a list per group."""
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
        """Whether the executor gets the step: it computes something, tokens or media, or the workers can forget requests. A step
        of which neither holds may be run as well; it computes nothing.
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
        """By request id, the tokens that are computed when the step is over."""
        computed = {new.request_id: new.num_computed_tokens for new in self.new_requests}
        cached = self.cached_requests
        computed.update(zip(cached.request_ids, cached.num_computed_tokens, strict=True))
        return {key: computed[key] + count for key, count in self.num_scheduled_tokens.items()}

    def remove(self, request: Request) -> None:
        """Take a request out again, if it is in the step."""
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
    """With those of its tensors that every worker gets."""
    small = {name: tensor for name, tensor in feature.data.items() if len(tensor.data) <= MAX_SMALL_BYTES}
    return feature if len(small) == len(feature.data) else msgspec.structs.replace(feature, data=small)


def _joined(first: tuple[list[int], ...], second: tuple[list[int], ...]) -> tuple[list[int], ...]:
    """Blocks that were added to the same tables one after the other."""
    return tuple([[*a, *b] for a, b in zip(first, second, strict=True)])


class DraftTokenIds(msgspec.Struct, kw_only=True):
    """What was drafted behind a step, parallel to ``request_ids``: those of ``num_drafts_wanted``, a list each, which may be
    empty. ``seconds`` that it took. ``failure``: why the drafter was switched off, empty while it works.
    """

    request_ids: list[str] = []
    draft_token_ids: list[list[int]] = []
    seconds: float = 0.0
    failure: str = ""


class GrammarBitmask(msgspec.Struct, frozen=True):
    """Which tokens constrained requests of a step may get. ``bitmask`` int32 ``[rows, ceil(vocab / 32)]``: bit t % 32 of word
    t // 32 is token t. Requests that get no token in the step, or are not constrained, are not named. Row i is that of
    ``request_ids[i]``, behind the first ``offsets[i]`` of its drafts; without ``offsets`` behind none. Positions that are not
    named cannot be reached.
    """

    request_ids: list[str]
    bitmask: npt.NDArray[np.int32]
    offsets: list[int] = []


class ModelRunnerOutput(msgspec.Struct, kw_only=True):
    """Sampled tokens of a step, parallel to ``request_ids``: of a request with drafts those that held, and one more.
    ``seconds`` that the step took to compute, 0 where nobody looked.

    The list of a request whose prompt is not yet fully computed is empty. By request id, for those that asked: ``logprobs`` of
    the sampled tokens; ``prompt_logprobs`` of the prompt tokens that this step computed, less the first of the prompt, which
    has none (position i of the prompt is scored by the step that computes i - 1); ``pooled``: results of pooling requests whose
    last token was computed. ``encoder_failures``: by identifier, why an item of media could not be encoded;
    the step computed its positions all the same, and what came of them means nothing.
    """

    request_ids: list[str] = []
    sampled_token_ids: list[list[int]] = []
    logprobs: dict[str, Logprobs] = {}
    prompt_logprobs: dict[str, Logprobs] = {}
    pooled: dict[str, Vectors] = {}
    num_nans_in_logits: dict[str, int] = {}
    encoder_failures: dict[str, str] = {}
    seconds: float = 0.0
