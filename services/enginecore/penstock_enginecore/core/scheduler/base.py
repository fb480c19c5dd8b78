"""The interface of schedulers, and the registry that finds a scheduler class by name."""

import enum
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import msgspec

from penstock_common.config.class_paths import load_target
from penstock_common.types.outputs import EngineCoreOutputs, RequestError, SchedulerStats
from penstock_enginecore.config import SchedulerConfig, SpeculativeConfig
from penstock_enginecore.core.kv_cache.block_pool import ComputedBlocks
from penstock_enginecore.core.kv_cache.manager import KVCacheManager
from penstock_enginecore.core.kv_cache.spec import KVCacheConfig
from penstock_enginecore.core.model_info import MediaInfo
from penstock_enginecore.core.request import Hold, Request
from penstock_enginecore.core.scheduler.output import DraftTokenIds, ModelRunnerOutput, SchedulerOutput
from penstock_enginecore.kv_transfer.core.base import KVConnector
from penstock_enginecore.kv_transfer.core.leases import LeasedBlocks
from penstock_enginecore.media.core.receiver_cache import MediaInputs

Clock = Callable[[], float]
"""Clock that returns the time in seconds since an arbitrary origin."""


class PauseState(enum.Enum):
    """State of a pause.

    Attributes:
        RUNNING: Requests are accepted and scheduled.
        DRAINING: Requests that arrived before the pause are scheduled. Later requests wait until the state is RUNNING.
        PAUSED: Nothing is scheduled. Running requests keep their blocks and continue after the pause.
    """

    RUNNING = "running"
    DRAINING = "draining"
    PAUSED = "paused"


class Admission(enum.Enum):
    """Result of an attempt to start a waiting request.

    Attributes:
        STARTED: The request has started and is part of this step.
        BLOCKED: The request is held until a resource that it needs is ready. Requests after it may start.
        NO_ROOM: The request stays at the head of the queue. No request after it starts in this step.
        ENDED: The request failed and has ended.
    """

    STARTED = enum.auto()
    BLOCKED = enum.auto()
    NO_ROOM = enum.auto()
    ENDED = enum.auto()


class StepResource:
    """A limited resource that only some requests need, such as adapter slots. The scheduler calls the methods of this
    class.

    The methods are listed in the order in which the scheduler calls them. The methods of the base class set no limits. The
    argument ``request`` has not ended, except in ``ended``.

    Attributes:
        stats_name: The field of SchedulerStats that ``stats`` fills in. Empty if the resource has no statistics.
    """

    stats_name = ""

    def attach(self, scheduler: "Scheduler") -> None:
        """Connect the resource to its scheduler."""

    def added(self, request: Request) -> None:
        """Handle a request that was queued."""

    def begin_step(self, *, paused: bool) -> None:
        """Begin scheduling a step. If ``paused``, the step computes nothing."""

    def begin_waiting(self) -> None:
        """Begin the loop over waiting requests. The running requests of the step are already chosen."""

    def may_start(self, request: Request) -> Hold:
        """Return the hold that a waiting request must get now. NONE means that this resource does not keep the request
        from starting.
        """
        return Hold.NONE

    def load(self, request: Request, computed: ComputedBlocks, reserve: Callable[[int], int]) -> Admission | None:
        """Begin to load KV blocks of a waiting request, so that steps need not compute them.

        Args:
            request: The request at the head of the queue.
            computed: The prefix blocks that are in the KV cache.
            reserve: Function that returns the number of blocks to keep free if the request gets blocks for a given
                number of tokens.

        Returns:
            BLOCKED if a load has begun. NO_ROOM if the load needs more blocks than are free. None if the request should
            compute its tokens.
        """
        return None

    def fit(self, request: Request, start: int, count: int, output: SchedulerOutput) -> int:
        """Return how many of the ``count`` tokens from position ``start`` can be computed in the step, or 0."""
        return count

    def claim(self, request: Request, start: int, count: int) -> int:
        """Return how many of ``count`` tokens a waiting request may compute if it starts. If the result is 0, the
        request has been given a hold.
        """
        return count

    def has_others(self, request: Request) -> bool:
        """Return whether a waiting request other than this one has KV blocks."""
        return False

    def give_up_one(self, *, keep: Request | None = None) -> bool:
        """Free the KV blocks of one waiting request other than ``keep``. Return False if no such request has blocks."""
        return False

    @property
    def returns_blocks(self) -> bool:
        """Whether KV blocks that belong to no request, such as blocks that are being copied, will be free soon."""
        return False

    def started(self, request: Request, num_computed: int, count: int) -> None:
        """Handle the start of a request that has ``num_computed`` tokens in the KV cache and computes ``count`` more."""

    def reach(self, request: Request, count: int, output: SchedulerOutput) -> int:
        """Return how many of the next ``count`` tokens of a running request the step can compute, or 0."""
        return count

    def preempted(self, request: Request) -> None:
        """Handle a running request that has lost its KV blocks."""

    def all_preempted(self) -> None:
        """Handle the preemption of every running request between two steps."""

    def workers_reset(self) -> None:
        """Handle a step that was not computed. The workers may have lost the state that they keep for this resource."""

    def ended(self, request: Request) -> None:
        """Handle the end of a request. The request may have been waiting, held or running."""

    def end_step(self, output: SchedulerOutput) -> None:
        """Finish scheduling a step: add the data that workers need for this resource."""

    def stats(self) -> Any:
        """Return the current statistics of the resource. Thread-safe."""


