"""The interface of optional resources that requests need beside tokens and KV blocks, and LoRA slots as one of them."""

import enum
from collections.abc import Callable

from penstock_enginecore.core.kv_cache.block_pool import ComputedBlocks
from penstock_enginecore.core.request import Hold, Request
from penstock_enginecore.core.scheduler.output import SchedulerOutput
from penstock_enginecore.core.scheduler.state import SchedulerState
from penstock_enginecore.lora.core.slots import LoraSlots


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
    """

    def added(self, request: Request) -> None:
        """A request was queued."""

    def begin_step(self, *, paused: bool) -> None:
        """A step is being scheduled. If ``paused``, it computes nothing."""

    def begin_waiting(self) -> None:
        """The running requests of the step are chosen; the waiting ones follow."""

    def may_start(self, request: Request) -> bool:
        """Return whether a waiting request may start, as far as this resource decides. If not, hold the request."""
        return True

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


class LoraSlotResource(StepResource):
    """Lets at most ``max_loras`` adapters run at once. A request whose adapter has no slot is held with ``Hold.LORA_SLOT``."""

    def __init__(self, state: SchedulerState, slots: LoraSlots) -> None:
        self._state = state
        self._slots = slots

    def begin_step(self, *, paused: bool) -> None:
        """Release the requests whose adapters have got a slot."""
        if not paused:
            for key in self._slots.settle(self._state.clock()):
                self._state.waiting.release(self._state.requests.by_key[key], Hold.LORA_SLOT)

    def may_start(self, request: Request) -> bool:
        """Return whether the request's adapter has a slot, or can have one now."""
        lora = request.lora
        if lora is None or self._slots.admits(lora.digest):
            return True
        self._slots.wait(request.key, lora.digest, lora.name, self._state.clock())
        self._state.waiting.hold(request, Hold.LORA_SLOT)
        return False

    def started(self, request: Request, num_computed: int, count: int) -> None:
        """Occupy the slot of the request's adapter."""
        if request.lora is not None:
            self._slots.start(request.key, request.lora.digest, request.lora.name)

    def preempted(self, request: Request) -> None:
        """Leave the slot."""
        self._slots.leave(request.key)

    def ended(self, request: Request) -> None:
        """Leave the slot, or stop waiting for it."""
        self._slots.leave(request.key)

    def all_preempted(self) -> None:
        """Empty all slots, and let every request ask for one again."""
        self._slots.reset()
        self._state.waiting.release_all(Hold.LORA_SLOT)
