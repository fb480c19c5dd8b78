"""A request inside the engine: its parameters and progress, and log lines for failed requests."""

import enum
import itertools
import logging
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any

from penstock_common.errors import RequestFailed
from penstock_common.observability.logging import REASON, REQUEST_LOGGER, incident
from penstock_common.types.media import EmbedRun, MultiModalFeature
from penstock_common.types.outputs import EngineCoreEvent, EventType, FinishReason, RequestError, SpecDecodingStats
from penstock_common.types.request import EngineCoreRequest, PoolingParams
from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.lora.core.request import LoraRequest
from penstock_enginecore.speculation.core.policy import DraftHistory
from penstock_enginecore.structured_output.core.base import Grammar
from penstock_enginecore.structured_output.core.reasoning import ReasoningBudget

# Positions of media embeddings in a prompt.

Span = tuple[int, int]
"""Range of prompt positions: the first position, and the position after the last one."""

_END = attrgetter("end")


def first_embed(feature: MultiModalFeature, start: int) -> int | None:
    """Return the first prompt position at or after ``start`` that has an embedding of the media item ``feature``, or
    None.
    """
    for run in feature.embed_runs:
        if feature.offset + run.start + run.count > start:
            return max(feature.offset + run.start, start)
    return None if feature.embed_runs or start >= feature.end else max(feature.offset, start)


def embeds_span(feature: MultiModalFeature) -> Span:
    """Return the range of positions from the first to the last embedding of the media item, including tokens in
    between.
    """
    runs = feature.embed_runs
    if not runs:
        return feature.offset, feature.end
    return feature.offset + runs[0].start, feature.offset + runs[-1].start + runs[-1].count


def joined_runs(feature: MultiModalFeature) -> list[Span]:
    """Return the ranges of consecutive positions that have embeddings of the media item. Adjacent runs are one range."""
    spans: list[Span] = []
    for run in feature.embed_runs or (EmbedRun(0, feature.length),):
        start = feature.offset + run.start
        if spans and spans[-1][1] == start:
            start = spans.pop()[0]
        spans.append((start, feature.offset + run.start + run.count))
    return spans


def embeds_from(features: Sequence[MultiModalFeature], start: int) -> Iterator[tuple[int, int]]:
    """Yield the index of each media item that has embeddings at or after position ``start``, and the first such
    position. The items in ``features`` are in prompt order.
    """
    for index in range(bisect_right(features, start, key=_END), len(features)):
        if (position := first_embed(features[index], start)) is not None:
            yield index, position


def span_around(spans: Sequence[Span], position: int) -> Span | None:
    """Return the span that would be split if a step ended just before ``position``, or None. ``spans`` must be in order
    of position.
    """
    index = bisect_right(spans, position, key=lambda span: span[1])
    if index < len(spans) and spans[index][0] < position:
        return spans[index]
    return None


class Hold(enum.Flag):
    """Reasons why a waiting request cannot start. A held request does not block the requests after it.

    To add a reason, add a member to this enumeration. The component that needs the hold sets it with
    ``Scheduler.add_request`` or ``hold_back``, and calls ``release`` when the wait is over. The scheduler itself sets
    and clears ``PAUSE``, ``TRIAL``, ``MEDIA`` and ``KV_TRANSFER``.
    """

    NONE = 0
    GRAMMAR = enum.auto()
    """The request's output constraint is being compiled, or the mask of its next allowed tokens is being computed."""
    PAUSE = enum.auto()
    """The request arrived after a pause was requested, and waits for the end of the pause."""
    TRIAL = enum.auto()
    """A step with the request failed. ``StepTrial`` retries the step's requests in smaller subsets to find the
    cause.
    """
    LORA = enum.auto()
    """The request's adapter is being loaded, or all adapter slots are in use."""
    MEDIA = enum.auto()
    """The embeddings of the request's next media item are not computed yet, or the encoder cache is full."""
    KV_TRANSFER = enum.auto()
    """KV blocks that the request needs are being loaded, for this request or for another request."""


