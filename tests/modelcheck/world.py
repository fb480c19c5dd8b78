"""A network of ranks, frontends and a coordinator: its states, and the events that are possible in each state.

A state is a tuple of numbers: one for each engine, each frontend and the coordinator, one for the remaining bounds, and
a mask of the messages in flight. Messages in flight form a set: they can overtake each other, and a message that is
sent twice before delivery counts once. Each number stands for a value of a machine. The effect of an event on a value
is computed once.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from penstock_common.types.data_parallel import (
    PauseMode,
    Pauses,
    RankGroup,
    Reconfigure,
    StartDpWave,
)
from penstock_coordinator.group import ScaleRefused
from penstock_enginecore.data_parallel.core.rank import Exchange, Phase, Rank
from tests.modelcheck import engine as engines
from tests.modelcheck.bounds import Bounds
from tests.modelcheck.engine import Ended, Engine, Entered
from tests.modelcheck.invariants import (
    broken,
    check_again,
    check_collective,
    check_epochs,
    check_expelled,
    check_forward,
    check_rest,
    check_running,
    check_size,
    check_switch,
    check_told,
    check_twice,
)
from tests.modelcheck.messages import NAMES, Add, PauseCall, ResumeCall, is_stale_for_engine, is_stale_for_others
from tests.modelcheck.numbers import DOWN, NOTHING, Left, State, Step, Table
from tests.modelcheck.protocol import Protocol

Label = tuple[Any, ...]
MODES = {"wait": PauseMode.WAIT, "keep": PauseMode.KEEP, "abort": PauseMode.ABORT}


class World:
    def __init__(self, bounds: Bounds, protocol: Protocol) -> None:
        self.bounds, self.protocol = bounds, protocol
        self.doing: tuple[int, Any] = (DOWN, None)
        self.engine_count = bounds.ranks + bounds.spares
        self.names = tuple("ABCDEFGH"[: self.engine_count])
        self.coordinator_at = self.engine_count + bounds.frontends
        self.left_at = self.coordinator_at + 1
        self.messages_at = self.coordinator_at + 2
        self.parts = Table()
        self.lefts = Table()
        self.messages = Table()
        self._steps: dict[tuple[int, Any], Step] = {}
        self._others: dict[tuple[int, int], tuple[int, int]] = {}
        self._completed: dict[tuple[int, ...], tuple[int, ...] | None] = {}
        self._changes: dict[Any, int] = {}
        self._addresses: dict[int, int] = {}
        self._orders: dict[int, str] = {}
        self._stale: dict[tuple[int, int], tuple[int, int]] = {}
        self._events = (
            self._deliveries,
            self._engines_alone,
            self._frontends_alone,
            self._coordinator_alone,
            self._callers,
        )

    # States.

    def initial(self) -> State:
        bounds = self.bounds
        group = RankGroup(1, self.names[: bounds.ranks])
        ranks = [self.protocol.rank(engine=name, interval=bounds.interval) for name in self.names]
        inside = [msgspec.structs.replace(rank, group=group, phase=Phase.IDLE) for rank in ranks[: bounds.ranks]]
        machine = self.protocol.group(
            size=bounds.ranks,
            min_size=bounds.min_size,
            recovering=False,
            waves=self.protocol.waves(group=group),
            highest=1,
            known=frozenset(self.names),
            opened=frozenset(group.members),
        )
        belief, _ = self.protocol.frontend().seen(machine.view)
        spent = {name: getattr(bounds, name) for name in Left._fields if type(getattr(bounds, name, None)) is int}
        engines_ = [Engine(rank) for rank in inside + ranks[bounds.ranks :]]
        parts = [*engines_, *[belief] * bounds.frontends, machine]
        return (*(self.parts.number(part) for part in parts), self.lefts.number(Left(**spent)), NOTHING)

    def described(self, label: Label) -> Label:
        """Return a label in which values replace this world's numbers."""
        if label[0] in ("deliver", "duplicate", "lose", "refuse"):
            return (label[0], *self.described_message(label[1]))
        return label

    def described_message(self, bit: int) -> tuple[str, Any]:
        to, message = self.messages.values[bit.bit_length() - 1]
        return self.name_of(to), message

    def name_of(self, at: int) -> str:
        if at < self.engine_count:
            return self.names[at]
        return "coordinator" if at == self.coordinator_at else f"frontend {at - self.engine_count}"

    @property
    def breaking(self) -> Label:
        """Return the event that violated an invariant."""
        at, event = self.doing
        return (self.name_of(at), self.described_message(event)[1] if type(event) is int else event)

    def part(self, state: State, at: int) -> Any:
        return None if state[at] == DOWN else self.parts.values[state[at]]

    def under_way(self, state: State) -> Iterator[tuple[int, int, Any]]:
        """Yield bit, receiver and message of each message in flight."""
        mask = state[self.messages_at]
        while mask:
            bit = mask & -mask
            mask ^= bit
            yield (bit, *self.messages.values[bit.bit_length() - 1])

    def successors(self, state: State) -> Iterator[tuple[Label, State]]:
        """Yield every possible event with the state after the event."""
        left: Left = self.lefts.values[state[self.left_at]]
        tidy = self._tidy
        for events in self._events:
            for label, after in events(state, left):
                yield label, tidy(after)

    # Events.

    def _deliveries(self, state: State, left: Left) -> Iterator[tuple[Label, State]]:
        for bit, to, message in self.under_way(state):
            gone = self._without(state, bit)
            yield ("deliver", bit), self._deliver(gone, to, bit)
            is_add = type(message) is Add
            if left.duplicates and not is_add:
                yield ("duplicate", bit), self._deliver(self._spend(state, "duplicates"), to, bit)
            if left.losses and not is_add:
                yield ("lose", bit), self._spend(gone, "losses")
            if is_add and left.refusals:
                yield ("refuse", bit), self._engine(self._spend(gone, "refusals"), to, ("refuse", message))

    def _deliver(self, state: State, to: int, bit: int) -> State:
        if to < self.engine_count:
            return self._engine(state, to, bit)
        return self._other(state, to, bit)

    def _engines_alone(self, state: State, left: Left) -> Iterator[tuple[Label, State]]:
        for at in range(self.engine_count):
            if state[at] == DOWN:
                continue
            engine: Engine = self.parts.values[state[at]]
            yield from self._engine_alone(state, at, engine, left)
            if self.bounds.ticks and self._ticks(state, at, engine):
                if not state[-1]:
                    yield ("tick", at), self._engine(state, at, "tick")
                elif left.early_ticks:
                    yield ("tick", at), self._engine(self._spend(state, "early_ticks"), at, "tick")
            if left.aborts:
                for asked in engine.requests:
                    if left.live >> asked.id & 1:
                        spent = self._spend(state, "aborts")
                        yield ("abort", at, asked.id), self._engine(spent, at, ("abort", asked.id))
            if left.rank_crashes:
                yield ("crash rank", at), self._crash_rank(state, at, engine)
            if left.broken_collectives and type(engine.slot) is Entered:
                yield ("break", at), self._engine(self._spend(state, "broken_collectives"), at, "lost")
            if left.failed_preparations and engine.preparing:
                yield ("not prepared", at), self._engine(self._spend(state, "failed_preparations"), at, "not prepared")
            if left.failed_preparations and engine.rank.opening and type(engine.slot) is Entered:
                yield ("cannot join", at), self._engine(self._spend(state, "failed_preparations"), at, "cannot join")

    def _engine_alone(self, state: State, at: int, engine: Engine, left: Left) -> Iterator[tuple[Label, State]]:
        """Yield the engine's events without a fault."""
        if type(engine.slot) is Ended:
            yield ("result", at), self._engine(state, at, "result")
        if engine.slot is not None and self._is_broken(state, engine):
            yield ("lost", at), self._engine(state, at, "lost")
        if engine.preparing:
            yield ("prepared", at), self._engine(state, at, "prepared")
        for asked in engine.requests:
            if not left.live >> asked.id & 1:
                yield ("orphan", at, asked.id), self._engine(state, at, ("abort", asked.id))

    def _is_broken(self, state: State, engine: Engine) -> bool:
        """Return whether a member has permanently left the collective."""
        group = engine.rank.group
        for name in group.members:
            number = state[self.names.index(name)]
            if number == DOWN:
                return True
            other = self.parts.values[number].rank
            if other.group.epoch > group.epoch or (other.phase is Phase.BROKEN and other.group == group):
                return True
        return False

    def _ticks(self, state: State, at: int, engine: Engine) -> bool:
        """Return whether a repeated report of the rank has an effect."""
        rank = engine.rank
        if rank.phase is Phase.EXCHANGE and rank.step == 0 and not rank.opening:
            return type(engine.slot) is Entered
        mask = self._step(state[at], "tick").messages & self._addressed(self.coordinator_at)
        return self._informs(state[self.coordinator_at], mask)

    def _informs(self, coordinator: int, mask: int) -> bool:
        if coordinator == DOWN:
            return False
        while mask:
            bit = mask & -mask
            mask ^= bit
            if self._other_step(coordinator, bit) != (coordinator, 0):
                return True
        return False

    def _crash_rank(self, state: State, at: int, engine: Engine) -> State:
        lost = sum(1 << asked.id for asked in engine.requests)
        for _, to, message in self.under_way(state):
            if to == at and type(message) is Add:
                lost |= 1 << message.request
        left: Left = self.lefts.values[state[self.left_at]]
        spent = left._replace(submitted=left.submitted & ~(lost & left.live), rank_crashes=left.rank_crashes - 1)
        state = self._put(state, self.left_at, self.lefts.number(spent))
        return self._put(self._drop_messages(state, at), at, DOWN)

    def _frontends_alone(self, state: State, left: Left) -> Iterator[tuple[Label, State]]:
        up = state[self.coordinator_at] != DOWN
        for at in range(self.engine_count, self.coordinator_at):
            if state[at] == DOWN:
                continue
            belief = self.parts.values[state[at]]
            if up:
                seen, _ = belief.seen(self.parts.values[state[self.coordinator_at]].view)
                number = self.parts.number(seen)
                if number != state[at]:
                    yield ("view", at), self._put(state, at, number)
            elif belief.connected:
                yield ("disconnected", at), self._put(state, at, self.parts.number(belief.disconnected()[0]))
            for request, of in enumerate(self.bounds.requests):
                if of == at - self.engine_count and not left.submitted >> request & 1:
                    for engine in belief.view.routed:
                        if self._takes_requests(state, engine):
                            yield ("submit", at, request, engine), self._submit(state, at, request, engine)
            if left.frontend_crashes:
                yield ("crash frontend", at), self._crash_frontend(state, at)

    def _takes_requests(self, state: State, engine: str) -> bool:
        number = state[self.names.index(engine)]
        return number != DOWN and self.parts.values[number].rank.phase is not Phase.OUTSIDE

    def _submit(self, state: State, at: int, request: int, engine: str) -> State:
        belief = self.parts.values[state[at]]
        group = belief.view.group
        after, sent = belief.sent(engine)
        mask = self._message(self.names.index(engine), Add(request, group.epoch, belief.view.wave))
        left: Left = self.lefts.values[state[self.left_at]]
        mark = 1 << request
        spent = left._replace(submitted=left.submitted | mark, live=left.live | mark)
        state = self._put(state, self.left_at, self.lefts.number(spent))
        state = self._put(state, at, self.parts.number(after))
        return self._send(state, mask | self._mask(sent))

    def _crash_frontend(self, state: State, at: int) -> State:
        own = sum(1 << request for request, of in enumerate(self.bounds.requests) if of == at - self.engine_count)
        left: Left = self.lefts.values[state[self.left_at]]
        spent = left._replace(
            live=left.live & ~own, submitted=left.submitted | own, frontend_crashes=left.frontend_crashes - 1
        )
        state = self._put(state, self.left_at, self.lefts.number(spent))
        return self._put(self._drop_messages(state, at), at, DOWN)

    def _coordinator_alone(self, state: State, left: Left) -> Iterator[tuple[Label, State]]:
        at = self.coordinator_at
        if state[at] == DOWN:
            if self.bounds.coordinator_returns:
                yield ("restart coordinator",), self._restart(state, left)
            return
        machine = self.parts.values[state[at]]
        if left.coordinator_crashes:
            crashed = self._put(self._drop_messages(state, at), at, DOWN)
            yield ("crash coordinator",), self._spend(crashed, "coordinator_crashes")
        for engine, name in enumerate(self.names):
            if state[engine] == DOWN and name in machine.known:
                if name not in machine.broken:
                    yield ("stream broken", name), self._other(state, at, ("stream_broken", name))
                yield ("lease over", name), self._other(state, at, ("gone", name))
        if machine.recovering and all(state[i] == DOWN or n in machine.known for i, n in enumerate(self.names)):
            yield ("recovered",), self._other(state, at, ("recovered",))
        if left.scales < len(self.bounds.scales):
            asked = self._put(state, self.left_at, self.lefts.number(left._replace(scales=left.scales + 1)))
            size = self.bounds.scales[left.scales]
            yield ("scale", size), self._other(asked, at, ("scale", size))
        if self.bounds.ticks and self._other_step(state[at], ("repeat",))[1] and (left.early_ticks or not state[-1]):
            spent = self._spend(state, "early_ticks") if state[-1] else state
            yield ("repeat",), self._other(spent, at, ("repeat",))

    def _restart(self, state: State, left: Left) -> State:
        """Restart the coordinator. Ranks report their state to the new coordinator."""
        restarts = 1 + self.bounds.coordinator_crashes - left.coordinator_crashes
        machine = self.protocol.group(
            size=self.bounds.ranks, min_size=self.bounds.min_size, floor=100 * restarts, waves=self.protocol.waves()
        )
        state = self._put(state, self.coordinator_at, self.parts.number(machine))
        for at in range(self.engine_count):
            if state[at] != DOWN:
                report = self.parts.values[state[at]].rank.report
                state = self._send(state, self._message(self.coordinator_at, report))
        return state

    def _callers(self, state: State, left: Left) -> Iterator[tuple[Label, State]]:
        """Yield the pauses and resumes of operators. A dying caller has reached only one rank."""
        if left.pause_calls >= len(self.bounds.pause_calls):
            return
        what = self.bounds.pause_calls[left.pause_calls]
        alive = [at for at in range(self.engine_count) if state[at] != DOWN]
        for at in alive:
            call = self._call(self.parts.values[state[at]].rank.pauses, what)
            if call is None:
                continue
            called = self._put(state, self.left_at, self.lefts.number(left._replace(pause_calls=left.pause_calls + 1)))
            one = self._message(at, call)
            everyone = sum(self._message(to, call) for to in alive)
            yield ("call one", what, at), self._send(called, one)
            yield ("call all", what, at), self._send(called, everyone)

    def _call(self, pauses: Pauses, what: str) -> PauseCall | ResumeCall | None:
        if what == "resume":
            return ResumeCall(pauses.resume()) if pauses.on else None
        return PauseCall(pauses.pause(MODES[what]))

    def _tidy(self, state: State) -> State:
        """Return the state without messages that can no longer have an effect."""
        mask = state[-1]
        if not mask:
            return state
        known = len(self.messages.values)
        stale = 0
        for at, addressed in self._addresses.items():
            mine = mask & addressed
            if mine:
                key = at, state[at]
                looked, old = self._stale.get(key, (0, 0))
                if looked < known:
                    old |= self._stale_for(at, state[at], looked)
                    self._stale[key] = known, old
                stale |= mine & old
        return (*state[:-1], mask & ~stale) if stale else state

    def _stale_for(self, at: int, number: int, since: int) -> int:
        """Return the mask of the stale messages among the messages from number ``since`` on."""
        part = self.parts.values[number]
        stale = is_stale_for_engine if at < self.engine_count else is_stale_for_others
        mask = 0
        for i, (to, message) in enumerate(self.messages.values[since:], since):
            if to == at and stale(part, message):
                mask |= 1 << i
                self._check_stale(at, number, 1 << i)
        return mask

    def _check_stale(self, at: int, number: int, bit: int) -> None:
        if at < self.engine_count:
            step = self._step(number, bit)
            same = step.engine == number and not step.messages
        else:
            same = self._other_step(number, bit) == (number, 0)
        if not same:
            self.doing = at, bit
            detail = f"{self.described_message(bit)} at {self.parts.values[number]}"
            broken(self.protocol, "6 what is old changes something", detail)

    # Runs without faults.

    def calm(self, state: State) -> tuple[Label, State] | None:
        step = self._calm(state)
        return step and (step[0], self._tidy(step[1]))

    def _calm(self, state: State) -> tuple[Label, State] | None:
        """Return the next event of a run without further faults or requests; None if the network is at rest."""
        mask = state[-1]
        if mask:
            bit, to = self._first(mask)
            return ("deliver", bit), self._deliver(self._without(state, bit), to, bit)
        left: Left = self.lefts.values[state[self.left_at]]
        calls = len(self.bounds.pause_calls)
        none = Left(
            live=left.live, submitted=~(left.live & ~left.submitted), pause_calls=calls, scales=len(self.bounds.scales)
        )
        for step in self._frontends_alone(state, none):
            return step
        for step in self._coordinator_alone(state, none):
            if step[0] != ("repeat",):
                return step
        ticked = state
        for at in range(self.engine_count):
            if state[at] == DOWN:
                continue
            engine: Engine = self.parts.values[state[at]]
            for step in self._engine_alone(state, at, engine, none):
                return step
            if self.bounds.ticks and self._ticks(state, at, engine):
                ticked = self._engine(ticked, at, "tick")
        at = self.coordinator_at
        if self.bounds.ticks and state[at] != DOWN and self._other_step(state[at], ("repeat",))[1]:
            ticked = self._other(ticked, at, ("repeat",))
        if ticked != state:
            return ("ticks",), ticked
        pause = check_rest(self.part(state, self.coordinator_at), self._living(state), left.live)
        if pause is None:
            return None
        living = (at for at in range(self.engine_count) if state[at] != DOWN)
        first = next(at for at in living if self.parts.values[state[at]].rank.phase is Phase.IDLE)
        return ("resume",), self._send(state, self._message(first, ResumeCall(pause.resume())))

    def _first(self, mask: int) -> tuple[int, int]:
        """Return the message to deliver first, independent of its number, and its receiver."""
        if mask & (mask - 1):
            bits = [1 << i for i in range(mask.bit_length()) if mask >> i & 1]
            mask = min(bits, key=self._order)
        return mask, self.messages.values[mask.bit_length() - 1][0]

    def _order(self, bit: int) -> str:
        key = self._orders.get(bit)
        if key is None:
            key = self._orders[bit] = repr(self.messages.values[bit.bit_length() - 1])
        return key

    # Computation of states.

    def _put(self, state: State, at: int, number: int) -> State:
        return (*state[:at], number, *state[at + 1 :])

    def _without(self, state: State, bit: int) -> State:
        return (*state[:-1], state[-1] ^ bit)

    def _spend(self, state: State, what: str) -> State:
        key = state[self.left_at], what
        number = self._changes.get(key)
        if number is None:
            left: Left = self.lefts.values[state[self.left_at]]
            number = self._changes[key] = self.lefts.number(left._replace(**{what: getattr(left, what) - 1}))
        return self._put(state, self.left_at, number)

    def _send(self, state: State, mask: int) -> State:
        """Add messages in flight, except those to processes that are down."""
        down = 0
        for at in range(self.left_at):
            if state[at] == DOWN:
                down |= self._addressed(at)
        mask = state[-1] | (mask & ~down)
        return (*state[:-1], mask) if mask != state[-1] else state

    def _drop_messages(self, state: State, at: int) -> State:
        return (*state[:-1], state[-1] & ~self._addressed(at))

    def _addressed(self, at: int) -> int:
        return self._addresses.get(at, 0)

    def _message(self, to: int, message: Any) -> int:
        mask = 1 << self.messages.number((to, message))
        self._addresses[to] = self._addresses.get(to, 0) | mask
        return mask

    def _mask(self, sent: Any) -> int:
        mask = 0
        for message in sent:
            if isinstance(message, StartDpWave | Reconfigure):
                mask |= self._message(self.names.index(message.engine), message)
            elif not isinstance(message, ScaleRefused):
                mask |= self._message(self.coordinator_at, message)
        return mask

    def _engine(self, state: State, at: int, event: Any) -> State:
        self.doing = at, event
        step = self._step(state[at], event)
        if step.forward is not None:
            check_forward(self._living(state, but=at).values(), step.forward)
        after = list(state)
        after[at] = step.engine
        if step.ended or step.moved:
            left: Left = self.lefts.values[state[self.left_at]]
            live = left.live & ~step.ended
            again = left._replace(live=live, submitted=left.submitted & ~(step.moved & live))
            after[self.left_at] = self.lefts.number(again)
        if step.entered:
            self._complete(after, at)
        done = tuple(after)
        return self._send(done, step.messages) if step.messages else done

    def _step(self, number: int, event: Any) -> Step:
        key = number, event
        step = self._steps.get(key)
        if step is None:
            step = self._steps[key] = self._engine_step(self.parts.values[number], event)
        return step

    def _engine_step(self, engine: Engine, event: Any) -> Step:
        if type(event) is int:
            _, event = self.messages.values[event.bit_length() - 1]
        match event:
            case "result":
                done = engines.take_result(engine)
            case "tick":
                done = engines.tick(engine)
            case ("abort", request):
                done = engines.drop(engine, (request,))
            case "lost":
                done = engines.lose_peer(engine)
            case "prepared":
                done = engines.prepared(engine)
            case "not prepared":
                done = engines.not_prepared(engine)
            case "cannot join":
                done = engines.cannot_join(engine)
            case Add(request) if engine.rank.phase is Phase.OUTSIDE:
                done = engines.Done(engine, moved=(request,))
            case ("refuse", Add(request)) if engine.rank.phase is Phase.OUTSIDE:
                done = engines.Done(engine, ended=(request,))
            case Reconfigure():
                done = self._twice(engine, engine.rank.reconfigure, "reconfigure", event)
            case Add(request, epoch, wave):
                done = engines.add(engine, request, epoch, wave, self.bounds.steps, refused=False)
            case ("refuse", Add(request, epoch, wave)):
                done = engines.add(engine, request, epoch, wave, self.bounds.steps, refused=True)
            case StartDpWave():
                done = self._twice(engine, engine.rank.start_dp_wave, "start_dp_wave", event)
            case PauseCall(pauses):
                done = self._twice(engine, engine.rank.pause, "pause", pauses)
            case ResumeCall(pauses):
                done = self._twice(engine, engine.rank.resume, "resume", pauses)
            case _:
                raise AssertionError(event)
        check_switch(engine.rank, done.engine.rank, told=event == "result" or isinstance(event, Reconfigure))
        told = 0
        for message in done.told:
            for at in range(self.engine_count, self.coordinator_at):
                told |= self._message(at, message)
        ended = sum(1 << request for request in done.ended)
        moved = sum(1 << request for request in done.moved)
        entered = type(done.engine.slot) is Entered and done.engine.slot is not engine.slot
        return Step(self.parts.number(done.engine), told | self._mask(done.sent), ended, moved, entered, done.forward)

    def _twice(self, engine: Engine, event: Any, name: str, message: Any) -> engines.Done:
        rank, effects = event(message)
        check_twice(self.protocol, engine.rank, rank, name, message)
        return engines.settle(engine, rank, effects)

    def _other(self, state: State, at: int, event: Any) -> State:
        self.doing = at, event
        number, mask = self._other_step(state[at], event)
        old, new = self.parts.values[state[at]], self.parts.values[number]
        state = self._put(state, at, number)
        if at == self.coordinator_at:
            living = list(self._living(state).values())
            name, arguments = self._named(event)
            check_running(self.protocol, new.waves, living)
            check_expelled(old, new, living, name, arguments[0] if arguments else None)
            check_size(old, new)
            if mask:
                check_epochs(self._groups(state))
        return self._send(state, mask) if mask else state

    def _other_step(self, number: int, event: Any) -> tuple[int, int]:
        """Return the effect of a message or an event on a frontend or the coordinator."""
        key = number, event
        step = self._others.get(key)
        if step is not None:
            return step
        part = self.parts.values[number]
        name, arguments = self._named(event)
        after, sent = getattr(part, name)(*arguments)
        check_again(after, name, *arguments)
        check_told(self.protocol, part, after, arguments[0] if arguments else None, sent)
        step = self._others[key] = self.parts.number(after), self._mask(sent)
        return step

    def _named(self, event: Any) -> tuple[str, tuple[Any, ...]]:
        """Return the method and the arguments of an event of a frontend or the coordinator."""
        if type(event) is not int:
            return event[0], event[1:]
        _, message = self.messages.values[event.bit_length() - 1]
        return NAMES[type(message)], (message,)

    def _living(self, state: State, but: int = DOWN) -> dict[str, Rank]:
        numbers = enumerate(state[: self.engine_count])
        return {self.names[at]: self.parts.values[n].rank for at, n in numbers if n != DOWN and at != but}

    def _groups(self, state: State) -> set[RankGroup]:
        """Return the groups that any process knows or is about to learn of."""
        machine, ranks = self.parts.values[state[self.coordinator_at]], self._living(state).values()
        told = {message.group for _, _, message in self.under_way(state) if type(message) is Reconfigure}
        inside = {rank.group for rank in ranks if rank.phase is not Phase.OUTSIDE}
        return {machine.group, machine.standby} | inside | {rank.standby for rank in ranks} | told

    def _complete(self, parts: list[int], at: int) -> None:
        """End the collective for each member, after all members have entered it."""
        group = self.parts.values[parts[at]].rank.group
        ats = [self.names.index(name) for name in group.members]
        key = tuple(parts[i] for i in ats)
        if DOWN in key:
            return
        done = self._completed.get(key, 0)
        if done == 0:
            done = self._completed[key] = self._completion(group, [self.parts.values[number] for number in key])
        if done is not None:
            for i, number in zip(ats, done, strict=True):
                parts[i] = number

    def _completion(self, group: RankGroup, members: list[Engine]) -> tuple[int, ...] | None:
        if any(type(engine.slot) is not Entered or engine.rank.group != group for engine in members):
            return None
        entered = [engine.slot.collective for engine in members]
        check_collective(entered, opening=members[0].rank.opening)
        rows = tuple(collective.row for collective in entered if isinstance(collective, Exchange))
        return tuple(
            self.parts.number(engine._replace(slot=Ended(engine.slot.collective, engine.slot.batch, rows)))
            for engine in members
        )
