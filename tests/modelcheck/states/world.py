"""A few requests on one pool of state slots, and a device that runs their steps in order, later."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from penstock_enginecore.core.kv_cache.block_pool import KVCacheBlock
from penstock_enginecore.core.kv_cache.events import KvEventLog
from penstock_enginecore.core.scheduler.output import SchedulerOutput
from penstock_enginecore.states.core.slots import StateSlots
from penstock_enginecore.states.core.spec import SPAN, ZERO_SLOT, StatePoolConfig, StateStep, span_start
from tests.modelcheck.violation import Violation

HALF = SPAN // 2
MAX_IN_FLIGHT = 2
GARBAGE = "?"
Event = tuple[Any, ...]


@dataclass(frozen=True)
class Bounds:
    """Bounds of a world.

    Attributes:
        prompts: For each request, its blocks as letters. Equal beginnings are equal prefixes. Half a block of output
            follows.
        rows: Requests that may run at once.
        kept: Slots besides those of running requests.
        interval: Blocks between kept states.
        drafts: Steps may have drafts. preemptions, aborts, failures, losses: How many requests may be preempted,
        aborted, or found to have a state that
            is not finite, and how many steps may fail.
    """

    prompts: tuple[str, ...]
    rows: int = 2
    kept: int = 1
    interval: int = 1
    drafts: bool = False
    preemptions: int = 0
    aborts: int = 0
    failures: int = 0
    losses: int = 0


@dataclass
class Sequence:
    """A request: the attributes that the slots read, and its tokens that are scheduled."""

    key: str
    prompt: str
    block_hashes: list[bytes]
    num_computed: int = 0
    num_processed_tokens: int = 0
    num_preemptions: int = 0
    unsettled: bool = False
    status: str = "waiting"

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt) * SPAN + 1

    @property
    def length(self) -> int:
        return len(self.prompt) * SPAN + HALF

    def content(self, position: int) -> str:
        """Return a name of the request's first ``position`` tokens, in half blocks."""
        return f"{self.prompt[: -(-position // SPAN)]}{position}"


@dataclass(frozen=True)
class Step:
    """A step of one request in flight. ``epoch`` is the number of preemptions of the request before the step."""

    index: int
    epoch: int
    state: StateStep
    start: int
    count: int
    drafted: bool


