"""Dispatch of requests to engines. If an engine is lost, the dispatch retries its requests on other engines."""

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

# The classes below choose an engine for the sequences of a call.


class Choice:
    """Chooses the engine for the sequences of a call.

    This class removes engines that cannot serve the request, applies disaggregated prefill, then asks the router.

    A handed-over sequence goes to the same engine as the previous sequence of its call, if this engine accepts
    requests. That engine has already cached the prompt, or will have cached it soon. ``clock`` must be the clock on
    which the times in ``JournalEntry.excluded`` are measured.
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
        """Return the engines that can serve a sequence and are not excluded for this sequence at the moment."""
        candidates = takers(self._engines.candidates(), entry.request)
        if not entry.excluded:
            return candidates
        now = self._clock()
        return [c for c in candidates if entry.excluded.get(c.key, now) <= now]

    def pick(self, entries: Sequence[JournalEntry], rank: int | None) -> Candidate | None:
        """Return the engine for the sequences of one call, or None if no engine accepts requests now.

        If the sequences already have output, engines of the variant that produced it are preferred. Raises
        InvalidArgument if no engine has the rank ``rank``.
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
        """Return, by engine, how many tokens of the sequence are in the engine's caches and need no computation."""
        features = entry.request.mm_features
        try:
            cached = self._caches.cached_tokens(entry.request, entry.token_ids)
            return with_media(cached, self._engines.holding(features)) if features else cached
        except Exception as e:  # without the cached prefix, the router chooses the engine with the least load
            incident(
                e,
                request=entry.request.context.external_request_id,
                doing="looking up the cached prefix of the request",
            )
            return {}


def _of_its_call(entry: JournalEntry, candidates: Sequence[Candidate], variant: str | None) -> Candidate | None:
    """Return the engine that received the call's previous handed-over sequence, if this engine accepts the sequence of
    ``entry`` too. Otherwise return None.
    """
    if not entry.num_handoffs or not entry.call.taker:
        return None
    return next(
        (c for c in candidates if c.key == entry.call.taker and c.accepting and variant in (None, c.variant)), None
    )


_SHORTEST_EXCLUSION = 0.1
_USUAL_EXCLUSION = 1.0
"""Seconds for which a refused request is not sent to a full engine again, if the engine's error has no retry time."""


