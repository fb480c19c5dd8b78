"""What the engine core asks of a scheduler, and how one is chosen by name."""

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
"""Seconds from some origin."""


class PauseState(enum.Enum):
    """RUNNING takes and schedules requests. DRAINING schedules those it had when the pause was asked for; later ones wait
    until it is RUNNING again. PAUSED schedules nothing: what runs keeps its blocks and goes on afterwards.
    """

    RUNNING = "running"
    DRAINING = "draining"
    PAUSED = "paused"


class Admission(enum.Enum):
    """Result of an attempt to start a waiting request.

    Attributes:
        STARTED: The request runs in this step.
        BLOCKED: The request is held until a resource of its own is there. Requests behind it may start.
        NO_ROOM: The request stays at the head of the queue. No request behind it starts in this step.
        ENDED: The request failed and has ended.
    """

    STARTED = enum.auto()
    BLOCKED = enum.auto()
    NO_ROOM = enum.auto()
    ENDED = enum.auto()


class StepResource:
    """Something that only some requests need, and of which a step has only so much. The base class needs nothing.

    The scheduler calls the hooks in the order in which they stand here. ``request`` is living, unless a hook says otherwise.
    ``stats_name``: the field of SchedulerStats that ``stats`` fills in; empty: none.
    """

    stats_name = ""

    def attach(self, scheduler: "Scheduler") -> None:
        """The scheduler is there."""

    def added(self, request: Request) -> None:
        """A request was queued."""

    def begin_step(self, *, paused: bool) -> None:
        """A step is being scheduled. If ``paused``, it computes nothing."""

    def begin_waiting(self) -> None:
        """The running requests of the step are chosen; the waiting ones follow."""

    def may_start(self, request: Request) -> Hold:
        """Return why a waiting request is held from now on; NONE if it may start, as far as this resource decides."""
        return Hold.NONE

    def load(self, request: Request, computed: ComputedBlocks, reserve: Callable[[int], int]) -> Admission | None:
        """Have KV blocks of a waiting request loaded, so that it need not compute them.

        Args:
            request: The request at the head of the queue.
            computed: The blocks of its prefix that the KV cache has.
            reserve: Returns how many blocks must stay free if the request gets blocks for that many tokens.

        Returns:
            BLOCKED if a load has begun, NO_ROOM if the load needs blocks that are in use, None if the request should compute
            its tokens.
        """
        return None

    def fit(self, request: Request, start: int, count: int, output: SchedulerOutput) -> int:
        """Return how many of ``count`` tokens from position ``start`` fit into the step; 0 if none do."""
        return count

    def claim(self, request: Request, start: int, count: int) -> int:
        """Return how many of ``count`` tokens a waiting request may compute if it starts; 0 if it is held from now on."""
        return count

    def has_others(self, request: Request) -> bool:
        """Return whether a waiting request other than this one has KV blocks."""
        return False

    def give_up_one(self, *, keep: Request | None = None) -> bool:
        """Free the KV blocks of one waiting request, but not of ``keep``. Return False if no such request has blocks."""
        return False

    @property
    def returns_blocks(self) -> bool:
        """Whether KV blocks that no request has will be free soon."""
        return False

    def started(self, request: Request, num_computed: int, count: int) -> None:
        """A request starts with ``num_computed`` tokens in the KV cache, and computes ``count`` more."""

    def reach(self, request: Request, count: int, output: SchedulerOutput) -> int:
        """Return how many of the next ``count`` tokens of a running request the step can compute; 0 if none."""
        return count

    def preempted(self, request: Request) -> None:
        """A running request has lost its KV blocks."""

    def all_preempted(self) -> None:
        """Every running request was preempted between two steps."""

    def workers_reset(self) -> None:
        """A step was not computed; the workers may have lost what this resource keeps there."""

    def ended(self, request: Request) -> None:
        """A request has ended, wherever it was."""

    def end_step(self, output: SchedulerOutput) -> None:
        """The step is complete; add what the workers must know."""

    def stats(self) -> Any:
        """Counts and load now. Any thread."""


