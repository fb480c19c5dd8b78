"""Takes requests to engines, and to other engines when those are lost."""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from penstock_common.errors import InvalidArgument, RequestFailed, Unavailable
from penstock_common.logging import get_logger
from penstock_common.types.outputs import EngineCoreOutputs
from penstock_common.types.request import EngineCoreRequest
from penstock_frontend.config import RetriesConfig
from penstock_frontend.engine.base import OutputHandler
from penstock_frontend.engine.held import HeldRequests
from penstock_frontend.engine.journal import Journal, JournalEntry, Refusal
from penstock_frontend.engine.retries import Retries
from penstock_frontend.engine.router import Candidate, Router


class Engines(Protocol):
    """The engines as the dispatch needs them, by their keys."""

    def candidates(self) -> list[Candidate]:
        """Those with a session."""

    def send(self, engine: str, request: EngineCoreRequest, *, first: bool) -> None:
        """Start a request on an engine with a session. ``first``: it had nothing to do for this frontend."""

    def abort_on(self, engine: str, request_ids: Sequence[str], reason: str) -> None:
        """End requests of an engine, if there is a session with it."""


class Dispatch:
    """Knows where each sequence is. What engines refuse, drop or take down with them goes to others, within a budget; what no
    engine takes is held, and goes out when there is one again.

    ``on_held``: told when the number of held requests has changed; ``on_moved``: how many have left their engines.
    """

    def __init__(
        self,
        engines: Engines,
        outputs: OutputHandler,
        router: Router,
        retries: RetriesConfig,
        *,
        hold_timeout: float,
        on_held: Callable[[], None],
        on_moved: Callable[[int], None],
    ) -> None:
        self._engines = engines
        self._outputs = outputs
        self._router = router
        self._hold_timeout = hold_timeout
        self._on_held = on_held
        self._on_moved = on_moved
        self._journal = Journal()
        self._retries = Retries(retries)
        self._held = HeldRequests(hold_timeout, self._give_up)

    @property
    def num_held(self) -> int:
        """Sequences that wait for an engine, or for their turn as suspects."""
        return len(self._held) + self._retries.num_waiting

    def num_on(self, engine: str) -> int:
        """Sequences that an engine has."""
        return self._journal.num_on(engine)

    def add(self, requests: Sequence[EngineCoreRequest]) -> None:
        """Start the sequences of a call on one engine. Raises InvalidArgument for a rank that no engine has."""
        entries = self._journal.begin(requests)
        try:
            engine = self._pick(entries, requests[0].data_parallel_rank)
        except InvalidArgument:
            self._journal.end([request.request_id for request in requests])
            raise
        self._send(entries, engine)

    def abort(self, request_ids: Iterable[str], reason: str) -> None:
        """End those that have not ended."""
        by_engine: dict[str, list[str]] = {}
        for entry in self._journal.end(request_ids):
            if entry.engine:
                by_engine.setdefault(entry.engine, []).append(entry.request_id)
            elif self._held.discard(entry):
                self._on_held()
        for engine, ids in by_engine.items():
            self._engines.abort_on(engine, ids, reason)
        self._try_next()

    def take(self, engine: str, engine_id: str, frame: EngineCoreOutputs) -> None:
        """A step's outputs. Raises EngineFaultError when the engine cannot be trusted any more."""
        accepted = self._journal.accept(engine, frame.outputs)
        if accepted.outputs:
            not_needed = self._outputs.process(accepted.outputs, engine_id, frame.timestamp)
            if not_needed:
                self.abort(not_needed, "a stop string ended the output")
        refusals = accepted.refusals
        if frame.finished_requests:
            refusals += self._ended_without_output(engine, frame)
        if refusals:
            self._refused(refusals)
        self._try_next()
        if accepted.fault is not None:
            raise accepted.fault

    def _ended_without_output(self, engine: str, frame: EngineCoreOutputs) -> list[Refusal]:
        told = {output.request_id for output in frame.outputs}
        error = Unavailable("the engine ended the request without a word", reason="ENGINE_ERROR")
        silent = [request_id for request_id in frame.finished_requests if request_id not in told]
        return [Refusal(entry, error) for entry in self._journal.lose(engine, silent)]

    def lose(self, engine: str, why: str) -> None:
        """An engine is gone."""
        entries = self._journal.lose(engine)
        if entries:
            get_logger().warning("requests lost their engine and go on elsewhere", count=len(entries), why=why)
        self._move([(entry, why, True) for entry in entries])

    def engines_changed(self) -> None:
        """Engines have come or may take requests again."""
        if len(self._held):
            self._place(self._held.take_all())
            self._on_held()

    def _refused(self, refusals: Iterable[Refusal]) -> None:
        moves = []
        for entry, error in refusals:
            if error.code == "RESOURCE_EXHAUSTED":
                entry.refused_by |= {entry.engine}
                if not self._others(entry):
                    self._end(entry, error)
                    continue
            moves.append((entry, error.message, error.code == "INTERNAL"))
        self._move(moves)

    def _move(self, entries: Iterable[tuple[JournalEntry, str, bool]]) -> None:
        """Send these elsewhere, as far as they may go on; each with why, and whether its engine may have failed because of it."""
        moving = []
        for entry, why, blamed in entries:
            if entry.ended:
                continue
            if (error := self._retries.verdict(entry, why, blamed=blamed)) is not None:
                get_logger().error(
                    "request given up", request=entry.request.external_request_id, reason=error.reason, why=why
                )
                self._end(entry, error)
                continue
            self._journal.leave(entry)
            moving.append(entry)
        if moving:
            self._on_moved(len(moving))
            self._outputs.moved([entry.request_id for entry in moving])
            self._place(moving)
        self._try_next()

    def _place(self, entries: Iterable[JournalEntry]) -> None:
        """Send entries to engines, those of one call to the same; hold those that no engine takes."""
        calls: dict[str, list[JournalEntry]] = {}
        for entry in entries:
            if not entry.ended and self._retries.may_go(entry):
                calls.setdefault(entry.call, []).append(entry)
        for call in calls.values():
            # The engine that the client named may have gone, or be the one that was lost.
            self._send(call, self._pick(call, None))

    def _pick(self, entries: Sequence[JournalEntry], rank: int | None) -> str:
        """The engine for entries that go together, ``""`` when none takes them now.

        Raises InvalidArgument for an unknown rank.
        """
        try:
            return self._router.pick(self._others(entries[0]), rank=rank, count=len(entries))
        except Unavailable:
            return ""

    def _others(self, entry: JournalEntry) -> list[Candidate]:
        candidates = self._engines.candidates()
        return [c for c in candidates if c.key not in entry.refused_by] if entry.refused_by else candidates

    def _send(self, entries: Iterable[JournalEntry], engine: str) -> None:
        for entry in entries:
            if engine:
                first = not self._journal.num_on(engine)
                self._journal.assign(entry, engine)
                self._engines.send(engine, entry.to_send(), first=first)
            else:
                self._held.add(entry)
        if not engine:
            self._on_held()

    def _try_next(self) -> None:
        """Whether it is the next suspect's turn."""
        if (entry := self._retries.next()) is not None:
            self._place([entry])

    def _give_up(self, entry: JournalEntry) -> None:
        error = Unavailable(f"no engine took the request within {self._hold_timeout:g} s", retry_after=1.0)
        for each in (entry, *self._retries.give_up(entry)):
            self._end(each, error)
        self._on_held()

    def _end(self, entry: JournalEntry, error: RequestFailed) -> None:
        self._journal.end([entry.request_id])
        self._outputs.fail([entry.request_id], error)
