"""A request inside the engine: what came in, and how far it has got."""

import enum
import itertools

from penstock_common.types.outputs import EngineCoreEvent, EventType, FinishReason
from penstock_common.types.pooling import PoolingParams
from penstock_common.types.request import EngineCoreRequest
from penstock_common.types.sampling import SamplingParams


class RequestStatus(enum.IntEnum):
    """Everything above PREEMPTED is an end."""

    WAITING = 1
    RUNNING = 2
    PREEMPTED = 3
    FINISHED_STOPPED = 4
    FINISHED_LENGTH = 5
    FINISHED_ABORTED = 6
    FINISHED_ERROR = 7

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
}


_serial = itertools.count(1)


class Request:
    """The scheduler's view of one sequence.

    ``key`` names it inside this process: two clients may use the same request id, and a client may use one again.
    Workers know a request by its key alone.

    There is no prefill and no decode: ``num_computed_tokens`` catches up with ``num_tokens``. ``client_id`` names the
    session that sent the request and gets its outputs. ``output_token_ids`` starts with the tokens of earlier attempts,
    so that limits, stops and seeded draws count from the true beginning of the output.
    """

    __slots__ = (
        "all_token_ids",
        "arrival_time",
        "attempt",
        "block_hashes",
        "cache_salt",
        "client_id",
        "deadline",
        "events",
        "key",
        "max_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "pooling_params",
        "prefill_reported",
        "priority",
        "queued_time",
        "request_id",
        "sampling_params",
        "second_text_start",
        "status",
        "stop_reason",
        "stop_token_ids",
    )

    def __init__(self, request: EngineCoreRequest, *, client_id: str, max_model_len: int) -> None:
        self.key = f"{request.request_id}#{next(_serial)}"
        self.request_id = request.request_id
        self.client_id = client_id
        self.sampling_params: SamplingParams = request.sampling_params
        self.pooling_params: PoolingParams | None = request.pooling_params
        self.second_text_start = request.second_text_start
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.all_token_ids: list[int] = [*request.prompt_token_ids, *request.prior_output_token_ids]
        room = max_model_len - self.num_prompt_tokens
        asked = request.sampling_params.max_tokens
        self.max_tokens = room if asked is None else min(asked, room)
        self.stop_token_ids = frozenset(request.sampling_params.stop_token_ids)
        self.cache_salt = request.cache_salt
        self.priority = request.priority
        self.arrival_time = request.arrival_time
        self.deadline = request.deadline
        self.attempt = request.attempt
        self.status = RequestStatus.WAITING
        self.stop_reason: int | str | None = None
        self.num_computed_tokens = 0
        self.num_cached_tokens = -1
        self.num_preemptions = 0
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
    def finished(self) -> bool:
        """Whether the request has ended."""
        return self.status.finished

    def record_event(self, kind: EventType, timestamp: float) -> None:
        """Remember an event for the next output. ``timestamp``: monotonic seconds."""
        self.events.append(EngineCoreEvent(kind, timestamp))

    def take_events(self) -> list[EngineCoreEvent]:
        """Events since the last call."""
        events, self.events = self.events, []
        return events