class SchedulerContext(msgspec.Struct, frozen=True, kw_only=True):
    """What a scheduler is built from. ``monotonic_clock`` stamps events, ``wall_clock`` is compared with deadlines. A step passes
    ``num_stages`` workers, one after the other, each of which can be at another step. ``step_seconds``: how long steps take
    by the number of their tokens, as far as that was measured. ``resources``: what only some requests need.
    ``media``: modalities that requests may have, of whose embeddings ``encoder_cache_size`` are kept at most; ``media_inputs``:
    what is kept of their inputs.
    ``leases``: keeps the blocks of requests that go on elsewhere.
    ``kv_connector``: brings blocks, of ``min_load_tokens`` tokens in a row at least; None where nothing does.
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
    """Decides what each step computes, and turns its tokens into outputs.

    A step is ``schedule``, the executor's work, ``update_from_output``, ``take_outputs``. The next step may be scheduled
    before this one's results are in; results come in the order of the steps. Requests may be added and aborted between any
    two of these calls. Every request ends exactly once, with one output that has a finish reason,
    except those of a client that has gone, which end silently.

    ``kv_cache``: which request holds which blocks, and which can be found. Requests come with their prompts hashed by it.
    """

    kv_cache: KVCacheManager

    def add_request(self, request: Request, hold: Hold = Hold.NONE) -> None:
        """Queue a request; with a ``hold`` it is not looked at before ``release`` takes that away.

        Raises InvalidArgument for an id in use, ResourceExhausted when the queue is full. Whatever it raises, the request is
        not queued then.
        """

    def release(self, request: Request, hold: Hold) -> None:
        """Take a reason to wait away from a request that may have ended meanwhile."""

    def hold_back(self, request: Request, hold: Hold) -> None:
        """Take a running request's turn and KV blocks away until ``release``: a step goes on without it. The results of the
        steps in flight do not count for it. One that does not run is left alone.
        """

    def fail(self, request: Request, error: RequestError) -> bool:
        """End a request that cannot be served with an ERROR output. Returns False, and does nothing, when it is not one of the
        living.
        """

    def abort_requests(self, client_id: str, request_ids: Iterable[str], *, hand_over: bool = False) -> list[str]:
        """End those of the requests that exist, with ABORT outputs; ``hand_over``: with HANDOFF, since they go on elsewhere.
        Returns their ids.
        """

    def abort_client(self, client_id: str) -> None:
        """End all requests of a client that has gone, without outputs."""

    def abort_all(self, error: RequestError, *, held: bool = True, keep_blocks: bool = False) -> None:
        """End every request with an ABORT output that carries ``error``; not ``held``: but for those that wait for a resume.
        ``keep_blocks``: the engine lives on and keeps their blocks for the engines that go on with them.
        """

    def end_expired(self) -> None:
        """End requests whose deadline has passed, which ``schedule`` does as well."""

    def schedule(self, *, begin: bool = True) -> SchedulerOutput:
        """Choose the work of the next step; may be nothing. ``begin``: whether waiting requests may be part of it. Ends requests
        whose deadline has passed.
        """

    def constrained(self, scheduler_output: SchedulerOutput) -> list[Request]:
        """Requests of a step that get a token which their grammar decides on, in batch order. The tokens of all steps before it
        must have been taken in.
        """

    def update_from_output(self, scheduler_output: SchedulerOutput, model_output: ModelRunnerOutput) -> None:
        """Take in the results of a step, in the order of the steps. Requests that ended while it ran are skipped."""

    def update_draft_token_ids(self, scheduler_output: SchedulerOutput, drafts: DraftTokenIds) -> None:
        """Take in what was drafted behind a step, whose results were taken in."""

    @property
    def drafter_failure(self) -> str:
        """Why nothing is drafted any more; empty while that works, or where nothing ever was."""
        return ""

    def roll_back(self, scheduler_output: SchedulerOutput) -> None:
        """A step, the only one in flight, was not computed. Workers have taken in what it says of requests and blocks.

        Its tokens are scheduled again.
        """

    def step_failed(self, scheduler_output: SchedulerOutput) -> Request | None:
        """A step has failed, those behind it were not run, and the workers have forgotten every request: all are computed again.
        Returns the request that the step failed of, for the caller to end, once that is known.
        """

    @property
    def num_unexplained_failures(self) -> int:
        """Times in a row that a step failed, and then each of its requests passed alone."""

    def take_outputs(self) -> dict[str, EngineCoreOutputs]:
        """Outputs since the last call, by client id."""

    @property
    def has_requests(self) -> bool:
        """Whether any request is waiting or running."""

    @property
    def num_requests(self) -> int:
        """Requests that are waiting or running."""

    @property
    def num_held_by_pause(self) -> int:
        """Of these, those that came after a pause was asked for."""

    @property
    def has_work(self) -> bool:
        """Whether there are requests, outputs nobody has taken, or ended requests the workers still hold."""

    pause_state: PauseState

    def pause(self, state: PauseState) -> None:
        """Stop or go on handing out work."""

    @property
    def drained(self) -> bool:
        """Whether all requests are of those that came after a pause was asked for."""

    def preempt_all(self) -> None:
        """Take every running request's KV blocks; they are computed again."""

    def next_deadline(self) -> float | None:
        """The earliest deadline of a living request, in seconds since the epoch."""

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. Returns False, and does nothing, while a request is running."""

    def reset_encoder_cache(self) -> None:
        """Forget the embeddings of media that no running request needs."""

    def stats(self) -> SchedulerStats:
        """The load now."""


SchedulerFactory = Callable[[SchedulerContext], Scheduler]

_KNOWN: dict[str, str] = {"default": "penstock_enginecore.core.scheduler.scheduler:DefaultScheduler"}


def register_scheduler(name: str, target: str) -> None:
    """Make ``scheduler.scheduler: name`` mean the class at ``target``, written ``package.module:Class``."""
    _KNOWN[name] = target


def create_scheduler(context: SchedulerContext) -> Scheduler:
    """The scheduler that ``scheduler.scheduler`` names: a registered name, or ``package.module:Class``.

    Raises ConfigError.
    """
    factory: SchedulerFactory = load_target("scheduler.scheduler", context.config.scheduler, _KNOWN)
    return factory(context)