class RequestStatus(enum.IntEnum):
    """Status of a request. Every value greater than PREEMPTED means that the request has ended."""

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
        """The finish reason for the client, or None while the request has not ended."""
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
    """The scheduler's state of one sequence.

    There is no prefill or decode phase. Steps increase ``num_computed_tokens`` until it equals ``num_tokens`` plus
    ``num_placeholders``.

    Attributes:
        key: Name of the request that is unique in this process. Workers know a request only by its key, because
            different clients can use the same request id, and a client can reuse an id.
        client_id: Id of the session that sent the request and gets the outputs.
        number: Number that identifies the request in arrays of new tokens (columns), or 0 if the client does not number
            its requests.
        arrival: Number of the request in the order in which requests reached the scheduler.
        outlives: Whether another engine admitted the request before.
        all_token_ids: Prompt and output tokens. Output tokens from other engines (earlier attempts) count as output.
            Length limits, stop conditions and seeds therefore count from the true beginning of the output.
        num_computed_tokens: Number of tokens in the KV cache, including tokens of steps that are scheduled but not
            finished.
        num_processed_tokens: Number of computed tokens for whose steps the results have been processed.
        num_placeholders: Number of output tokens that the steps in flight will sample.
        valid_from_step: Number of the first step whose results count for the request. The request was preempted after
            earlier steps, so their results are ignored.
        sampled_step: Number of the last step that samples an output token for the request.
        num_charged_tokens: Number of tokens already charged to the tenant's share of the engine.
        num_uncharged_embeds: Number of computed media embeddings not yet charged to the tenant's share.
        max_drafts: Maximum number of tokens to draft for one step.
        spec_token_ids: Draft tokens that follow the known tokens.
        unsettled: Whether a step in flight verifies drafts of the request, or the drafter is still running after a
            step. While ``unsettled`` is true, the number of tokens for the next step is unknown.
        draft_history: Record of accepted and rejected drafts, without tokens that a grammar forces.
        forced_history: Record of accepted and rejected drafts that a grammar forces.
        drafts_forced: Whether the drafts that are being verified are tokens that a grammar forces.
        spec_stats: Draft statistics, or None if the request has had no drafts.
        media_end: Prompt position after the last media item, or 0 without media.
        whole_spans: Known ranges of positions. The positions of one range must be computed in one step.
        num_asked_media: Number of media items, in prompt order, that were requested from the encoder cache or need no
            encoding.
        lora: The LoRA adapter, or None. The adapter's digest is set once it is known.
        hands_over: Whether the request resumes on another engine when it reaches ``max_tokens``.
        kv_source: Another engine that has KV blocks of the request, according to the client.
        kv_transfer_params: Parameters for a plugin's connector.
        grammar: The compiled constraint, or None.
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
        "unattended_start",
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
        self.unattended_start = request.unattended_start
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
        """Number of prompt tokens and of output tokens that are known so far."""
        return len(self.all_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Number of output tokens, including output tokens of earlier attempts."""
        return len(self.all_token_ids) - self.num_prompt_tokens

    @property
    def num_loaded_tokens(self) -> int:
        """Number of cached tokens whose KV blocks were loaded from another engine or a tier."""
        return sum(self.loaded_tokens)

    @property
    def lora_digest(self) -> bytes:
        """Digest of the LoRA adapter, or empty without an adapter."""
        return b"" if self.lora is None else self.lora.digest

    @property
    def finished(self) -> bool:
        """Whether the request has ended."""
        return self.status.finished

    @property
    def resumes(self) -> bool:
        """Whether the request had already begun, because it was preempted or another engine had admitted it."""
        return self.status is RequestStatus.PREEMPTED or self.outlives

    @property
    def constrained(self) -> bool:
        """Whether a grammar restricts the output tokens."""
        return self.sampling_params.structured_output is not None

    def take_uncharged_tokens(self) -> int:
        """Return the number of new tokens plus computed media embeddings since the last call."""
        count = len(self.all_token_ids) - self.num_charged_tokens + self.num_uncharged_embeds
        self.num_charged_tokens, self.num_uncharged_embeds = len(self.all_token_ids), 0
        return count

    def record_event(self, kind: EventType, timestamp: float) -> None:
        """Record an event for the next output. ``timestamp`` is in monotonic seconds."""
        self.events.append(EngineCoreEvent(kind, timestamp))

    def take_events(self) -> list[EngineCoreEvent]:
        """Return the request's events since the last call."""
        events, self.events = self.events, []
        return events


# Log lines about failed requests, if ``log.requests`` enables them. The lines contain neither the request's text nor
# the error message, because the error message quotes field values.

logger = logging.getLogger(REQUEST_LOGGER)


def log_refused(request_id: str, external_id: str, error: RequestFailed | RequestError) -> None:
    """Log that a request was refused. ``external_id`` is the id that the client knows."""
    logger.info("request refused", extra=_fields(request_id, external_id, error))


def log_failed(request_id: str, external_id: str, error: RequestFailed | RequestError) -> None:
    """Log that an accepted request failed."""
    logger.info("request failed", extra=_fields(request_id, external_id, error))


def log_aborted(request_ids: Sequence[str], reason: str) -> None:
    """Log that requests ended because their frontend aborted them. The frontend gave ``reason``."""
    for request_id in request_ids:
        logger.info("request aborted", extra={"engine_request": request_id, "reason": reason})


def refusal(request_id: str, external_id: str, error: Exception, *, doing: str) -> RequestFailed:
    """Log a refused request and return the error that ends it. If the error is unexpected, it is logged as an
    incident.
    """
    if isinstance(error, RequestFailed):
        log_refused(request_id, external_id, error)
        return error
    return incident(error, request=external_id or request_id, doing=doing)


def log_incident(request: Request, error: Exception, *, doing: str, reason: str = REASON) -> RequestError:
    """Log an unexpected error as an incident, and return the error that ends the request. The client's error contains
    the incident's number.
    """
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