class SchedulerContext(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a scheduler, and objects that the scheduler uses.

    Attributes:
        num_stages: Number of pipeline stages. A step passes through the stages one after the other, and each stage can
            compute a different step.
        step_seconds: Measured duration of a step in seconds, by the number of tokens in the step.
        resources: Resources that only some requests need.
        media: Limits of each media modality that the model accepts.
        encoder_cache_size: Maximum number of media embeddings to keep on the device.
        media_inputs: Cache of media inputs.
        leases: Lease manager for KV blocks that another engine may still read.
        kv_connector: Loads KV blocks from other engines or tiers, or None if no connector is configured.
        min_load_tokens: Minimum number of consecutive tokens to load. Shorter runs of tokens are computed instead of
            loaded.
        monotonic_clock: Clock for event timestamps.
        wall_clock: Clock for deadlines, in seconds since the epoch.
    """

    config: SchedulerConfig
    kv_cache: KVCacheConfig
    enable_prefix_caching: bool
    enable_kv_events: bool = False
    eos_token_ids: frozenset[int]
    supports_chunked_prefill: bool = True
    num_stages: int = 1
    speculative: SpeculativeConfig = SpeculativeConfig()
    step_seconds: Mapping[int, float] = {}
    resources: tuple[StepResource, ...] = ()
    media: tuple[MediaInfo, ...] = ()
    encoder_cache_size: int = 0
    media_inputs: MediaInputs = MediaInputs()
    leases: LeasedBlocks
    kv_connector: KVConnector | None = None
    min_load_tokens: int = 64
    monotonic_clock: Clock
    wall_clock: Clock


class Scheduler(Protocol):
    """Decides which tokens each step computes, and makes outputs for clients from the step's results.

    The engine calls ``schedule``, lets the executor run the step, and then calls ``update_from_output`` and
    ``take_outputs``. The next step may be scheduled before the results of the current step arrive. Results arrive in
    step order. Requests may be added and aborted between any two calls. Every request ends exactly once, with one
    output that has a finish reason. Only the requests of a disconnected client end without outputs.

    Attributes:
        kv_cache: Maps requests to KV blocks, and finds cached blocks. The caller must hash a prompt with ``kv_cache``
            before it adds the request.
    """

    kv_cache: KVCacheManager

    def add_request(self, request: Request, hold: Hold = Hold.NONE) -> None:
        """Queue a request. A request with a ``hold`` is not scheduled until ``release`` removes the hold.

        If an exception is raised, the request is not queued.

        Raises:
            InvalidArgument: The id is in use.
            ResourceExhausted: The queue is full.
        """

    def release(self, request: Request, hold: Hold) -> None:
        """Remove a hold from a request. If the request has ended in the meantime, nothing changes."""

    def hold_back(self, request: Request, hold: Hold) -> None:
        """Preempt a running request and hold it until ``release``. Steps run without the request, and the results of
        steps in flight are ignored for the request. If the request is not running, nothing changes.
        """

    def fail(self, request: Request, error: RequestError) -> bool:
        """End a request with an ERROR output. If the request has already ended, change nothing and return False."""

    def abort_requests(self, client_id: str, request_ids: Iterable[str], *, hand_over: bool = False) -> list[str]:
        """End those of the given requests that have not ended yet, and return the ids of the requests that this call
        ended. The finish reason in their outputs is ABORT. If ``hand_over`` is true, the finish reason is HANDOFF, and
        the frontend resumes the requests on another engine.
        """

    def abort_client(self, client_id: str) -> None:
        """End all requests of a disconnected client, without outputs."""

    def abort_all(self, error: RequestError, *, held: bool = True, keep_blocks: bool = False) -> None:
        """End every request with an ABORT output that carries ``error``.

        Args:
            error: The error that clients get as the reason for the ABORT.
            held: Whether to end also the requests that wait for the end of a pause.
            keep_blocks: Whether to lease the KV blocks to the engines that resume the requests. This engine must stay
                alive to serve the blocks.
        """

    def end_expired(self) -> None:
        """End requests whose deadline has passed. ``schedule`` also ends such requests."""

    def schedule(self, *, begin: bool = True) -> SchedulerOutput:
        """Choose the tokens and media that the next step computes. The step may be empty. Also end requests whose
        deadline has passed.

        ``begin`` says whether waiting requests may start in the step.
        """

    def constrained(self, scheduler_output: SchedulerOutput) -> list[Request]:
        """Return the requests of the step whose next token a grammar constrains, in batch order. The results of all
        earlier steps must have been processed.
        """

    def update_from_output(self, scheduler_output: SchedulerOutput, model_output: ModelRunnerOutput) -> None:
        """Process the results of a step, in step order. Requests that ended while the step ran are skipped."""

    def update_draft_token_ids(self, scheduler_output: SchedulerOutput, drafts: DraftTokenIds) -> None:
        """Store the tokens that were drafted after a step. The step's results must have been processed."""

    @property
    def drafter_failure(self) -> str:
        """The reason why drafting was switched off. Empty if the drafter works, or if no drafter is configured."""
        return ""

    def roll_back(self, scheduler_output: SchedulerOutput) -> None:
        """Undo a step that was not computed. No other step may be in flight.

        Later steps schedule the tokens of the undone step again. If the model has recurrent states, the step's requests
        are preempted. The workers have already applied the step's changes to requests and blocks.
        """

    def step_failed(self, scheduler_output: SchedulerOutput) -> Request | None:
        """Recompute all requests after a failed step. Later steps were not run, and the workers have dropped all
        request state.

        If the request that caused the failure is now known, return that request. The caller must end it.
        """

    @property
    def num_unexplained_failures(self) -> int:
        """Number of consecutive failed steps whose requests each succeeded alone."""

    def take_outputs(self) -> dict[str, EngineCoreOutputs]:
        """Return the outputs since the last call, by client id."""

    @property
    def has_requests(self) -> bool:
        """Whether any request is waiting or running."""

    @property
    def num_requests(self) -> int:
        """Number of waiting and running requests."""

    @property
    def num_held_by_pause(self) -> int:
        """Number of requests that arrived after a pause was requested, and wait for its end."""

    @property
    def has_work(self) -> bool:
        """Whether there are requests that have not ended, outputs to take, or ended requests whose state the workers
        still keep.
        """

    pause_state: PauseState

    def pause(self, state: PauseState) -> None:
        """Set the pause state."""

    @property
    def drained(self) -> bool:
        """Whether all requests that were in the scheduler when the pause was requested have ended."""

    def preempt_all(self) -> None:
        """Preempt every running request. The requests are recomputed later."""

    def next_deadline(self) -> float | None:
        """Return the earliest deadline of all requests, in seconds since the epoch."""

    def reset_prefix_cache(self) -> bool:
        """Clear the prefix cache. While a request is running, change nothing and return False."""

    def reset_encoder_cache(self) -> None:
        """Drop the media embeddings that no running request needs."""

    def stats(self) -> SchedulerStats:
        """Return the scheduler's statistics, such as its current load."""


SchedulerFactory = Callable[[SchedulerContext], Scheduler]

_KNOWN: dict[str, str] = {"default": "penstock_enginecore.core.scheduler.scheduler:DefaultScheduler"}


def register_scheduler(name: str, target: str) -> None:
    """Register the scheduler class at ``target`` (``package.module:Class``) under ``name``. The setting
    ``scheduler.scheduler`` then accepts this name.
    """
    _KNOWN[name] = target


def create_scheduler(context: SchedulerContext) -> Scheduler:
    """Create the scheduler of the setting ``scheduler.scheduler``, which is a registered name or
    ``package.module:Class``.

    Raises ConfigError if the name is unknown or the class cannot be imported.
    """
    factory: SchedulerFactory = load_target("scheduler.scheduler", context.config.scheduler, _KNOWN)
    return factory(context)