class Dispatch:
    """Sends sequences to engines, and knows on which engine each sequence runs.

    If an engine refuses or drops a sequence, or the engine is lost, the sequence is retried on another engine.
    ``retries`` limits the number of retries. If no engine accepts a sequence, it is held until an engine accepts it.

    Args:
        engines: all engines.
        outputs: receives the outputs of the engines.
        router: chooses among engines.
        retries: how often a sequence may be retried, and when it is quarantined.
        caches: the contents of the engines' prefix caches, as far as the frontend knows them.
        hold_timeout: maximum seconds that a sequence may wait without an engine.
        on_held: called when the number of held sequences has changed.
        on_moved: called with the number of sequences that have left their engine to resume on another engine.
        legs: decides whether a request runs on one engine or on two (disaggregated prefill).
        on_gap: called with the time from each planned handoff to the next engine's first output, in seconds.
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
        """Number of held sequences.

        A held sequence waits for an engine, for its turn to run as a suspect, or until the frontend knows whether a
        lost engine died.
        """
        return len(self._waiting)

    def num_on(self, engine: str) -> int:
        """Return the number of sequences that are currently on an engine."""
        return self._journal.num_on(engine)

    def add(self, requests: Sequence[EngineCoreRequest]) -> None:
        """Start the sequences of a call, all on the same engine. Raises InvalidArgument if the call names a rank that
        no engine has.
        """
        entries = self._journal.begin(requests)
        try:
            picked = self._choice.pick(entries, requests[0].context.data_parallel_rank)
        except InvalidArgument:
            self._journal.end([request.request_id for request in requests])
            raise
        self._send(entries, picked)

    def abort(self, request_ids: Iterable[str], reason: str) -> None:
        """Abort the given sequences. Ignore sequences that have already ended."""
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
        """Process the outputs of one step of an engine. Raises EngineFaultError if the engine can no longer be trusted."""
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

    def lose(self, engine: str, why: str, *, in_doubt: bool = False) -> list[str]:
        """Handle the loss of an engine. Return the clients' id of each sequence that resumes on another engine.

        If ``in_doubt`` is True, only the connection is known to be lost, and the engine may still be alive. When the
        frontend knows whether the engine is alive, the caller must call ``acquit`` (alive) or ``accuse`` (dead).
        """
        self._drains.forget(engine)
        self._journal.readmit(engine)
        load = self._router.load(engine)
        num_there = load.waiting + load.running
        entries = self._journal.lose(engine)
        for entry in entries:
            entry.admitted = True  # The engine may have admitted the sequence, so no later engine may refuse it.
        is_one_call = len({entry.call for entry in entries}) == 1
        alone = is_one_call and num_there <= len(entries)
        blame = Blame.ALONE if alone else Blame.SHARED
        moved = self._move([(entry, why, blame) for entry in entries], in_doubt=in_doubt)
        return [entry.request.context.external_request_id for entry in moved]

    def acquit(self, engine: str) -> None:
        """Stop counting a lost connection against the engine's requests: the engine is alive, and only its connection
        broke.
        """
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
        """Confirm that a lost engine has died. Count the death against the requests that it had, because one of them
        may be the cause.
        """
        for entry in self._journal.doubting(engine):
            self._quarantine(entry, self._retries.accuse(entry, engine))
        self._try_next()

    def _presume(self, entry: JournalEntry) -> None:
        self._quarantine(entry, self._retries.presume(entry))
        self._on_held()
        self._try_next()

    def _quarantine(self, entry: JournalEntry, error: RequestFailed | None) -> None:
        """End an entry with ``error``, while the entry waits to know whether its lost engines died.

        If ``error`` is None, the entry keeps waiting.
        """
        if error is not None:
            if self._waiting.discard(entry):
                self._on_held()
            self._end_moving(entry, error)

    def drain(self, engine: str, time_left: float) -> None:
        """Move requests away from a draining engine, which stops in ``time_left`` seconds."""
        self._drains.begin(engine, time_left)

    def _leave_draining(self, entries: Sequence[JournalEntry], why: str) -> None:
        for entry in entries:
            entry.admitted = True
        self._move([(entry, why, Blame.NONE) for entry in entries])

    def _go_on(self, handoffs: Sequence[Handoff]) -> None:
        """Send sequences that their engines have handed over to other engines."""
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
        """Try to send held sequences again, because an engine has connected, or accepts requests again."""
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
        """Do not send an entry to its current engine again for ``seconds`` seconds, or until the engine is lost."""
        entry.excluded[entry.engine] = loop_time() + seconds

    def _exclusion(self, error: RequestFailed) -> float:
        """Return for how many seconds a request is not sent to an engine again that refused it because the engine is
        full.

        The result is the retry time in the engine's error, but at most the hold timeout.
        """
        asked = _USUAL_EXCLUSION if error.retry_after is None else error.retry_after
        return min(max(asked, _SHORTEST_EXCLUSION), self._hold_timeout)

    def _move(
        self, entries: Iterable[tuple[JournalEntry, str, Blame]], *, in_doubt: bool = False
    ) -> list[JournalEntry]:
        """Move entries to other engines if their retry limits allow it. Return the entries that moved.

        Each item of ``entries`` has the entry, the reason for the move, and how far the entry may have caused the move.
        """
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
            # Do not report entries that a full engine refused as moved, because no engine had admitted these entries.
            self._on_moved(sum(entry.admitted for entry in moving))
            self._outputs.moved([entry.request_id for entry in moving])
            self._place(moving)
        self._try_next()
        return moving

    def _place(self, entries: Iterable[JournalEntry]) -> None:
        """Send entries to engines. All entries of a call go to the same engine. Hold entries that no engine accepts
        now.
        """
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
            # The rank that the client named applies only until the call leaves its first engine.
            rank = None if call[0].has_left else call[0].request.context.data_parallel_rank
            try:
                picked = self._choice.pick(call, rank)
            except InvalidArgument as e:  # no engine has the requested rank any more
                for entry in call:
                    self._end(entry, e)
                continue
            self._send(call, picked)
            if picked is not None:
                changed.update((e.variant, picked.variant) for e in call if e.variant not in (None, picked.variant))
        for (variant, now), count in changed.items():
            get_logger().warning(
                "requests resume on engines with another configuration, because no engine with the old configuration "
                "accepts requests",
                count=count,
                variant=variant,
                new_variant=now,
            )

    def _send(self, entries: Sequence[JournalEntry], picked: Candidate | None) -> None:
        """Send the entries of one call to an engine, or hold them if ``picked`` is None."""
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
        """Send the next suspect when the trial of the current suspect is over, until a trial is running or no suspect
        waits.
        """
        suspects = self._waiting.for_trial
        while len(suspects) and self._retries.trial_over():
            self._place([suspects.take_first()])
            self._on_held()

    def _give_up(self, entry: JournalEntry) -> None:
        error = Unavailable(f"no engine accepted the request within {self._hold_timeout:g} s", retry_after=1.0)
        self._end(entry, error)
        self._on_held()
        self._try_next()

    def _end_moving(self, entry: JournalEntry, error: RequestFailed) -> None:
        request = entry.request.context.external_request_id
        get_logger().error(
            "request failed after its engines were lost",
            request=request,
            reason=error.reason,
            last_loss=entry.last_loss,
        )
        self._end(entry, error)

    def _end(self, entry: JournalEntry, error: RequestFailed) -> None:
        self._journal.end([entry.request_id])
        self._outputs.fail([entry.request_id], error)
