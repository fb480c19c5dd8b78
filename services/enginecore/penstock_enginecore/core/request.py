"""A request inside the engine: what came in, how far it has got, and lines in the log when it failed."""

import enum
import itertools
import logging
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any

from penstock_common.errors import RequestFailed
from penstock_common.observability.logging import REASON, REQUEST_LOGGER, incident
from penstock_common.types.media import MultiModalFeature
from penstock_common.types.outputs import EngineCoreEvent, EventType, FinishReason, RequestError, SpecDecodingStats
from penstock_common.types.request import EngineCoreRequest, PoolingParams
from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.lora.core.request import LoraRequest
from penstock_enginecore.speculation.core.policy import DraftHistory
from penstock_enginecore.structured_output.core.base import Grammar
from penstock_enginecore.structured_output.core.reasoning import ReasoningBudget

# Where in a prompt embeddings of media stand.

Span = tuple[int, int]
"""First position, and the one behind the last."""

_END = attrgetter("end")


def first_embed(feature: MultiModalFeature, start: int) -> int | None:
    """The first position from ``start`` on that has an embedding of the feature; None when there is none."""
    for run in feature.embed_runs:
        if feature.offset + run.start + run.count > start:
            return max(feature.offset + run.start, start)
    return None if feature.embed_runs or start >= feature.end else max(feature.offset, start)


def embeds_span(feature: MultiModalFeature) -> Span:
    """From its first embedding to its last, with what stands between."""
    runs = feature.embed_runs
    if not runs:
        return feature.offset, feature.end
    return feature.offset + runs[0].start, feature.offset + runs[-1].start + runs[-1].count


def embeds_from(features: Sequence[MultiModalFeature], start: int) -> Iterator[tuple[int, int]]:
    """Of the features that have embeddings from position ``start`` on, their indices and the first such position, in order."""
    for index in range(bisect_right(features, start, key=_END), len(features)):
        if (position := first_embed(features[index], start)) is not None:
            yield index, position


def span_around(spans: Sequence[Span], position: int) -> Span | None:
    """The one of the ``spans``, which are in order, that a cut before ``position`` would part; None when there is none."""
    index = bisect_right(spans, position, key=lambda span: span[1])
    if index < len(spans) and spans[index][0] < position:
        return spans[index]
    return None


class Hold(enum.Flag):
    """A waiting request with any of these waits for something of its own, not for its turn, and is in nobody's way.

    A new reason is a name here, given to the request with ``Scheduler.add_request`` or ``hold_back``, and a call of ``release``
    by whoever knows that the wait is over; the scheduler itself asks for no reason by name but ``PAUSE``, ``TRIAL``,
    ``MEDIA`` and ``KV_TRANSFER``, which it gives and takes.
    """

    NONE = 0
    GRAMMAR = enum.auto()
    """Its constraint is being compiled, or its next mask is being computed."""
    PAUSE = enum.auto()
    """It came while the engine was pausing."""
    TRIAL = enum.auto()
    """A step with it failed: ``StepTrial`` tries it with fewer others."""
    LORA = enum.auto()
    """Its adapter is being loaded, or as many others run as may."""
    MEDIA = enum.auto()
    """Embeddings of its next media are not there yet, or there is no room for them."""
    KV_TRANSFER = enum.auto()
    """Blocks of its tokens are on their way: its own load brings them, or that of another request."""


class RequestStatus(enum.IntEnum):
    """Everything above PREEMPTED is an end."""

    WAITING = 1
    RUNNING = 2
    PREEMPTED = 3
    FINISHED_STOPPED = 4
    FINISHED_LENGTH = 5
    FINISHED_ABORTED = 6
    FINISHED_ERROR = 7
    FINISHED_REPETITION = 8
    HANDED_OVER = 9

    @property
    def finished(self) -> bool:
        """Whether the request will never be scheduled again."""
        return self > RequestStatus.PREEMPTED

    @property
    def finish_reason(self) -> FinishReason | None:
        """The reason that goes on the wire, None while the request lives."""
        return _FINISH_REASONS.get(self)


_FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: FinishReason.STOP,
    RequestStatus.FINISHED_LENGTH: FinishReason.LENGTH,
    RequestStatus.FINISHED_ABORTED: FinishReason.ABORT,
    RequestStatus.FINISHED_ERROR: FinishReason.ERROR,
    RequestStatus.FINISHED_REPETITION: FinishReason.REPETITION,
    RequestStatus.HANDED_OVER: FinishReason.HANDOFF,
}


_serial = itertools.count(1)