@dataclass
class World:
    """Requests, slots, memory and steps in flight. ``apply`` returns another world."""

    bounds: Bounds
    slots: StateSlots
    sequences: list[Sequence]
    slot_memory: dict[int, str] = field(default_factory=dict)
    row_memory: dict[tuple[int, int], str] = field(default_factory=dict)
    flight: tuple[Step, ...] = ()
    known: frozenset[bytes] = frozenset()
    used: dict[str, int] = field(default_factory=dict)

    @classmethod
    def begin(cls, bounds: Bounds, slots: type[StateSlots] = StateSlots) -> "World":
        """Return the world in which no request has started."""
        config = StatePoolConfig(
            num_slots=1 + 2 * bounds.rows + bounds.kept,
            num_requests=bounds.rows,
            rows_per_request=2 * SPAN if bounds.drafts else SPAN,
            interval=bounds.interval * SPAN,
        )
        sequences = [
            Sequence(str(i), prompt, [prompt[: n + 1].encode() for n in range(len(prompt))])
            for i, prompt in enumerate(bounds.prompts)
        ]
        log = KvEventLog(SPAN, 0, in_full=False)
        return cls(bounds, slots(config, keeps=True, events=log), sequences, {ZERO_SLOT: "0"})

    def key(self) -> Any:
        """Return everything that later events depend on."""
        pool, states = self.slots.pool, self.slots._requests
        return (
            tuple((block.ref_count, block.block_hash) for block in pool.blocks),
            tuple(_free(pool._free._head)),
            tuple(self.slots._free_rows),
            tuple(
                (
                    key,
                    own.rows,
                    tuple(b.block_id for b in own.own),
                    tuple(own.ends),
                    own.branch,
                    tuple(sorted((end, slot.block_id) for end, slot in own.shared.items())),
                )
                for key, own in sorted(states.items())
            ),
            tuple(sorted(self.slot_memory.items())),
            tuple(sorted(self.row_memory.items())),
            tuple((s.num_computed, s.num_processed_tokens, s.unsettled, s.status) for s in self.sequences),
            repr(self.flight),
            self.known,
            tuple(sorted(self.used.items())),
        )

    # Events.

    def events(self) -> Iterator[Event]:
        """Yield the events that are possible."""
        running = [i for i, sequence in enumerate(self.sequences) if sequence.status == "running"]
        yield from (("admit", i) for i, sequence in enumerate(self.sequences) if sequence.status == "waiting")
        if len(self.flight) < MAX_IN_FLIGHT:
            for i in running:
                yield from self._steps_of(i)
        if self.flight:
            yield from (("process", good) for good in ((HALF, SPAN) if self.flight[0].drafted else (0,)))
            if self._left("losses"):
                yield ("losses",)
        for kind in ("preemptions", "aborts", "failures"):
            if self._left(kind):
                yield from ((kind, i) for i in running)

    def _left(self, kind: str) -> bool:
        return self.used.get(kind, 0) < getattr(self.bounds, kind)

    def _steps_of(self, i: int) -> Iterator[Event]:
        sequence = self.sequences[i]
        left = sequence.length - sequence.num_computed
        if sequence.unsettled:
            return
        yield from (("step", i, count) for count in (HALF, SPAN + HALF) if count <= left)
        if self.bounds.drafts and left >= SPAN and all(step.index != i for step in self.flight):
            yield ("draft", i)

    def apply(self, event: Event) -> "World":
        """Return the world after an event. Raises Violation."""
        after = World(
            self.bounds,
            copy.deepcopy(self.slots),
            copy.deepcopy(self.sequences),
            self.slot_memory.copy(),
            self.row_memory.copy(),
            self.flight,
            self.known,
            self.used.copy(),
        )
        try:
            after._do(*event)
        except (RuntimeError, ValueError, IndexError, KeyError) as e:
            raise Violation("1 the slots raise no error", f"{type(e).__name__}: {e}") from e
        after._check()
        return after

    def _do(self, kind: str, *arguments: int) -> None:
        if kind in ("preemptions", "aborts", "failures", "losses"):
            self.used[kind] = self.used.get(kind, 0) + 1
        if kind == "admit":
            self._admit(self.sequences[arguments[0]])
        elif kind in ("step", "draft"):
            self._schedule(arguments[0], SPAN if kind == "draft" else arguments[1], drafted=kind == "draft")
        elif kind == "process":
            self._process(*arguments)
        elif kind == "losses":
            self._lose()
        else:
            self._end(self.sequences[arguments[0]], keep=kind != "failures")
            if kind == "preemptions":
                self._restart(self.sequences[arguments[0]])

    def _admit(self, sequence: Sequence) -> None:
        hashes = sequence.block_hashes[: (sequence.length - 1) // SPAN]
        num_keys = next((i for i, each in enumerate(hashes) if each not in self.known), len(hashes))
        start = self.slots.longest(hashes, num_keys) * SPAN
        branch = num_keys * SPAN if start < num_keys * SPAN else 0
        request: Any = sequence
        if self.slots.admit(request, start, branch):
            sequence.status, sequence.num_computed, sequence.num_processed_tokens = "running", start, start

    def _schedule(self, i: int, count: int, *, drafted: bool) -> None:
        sequence: Any = self.sequences[i]
        output = SchedulerOutput(num_scheduled_tokens={sequence.key: count}, total_num_scheduled_tokens=count)
        output.cached_requests.request_ids.append(sequence.key)
        output.cached_requests.num_computed_tokens.append(sequence.num_computed)
        state = self.slots.plan(output, {sequence.key: sequence})[sequence.key]
        self.flight += (Step(i, sequence.num_preemptions, state, sequence.num_computed, count, drafted),)
        sequence.num_computed += count
        sequence.unsettled = drafted

    def _process(self, accepted: int) -> None:
        step, *later = self.flight
        self.flight = tuple(later)
        sequence: Any = self.sequences[step.index]
        final = step.start + (accepted if step.drafted else step.count)
        self._compute(step, final)
        if self._is_stale(step):
            return
        sequence.num_computed -= step.start + step.count - final
        sequence.num_processed_tokens, sequence.unsettled = final, False
        self.known |= set(sequence.block_hashes[: final // SPAN])
        self.slots.settle(sequence, final)
        if final >= sequence.length:
            self._end(sequence, keep=True)

    def _compute(self, step: Step, final: int) -> None:
        """Run a step on the device. Contents from ``final`` on are those of rejected drafts."""
        sequence, state, length = self.sequences[step.index], step.state, self.slots.config.rows_per_request
        base, end = span_start(step.start), step.start + step.count
        stale = self._is_stale(step)
        if not stale:
            if self.slot_memory.get(state.closed, GARBAGE) != (sequence.content(base) if base else "0"):
                raise Violation("2 a step reads the state of its request's prefix", str(step))
            for position in range(base, step.start, HALF):
                if self.row_memory.get((state.rows, position % length), GARBAGE) != sequence.content(position + HALF):
                    raise Violation("3 a step reads the open rows of its request", str(step))
        for place, slot in state.writes:
            self.slot_memory[slot] = GARBAGE if stale or place > final else sequence.content(place)
        for position in range(max(step.start, end - SPAN), end, HALF):
            wrong = stale or position + HALF > final
            self.row_memory[state.rows, position % length] = GARBAGE if wrong else sequence.content(position + HALF)

    def _is_stale(self, step: Step) -> bool:
        """Return whether nobody uses the results of a step, because its request has ended or restarted meanwhile."""
        sequence = self.sequences[step.index]
        return sequence.status != "running" or sequence.num_preemptions != step.epoch

    def _lose(self) -> None:
        step = self.flight[0]
        for _, slot in step.state.writes:
            self.slot_memory[slot] = GARBAGE
        length = self.slots.config.rows_per_request
        for position in range(max(step.start, step.start + step.count - SPAN), step.start + step.count, HALF):
            self.row_memory[step.state.rows, position % length] = GARBAGE
        self.flight = ()
        for sequence in self.sequences:
            if sequence.status == "running":
                self._end(sequence, keep=True)
                self._restart(sequence)

    def _end(self, sequence: Any, *, keep: bool) -> None:
        self.slots.free(sequence, keep=keep)
        sequence.status = "ended"

    def _restart(self, sequence: Sequence) -> None:
        sequence.status, sequence.num_computed, sequence.num_processed_tokens = "waiting", 0, 0
        sequence.unsettled = False
        sequence.num_preemptions += 1

    # Invariants.

    def _check(self) -> None:
        pool = self.slots.pool
        references = [0] * len(pool.blocks)
        for own in self.slots._requests.values():
            for slot in (*own.own, *own.shared.values()):
                references[slot.block_id] += slot.block_id != ZERO_SLOT
        if references != [block.ref_count for block in pool.blocks]:
            raise Violation("4 every slot is free or held as often as counted")
        rows = [*self.slots._free_rows, *(own.rows for own in self.slots._requests.values())]
        if sorted(rows) != list(range(self.bounds.rows)):
            raise Violation("5 every ring of rows is free or of one request")
        if not any(s.status == "running" for s in self.sequences) and pool.num_free_blocks != pool.num_usable_blocks:
            raise Violation("6 without a request, all slots are free")
        for block in pool.blocks:
            if block.block_hash is not None:
                text = block.block_hash.decode()
                if self.slot_memory.get(block.block_id) != f"{text}{len(text) * SPAN}":
                    raise Violation("7 a kept slot holds the state of its prefix", str(block))


def _free(head: KVCacheBlock) -> Iterator[int]:
    block = head.next
    while block is not None and block.block_id >= 0:
        yield block.block_id
        block = block.next
