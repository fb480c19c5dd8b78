"""Sends each request to an engine, and to another engine when that one is lost."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from penstock_common.errors import InvalidArgument, RequestFailed, Unavailable
from penstock_common.observability.logging import STEP_FAILED, get_logger, incident
from penstock_common.types.outputs import EngineCoreOutputs
from penstock_common.types.request import EngineCoreRequest
from penstock_frontend.config import DisaggregationConfig, RetriesConfig
from penstock_frontend.dispatch.disaggregation import Legs
from penstock_frontend.dispatch.drains import Drains
from penstock_frontend.dispatch.journal import LORA_UNAVAILABLE, Call, Handoff, Journal, JournalEntry, Refusal
from penstock_frontend.dispatch.prefix_caches import PrefixCaches, with_media
from penstock_frontend.dispatch.retries import Blame, Retries
from penstock_frontend.dispatch.router import Candidate, Engines, Router, takers
from penstock_frontend.dispatch.wait_queue import Waiting
from penstock_frontend.interfaces import OutputHandler
from penstock_frontend.loop_yield import loop_time

# The choice of an engine for the sequences of a call.


class Choice:
    """Asks, in this order, who takes such requests, whether they go in two legs, and the router.

    What is handed over goes where the sequence of its call went that was handed over before, if that engine takes requests: it
    has the prompt, or is about to. ``clock``: the one of ``JournalEntry.excluded``.
    """

    def __init__(
        self, engines: Engines, router: Router, *, caches: PrefixCaches, legs: Legs, clock: Callable[[], float]
    ) -> None:
        self._engines = engines
        self._router = router
        self._caches = caches
        self._legs = legs
        self._clock = clock

    def others(self, entry: JournalEntry) -> Sequence[Candidate]:
        """The engines that an entry may be sent to."""
        candidates = takers(self._engines.candidates(), entry.request)
        if not entry.excluded:
            return candidates
        now = self._clock()
        return [c for c in candidates if entry.excluded.get(c.key, now) <= now]

    def pick(self, entries: Sequence[JournalEntry], rank: int | None) -> Candidate | None:
        """The engine for entries that go together, None when none takes them now: one of the variant that they began on, if any.

        Raises InvalidArgument for an unknown rank.
        """
        first = entries[0]
        candidates = self.others(first)
        began_on = next((entry.variant for entry in entries if entry.variant is not None), None)
        try:
            cached, after = self._cached_tokens(first) if rank is None else {}, 0
            if rank is None:
                candidates, after = self._legs.plan(first, candidates, cached)
            for entry in entries:
                entry.handoff_after_tokens = after
            picked = _of_its_call(first, candidates, began_on)
            if picked is None:
                key = self._router.pick(candidates, rank=rank, variant=began_on, cached=cached, lora=first.lora_digest)
                picked = next(c for c in candidates if c.key == key)
        except Unavailable:
            return None
        if first.num_handoffs:
            first.call.taker = picked.key
        return picked

    def _cached_tokens(self, entry: JournalEntry) -> Mapping[str, int]:
        """By engine, the tokens that it need not compute for an entry."""
        features = entry.request.mm_features
        try:
            cached = self._caches.cached_tokens(entry.request, entry.token_ids)
            return with_media(cached, self._engines.holding(features)) if features else cached
        except Exception as e:  # it goes to the least loaded engine then
            incident(e, request=entry.request.context.external_request_id, doing="looking for its prefix")
            return {}


def _of_its_call(entry: JournalEntry, candidates: Sequence[Candidate], variant: str | None) -> Candidate | None:
    """The engine that the sequence of its call went to that was handed over before, where that takes what was handed over."""
    if not entry.num_handoffs or not entry.call.taker:
        return None
    return next(
        (c for c in candidates if c.key == entry.call.taker and c.accepting and variant in (None, c.variant)), None
    )


_SHORTEST_EXCLUSION = 0.1
_USUAL_EXCLUSION = 1.0
"""Seconds for which a full engine that names no time gets nothing more of a request."""


class Dispatch:
    """Knows where each sequence is. What engines refuse, drop or take down with them goes to others, within a budget; what no
    engine takes is held, and goes out when there is one again.

    ``caches``: what engines have cached of prompts. ``on_held``: told when the number of held requests has changed;
    ``on_moved``: how many have lost their engines. ``legs``: which requests go in two; ``on_gap``: told the seconds of handoffs.
    """

    def __init__(
        self,
        engines: Engines,
        outputs: OutputHandler,
        router: Router,
        retries: RetriesConfig,
        *,
        caches: PrefixCaches,
        hold_timeout: float,
        on_held: Callable[[], None],
        on_moved: Callable[[int], None],
        legs: Legs | None = None,
        on_gap: Callable[[float], None] = lambda _: None,
    ) -> None:
        self._engines = engines
        self._outputs = outputs
        self._router = router
        self._hold_timeout = hold_timeout
        self._on_held = on_held
        self._on_moved = on_moved
        self._journal = Journal(loop_time, on_left=router.left, on_gap=on_gap)
        self._retries = Retries(retries)
        self._waiting = Waiting(
            hold_timeout, give_up=self._give_up, presume=self._presume, on_readmitted=self.engines_changed
        )
        legs = legs or Legs(DisaggregationConfig(), router)
        self._choice = Choice(engines, router, caches=caches, legs=legs, clock=loop_time)
        self._drains = Drains(
            engines,
            self._journal,
            others=self._choice.others,
            may_leave=self._retries.may_leave,
            move=self._leave_draining,
        )

    @property
    def num_held(self) -> int:
        """Sequences that wait for an engine, for their turn as suspects, or for a verdict."""
        return len(self._waiting)

    def num_on(self, engine: str) -> int:
        """Sequences that an engine has."""
        return self._journal.num_on(engine)

    def add(self, requests: Sequence[EngineCoreRequest]) -> None:
        """Start the sequences of a call on one engine. Raises InvalidArgument for a rank that no engine has."""
        entries = self._journal.begin(requests)
        try:
            picked = self._choice.pick(entries, requests[0].context.data_parallel_rank)
        except InvalidArgument:
            self._journal.end([request.request_id for request in requests])
            raise
        self._send(entries, picked)

    def abort(self, request_ids: Iterable[str], reason: str) -> None:
        """End those that have not ended."""
        by_engine: dict[str, list[str]] = {}
        for entry in self._journal.end(request_ids):
            if entry.engine:
                by_engine.setdefault(entry.engine, []).append(entry.request_id)
            elif self._waiting.discard(entry):
                self._on_held()
        for engine, ids in by_engine.items():
            self._engines.abort_on(engine, ids, reason)
        self._try_next()

    def take(self, engine: str, engine_id: str, frame: EngineCoreOutputs) -> None:
        """A step's outputs. Raises EngineFaultError when the engine cannot be trusted any more."""
        accepted = self._journal.accept(engine, frame.outputs, frame.tokens)
        if accepted.outputs or accepted.tokens:
            not_needed = self._outputs.process(
                accepted.outputs, engine_id, frame.timestamp, accepted.tokens, accepted.drafts
            )
            if not_needed:
                self.abort(not_needed, "a stop string ended the output")
        if accepted.handoffs:
            self._go_on(accepted.handoffs)
        refusals = accepted.refusals
        if frame.finished_requests:
            refusals += self._ended_without_output(engine, frame)
        if refusals:
            self._refused(refusals)
        self._try_next()
        self._drains.look()
        if accepted.fault is not None:
            raise accepted.fault

    def _ended_without_output(self, engine: str, frame: EngineCoreOutputs) -> list[Refusal]:
        told = {output.request_id for output in frame.outputs}
        error = Unavailable("the engine ended the request without an output", reason="ENGINE_ERROR")
        silent = [request_id for request_id in frame.finished_requests if request_id not in told]
        return [Refusal(entry, error, admitted=True) for entry in self._journal.lose(engine, silent)]

    def lose(self, engine: str, why: str, *, in_doubt: bool = False) -> int:
        """An engine is gone. ``in_doubt``: it may live, and ``acquit`` or ``accuse`` comes when that is known.
        Returns how many of its sequences go on elsewhere.
        """
        self._drains.forget(engine)
        self._journal.readmit(engine)
        load = self._router.load(engine)
        num_there = load.waiting + load.running
        entries = self._journal.lose(engine)
        for entry in entries:
            entry.admitted = True  # it may have been: what was is never refused again
        is_one_call = len({entry.call for entry in entries}) == 1
        alone = is_one_call and num_there <= len(entries)
        blame = Blame.ALONE if alone else Blame.SHARED
        moved = self._move([(entry, why, blame) for entry in entries], in_doubt=in_doubt)
        if moved:
            get_logger().warning("requests lost their engine and go on elsewhere", count=moved, why=why)
        return moved

    def acquit(self, engine: str) -> None:
        """An engine that was lost lives: the network was at fault, and no request."""
        for entry in self._journal.doubting(engine):
            self._retries.acquit(entry, engine)
        waiting = self._waiting
        going = waiting.for_verdict.take(lambda entry: not self._retries.is_in_doubt(entry))
        going += waiting.for_trial.take(lambda entry: not self._retries.is_suspect(entry))
        if going:
            self._place(going)
            self._on_held()
        self._try_next()

    def accuse(self, engine: str) -> None:
        """An engine that was lost has died."""
        for entry in self._journal.doubting(engine):
            self._quarantine(entry, self._retries.accuse(entry, engine))
        self._try_next()

    def _presume(self, entry: JournalEntry) -> None:
        self._quarantine(entry, self._retries.presume(entry))
        self._on_held()
        self._try_next()

    def _quarantine(self, entry: JournalEntry, error: RequestFailed | None) -> None:
        """End an entry that waits for a verdict; None: it goes on to wait."""
        if error is not None:
            if self._waiting.discard(entry):
                self._on_held()
            self._end_moving(entry, error)

    def drain(self, engine: str, time_left: float) -> None:
        """An engine ends in so many seconds what it still has. What it will not be done with goes elsewhere, if that can be."""
        self._drains.begin(engine, time_left)

    def _leave_draining(self, entries: Sequence[JournalEntry], why: str) -> None:
        for entry in entries:
            entry.admitted = True
        self._move([(entry, why, Blame.NONE) for entry in entries])

    def _go_on(self, handoffs: Sequence[Handoff]) -> None:
        """Send elsewhere what was handed over."""
        going = []
        for entry, source in handoffs:
            if not entry.ended:
                self._retries.handed_over(entry)
                self._journal.hand_over(entry, source)
                going.append(entry)
        if going:
            self._outputs.moved([entry.request_id for entry in going])
            self._place(going)

    def engines_changed(self) -> None:
        """Engines have come or may take requests again."""
        held = self._waiting.for_engine
        if len(held):
            self._place(held.take_all())
            self._on_held()

    def _refused(self, refusals: Iterable[Refusal]) -> None:
        moves = []
        for entry, error, admitted in refusals:
            entry.admitted |= admitted
            blame = Blame.SHARED if error.code == "INTERNAL" else Blame.NONE
            if error.code == "RESOURCE_EXHAUSTED":
                self._exclude(entry, self._exclusion(error))
            elif error.reason == STEP_FAILED:
                self._exclude(entry, math.inf)
                blame = Blame.STEP
            elif error.reason == LORA_UNAVAILABLE:
                self._router.loras.lacks(entry.engine, entry.lora_digest)
                self._exclude(entry, math.inf)
                blame = Blame.NONE
            if entry.engine in entry.excluded and not any(c.accepting for c in self._choice.others(entry)):
                self._end(entry, error)
                continue
            moves.append((entry, error.message, blame))
        self._move(moves)

    def _exclude(self, entry: JournalEntry, seconds: float) -> None:
        """Do not send it to its engine again for so long, while that lives."""
        entry.excluded[entry.engine] = loop_time() + seconds

    def _exclusion(self, error: RequestFailed) -> float:
        """How long a full engine gets nothing more of a request: as long as it says, but not as long as a request may wait."""
        asked = _USUAL_EXCLUSION if error.retry_after is None else error.retry_after
        return min(max(asked, _SHORTEST_EXCLUSION), self._hold_timeout)

    def _move(self, entries: Iterable[tuple[JournalEntry, str, Blame]], *, in_doubt: bool = False) -> int:
        """Send these elsewhere, as far as they may go on; each with why, and what its engine says of it. Returns how many do."""
        moving = []
        for entry, why, blame in entries:
            if entry.ended:
                continue
            if (error := self._retries.verdict(entry, why, blame, in_doubt=in_doubt)) is not None:
                self._end_moving(entry, error)
                continue
            self._journal.leave(entry)
            moving.append(entry)
        if moving:
            # One that a full engine refused never had an engine to lose.
            self._on_moved(sum(entry.admitted for entry in moving))
            self._outputs.moved([entry.request_id for entry in moving])
            self._place(moving)
        self._try_next()
        return len(moving)

    def _place(self, entries: Iterable[JournalEntry]) -> None:
        """Send entries to engines, those of one call to the same; hold those that no engine takes."""
        calls: dict[Call, list[JournalEntry]] = {}
        for entry in entries:
            if entry.ended:
                continue
            if self._retries.is_in_doubt(entry):
                self._waiting.for_verdict.add(entry)
                self._on_held()
            elif self._retries.may_go(entry):
                calls.setdefault(entry.call, []).append(entry)
            else:
                self._waiting.for_trial.add(entry)
                self._on_held()
        changed: Counter[tuple[str, str]] = Counter()
        for call in calls.values():
            # Only a call that has left no engine yet waits for the one that its client named.
            rank = None if call[0].has_left else call[0].request.context.data_parallel_rank
            try:
                picked = self._choice.pick(call, rank)
            except InvalidArgument as e:  # there is no engine of that rank any more
                for entry in call:
                    self._end(entry, e)
                continue
            self._send(call, picked)
            if picked is not None:
                changed.update((e.variant, picked.variant) for e in call if e.variant not in (None, picked.variant))
        for (variant, now), count in changed.items():
            get_logger().warning(
                "requests go on with another variant of the model: no engine of theirs takes them",
                count=count,
                variant=variant,
                now=now,
            )

    def _send(self, entries: Sequence[JournalEntry], picked: Candidate | None) -> None:
        """Send entries that go together to an engine, or hold them where there is none."""
        if picked is None:
            self._waiting.hold(entries)
            self._on_held()
            return
        engine = picked.key
        for entry in entries:
            first = not self._journal.num_on(engine)
            self._journal.assign(entry, engine, picked.variant)
            self._router.sent(engine, entry.request_id, entry.lora_digest)
            try:
                self._engines.send(engine, entry.to_send(), first=first)
            except Exception as e:
                failed = incident(
                    e, request=entry.request.context.external_request_id, doing="sending the request to an engine"
                )
                self._end(entry, failed)

    def _try_next(self) -> None:
        """Whether it is the next suspect's turn."""
        suspects = self._waiting.for_trial
        while len(suspects) and self._retries.trial_over():
            self._place([suspects.take_first()])
            self._on_held()

    def _give_up(self, entry: JournalEntry) -> None:
        error = Unavailable(f"no engine took the request within {self._hold_timeout:g} s", retry_after=1.0)
        self._end(entry, error)
        self._on_held()
        self._try_next()

    def _end_moving(self, entry: JournalEntry, error: RequestFailed) -> None:
        request = entry.request.context.external_request_id
        get_logger().error("request given up", request=request, reason=error.reason, why=entry.last_loss)
        self._end(entry, error)

    def _end(self, entry: JournalEntry, error: RequestFailed) -> None:
        self._journal.end([entry.request_id])
        self._outputs.fail([entry.request_id], error)