class Request:
    """The scheduler's view of one sequence.

    ``key`` names it inside this process: two clients may use the same request id, and a client may use one again.
    Workers know a request by its key alone.

    There is no prefill and no decode: ``num_computed_tokens``, which counts what has been scheduled, catches up with
    ``num_tokens`` and the ``num_placeholders`` output tokens that steps in flight will bring. ``num_processed_tokens`` counts
    those whose step is over. Results of steps before
    ``valid_from_step`` belong to a life that ended with a preemption.

    ``client_id`` names the session that sent the request and gets its outputs.
    ``all_token_ids`` holds the tokens of earlier attempts as output, so that limits, stops and seeded draws count from the
    true beginning of the output.
    ``number`` stands for it in columns of tokens, 0 where its client numbers nothing.
    ``outlives``: another engine had taken it.
    ``num_charged_tokens``: those that count for the tenant's share of the engine already.
    ``sampled_step``: the last step that gives it a token of output.
    ``spec_token_ids``: what was drafted behind the tokens that are known. ``max_drafts``: tokens that are drafted at most.
    ``unsettled``: a step in flight has drafts, or has some made behind it: what its next tokens are, and how many, is known
    only then. ``draft_history`` and ``forced_history``: how drafts held, what a grammar forces apart; ``drafts_forced``:
    which of the two those are that are being verified. ``spec_stats``: None while it has had no drafts.
    ``media_end``: the position behind its last medium, 0 without media. ``whole_spans``: positions that are computed in one step,
    as the scheduler knows them. ``num_asked_media``: of its media, those that the encoder cache was asked for, or need not be.
    ``num_uncharged_embeds``: computed for it, and not yet counted for its tenant's share.
    ``lora``: its adapter, with the digest once that is known; ``lora_use``: keeps it, from when it is loaded to the end.
    ``hands_over``: at ``max_tokens`` it goes on elsewhere. ``kv_source``: who has blocks of it, as its client knows.
    ``kv_transfer_params``: what a plugin's connector is told.
    ``arrival`` numbers requests in the order in which the scheduler got them. ``grammar`` is set once a constraint is compiled.
    """

    __slots__ = (
        "all_token_ids",
        "arrival",
        "attempt",
        "block_hashes",
        "client_id",
        "context",
        "draft_history",
        "drafts_forced",
        "events",
        "forced_history",
        "grammar",
        "hands_over",
        "hold",
        "key",
        "kv_source",
        "kv_transfer_params",
        "loaded_tokens",
        "lora",
        "max_drafts",
        "max_tokens",
        "media_end",
        "mm_features",
        "num_asked_media",
        "num_cached_tokens",
        "num_charged_tokens",
        "num_computed_tokens",
        "num_placeholders",
        "num_preemptions",
        "num_processed_tokens",
        "num_prompt_logprobs",
        "num_prompt_tokens",
        "num_uncharged_embeds",
        "number",
        "outlives",
        "pooling_params",
        "prediction_token_ids",
        "prefill_reported",
        "prompt_embeds",
        "queued_time",
        "reasoning_budget",
        "reasoning_ended",
        "reasoning_parser_kwargs",
        "request_id",
        "sampled_step",
        "sampling_params",
        "second_text_start",
        "skip_reading_prefix_cache",
        "spec_stats",
        "spec_token_ids",
        "status",
        "stop_reason",
        "stop_token_ids",
        "unsettled",
        "valid_from_step",
        "wave",
        "whole_spans",
    )

    def __init__(
        self,
        request: EngineCoreRequest,
        *,
        client_id: str,
        max_model_len: int,
        kv_params: dict[str, Any] | None = None,
    ) -> None:
        self.key = f"{request.request_id}#{next(_serial)}"
        self.request_id = request.request_id
        self.context = request.context
        self.client_id = client_id
        self.sampling_params: SamplingParams = request.sampling_params
        self.pooling_params: PoolingParams | None = request.pooling_params
        self.second_text_start = request.second_text_start
        self.prompt_embeds = request.prompt_embeds
        self.mm_features = request.mm_features
        self.media_end = request.mm_features[-1].end if request.mm_features else 0
        self.whole_spans: list[Span] = []
        self.num_asked_media = 0
        self.num_uncharged_embeds = 0
        self.prediction_token_ids = request.prediction_token_ids
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.all_token_ids: list[int] = [*request.prompt_token_ids, *request.prior_output_token_ids]
        room = max_model_len - self.num_prompt_tokens
        asked = request.sampling_params.max_tokens
        self.max_tokens = room if asked is None else min(asked, room)
        first_leg = len(request.prior_output_token_ids) + request.handoff_after_tokens
        self.hands_over = request.handoff_after_tokens > 0 and first_leg < self.max_tokens
        if self.hands_over:
            self.max_tokens = first_leg
        self.kv_source = request.kv_source
        self.kv_transfer_params = kv_params or {}
        self.stop_token_ids = frozenset(request.sampling_params.stop_token_ids)
        self.skip_reading_prefix_cache = request.skips_prefix_cache
        self.attempt = request.attempt
        self.wave = request.group_epoch, request.current_wave
        self.number = request.request_number
        self.outlives = request.attempt > 0 and not request.never_admitted
        self.status = RequestStatus.WAITING
        self.hold = Hold.NONE
        self.grammar: Grammar | None = None
        self.lora = LoraRequest.of(request.lora)
        self.reasoning_parser_kwargs = request.reasoning_parser_kwargs
        self.reasoning_ended = request.reasoning_ended
        self.reasoning_budget = ReasoningBudget.of(request)
        self.arrival = 0
        self.stop_reason: int | str | None = None
        self.num_computed_tokens = 0
        self.num_processed_tokens = 0
        self.num_placeholders = 0
        self.valid_from_step = 0
        self.sampled_step = -1
        self.num_prompt_logprobs = 0
        self.num_cached_tokens = -1
        self.loaded_tokens: tuple[int, ...] = ()
        self.num_charged_tokens = 0
        self.num_preemptions = 0
        self.spec_token_ids: list[int] = []
        self.max_drafts = 0
        self.unsettled = False
        self.draft_history: DraftHistory | None = None
        self.forced_history: DraftHistory | None = None
        self.drafts_forced = False
        self.spec_stats: SpecDecodingStats | None = None
        self.prefill_reported = False
        self.queued_time = 0.0
        self.block_hashes: list[bytes] = []
        self.events: list[EngineCoreEvent] = []

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens known so far."""
        return len(self.all_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens, those of earlier attempts included."""
        return len(self.all_token_ids) - self.num_prompt_tokens

    @property
    def num_loaded_tokens(self) -> int:
        """Of the cached tokens, those that were brought from elsewhere."""
        return sum(self.loaded_tokens)

    @property
    def lora_digest(self) -> bytes:
        """Of its adapter; empty without one."""
        return b"" if self.lora is None else self.lora.digest

    @property
    def finished(self) -> bool:
        """Whether the request has ended."""
        return self.status.finished

    @property
    def resumes(self) -> bool:
        """Whether a waiting request had begun: it was preempted, or outlived another engine."""
        return self.status is RequestStatus.PREEMPTED or self.outlives

    @property
    def constrained(self) -> bool:
        """Whether a grammar decides which tokens are allowed."""
        return self.sampling_params.structured_output is not None

    def take_uncharged_tokens(self) -> int:
        """How many tokens have become known since the last call, and how many embeddings were computed for it."""
        count = len(self.all_token_ids) - self.num_charged_tokens + self.num_uncharged_embeds
        self.num_charged_tokens, self.num_uncharged_embeds = len(self.all_token_ids), 0
        return count

    def record_event(self, kind: EventType, timestamp: float) -> None:
        """Remember an event for the next output. ``timestamp``: monotonic seconds."""
        self.events.append(EngineCoreEvent(kind, timestamp))

    def take_events(self) -> list[EngineCoreEvent]:
        """Events since the last call."""
        events, self.events = self.events, []
        return events


# Log lines about requests that failed, where ``log.requests`` asks for them. No text of the request is in them: not even the
# error's own, which quotes values of fields.

logger = logging.getLogger(REQUEST_LOGGER)


def log_refused(request_id: str, external_id: str, error: RequestFailed | RequestError) -> None:
    """A request was not taken. ``external_id``: the id that its client knows."""
    logger.info("request refused", extra=_fields(request_id, external_id, error))


def log_failed(request_id: str, external_id: str, error: RequestFailed | RequestError) -> None:
    """A request that was taken cannot be finished."""
    logger.info("request failed", extra=_fields(request_id, external_id, error))


def log_aborted(request_ids: Sequence[str], reason: str) -> None:
    """Requests ended because their frontend asked for it. ``request_ids``: as the frontend names them; ``reason``: its own."""
    for request_id in request_ids:
        logger.info("request aborted", extra={"engine_request": request_id, "reason": reason})


def refusal(request_id: str, external_id: str, error: Exception, *, doing: str) -> RequestFailed:
    """What ends a request that was not taken, which is logged: its own fault, or an incident."""
    if isinstance(error, RequestFailed):
        log_refused(request_id, external_id, error)
        return error
    return incident(error, request=external_id or request_id, doing=doing)


def log_incident(request: Request, error: Exception, *, doing: str, reason: str = REASON) -> RequestError:
    """Log an error that is no fault of the request, under a number that its client gets. Returns what to end the request with."""
    name = request.context.external_request_id or request.request_id
    return RequestError.from_exception(incident(error, request=name, doing=doing, reason=reason))


def _fields(request_id: str, external_id: str, error: RequestFailed | RequestError) -> dict[str, str]:
    return {
        "request": external_id or request_id,
        "engine_request": request_id,
        "code": error.code,
        "reason": error.reason,
        "field": error.field,
    }
