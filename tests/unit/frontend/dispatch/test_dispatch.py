"""Random tests of requests on engines that come, go, refuse, and send wrong data. No output is lost, repeated or out of
order.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from penstock_common.errors import Internal, InvalidArgument, RequestFailed, ResourceExhausted, Unavailable
from penstock_common.types.kv_transfer import EngineRole, KvSource
from penstock_common.types.outputs import (
    Drafts,
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
    Logprobs,
    NewTokens,
    PrefillStats,
    RequestError,
    TokenColumns,
)
from penstock_common.types.request import EngineCoreRequest, RequestContext
from penstock_common.types.sampling import SamplingParams
from penstock_frontend.config import DisaggregationConfig, RetriesConfig
from penstock_frontend.dispatch.disaggregation import Legs
from penstock_frontend.dispatch.dispatch import Dispatch
from penstock_frontend.dispatch.drains import MOST_AT_ONCE
from penstock_frontend.dispatch.journal import EngineFaultError, JournalEntry
from penstock_frontend.dispatch.prefix_caches import PrefixCaches
from penstock_frontend.dispatch.router import Candidate, Router
from tests.fakes import virtual_time

MAX_TOKENS = 5
PROMPT = [1, 2, 3]
DRAINING = RequestError(code="UNAVAILABLE", message="draining", reason="DRAINING")
FULL = RequestError(code="RESOURCE_EXHAUSTED", message="full", reason="QUEUE_FULL", retry_after=1.5)
STEP_FAILED = RequestError(code="INTERNAL", message="the step fails", reason="STEP_FAILED")
INCIDENT = RequestError(code="INTERNAL", message="incident 0badcafe", reason="INCIDENT")


FINGERPRINT = b"f" * 16


def source_at(engine: str) -> KvSource:
    return KvSource(
        engine_id=engine, incarnation="1", address="h:1", lease_id=b"l" * 16, num_tokens=2, fingerprint=FINGERPRINT
    )


def token_of(request_id: str, index: int) -> int:
    return 1000 * (1 + int(request_id[1:].split("-")[0])) + index


class Simulated:
    """Simulated engines with requests, the frontend's side of them, and the tokens it has read. ``token_of`` gives the
    tokens.
    """

    def __init__(self, *names: str, retries: RetriesConfig | None = None, hold_timeout: float = 60.0) -> None:
        self.up = dict.fromkeys(names, True)
        self.running: dict[str, dict[str, tuple[EngineCoreRequest, int]]] = {name: {} for name in names}
        self.read: dict[str, list[int]] = {}
        self.ended: dict[str, FinishReason | RequestFailed] = {}
        self.outputs: list[EngineCoreOutput] = []
        self.late: list[tuple[str, EngineCoreOutput]] = []
        self.moves: list[str] = []
        self.sent: list[tuple[str, EngineCoreRequest]] = []
        self.alone: Counter[str] = Counter()  # consecutive lost engines that had only this request, and sent nothing
        self.brought: set[str] = set()  # requests that got outputs from their engine
        self.unsendable: set[str] = set()
        self.aborts: list[tuple[str, str]] = []
        self.closed: set[str] = set()  # connected engines that accept no requests
        self.fates: dict[str, bool] = {}  # engines of which it is unknown whether they survived, and whether they did
        self.variants: dict[str, str] = {}  # variants of engines whose variant is not ""
        self.num_held_changes = 0
        self.num_moved = 0
        self.roles: dict[str, EngineRole] = {}
        self.fingerprint = b""  # fingerprint of all engines' KV blocks; if empty, no blocks move
        self.asked: list[tuple[str, str]] = []  # requested handoffs that engines have not completed
        self.planned: list[tuple[str, str]] = []
        self.gaps: list[float] = []
        self.router = Router()
        self.dispatch = Dispatch(
            self,
            self,
            self.router,
            retries or RetriesConfig(max_moves=10_000, max_strikes=100),
            caches=PrefixCaches(0),
            hold_timeout=hold_timeout,
            on_held=self._on_held,
            on_moved=self._on_moved,
            legs=Legs(DisaggregationConfig(min_prefill_tokens=len(PROMPT)), self.router, self._on_planned),
            on_gap=self.gaps.append,
        )

    def _on_planned(self, plan: str, why: str) -> None:
        self.planned.append((plan, why))

    def _on_moved(self, count: int) -> None:
        self.num_moved += count

    def _on_held(self) -> None:
        self.num_held_changes += 1

    # Implementation of the dispatch's Engines interface.

    def candidates(self) -> list[Candidate]:
        return [
            Candidate(
                name,
                rank,
                name not in self.closed,
                self.variants.get(name, ""),
                role=self.roles.get(name, EngineRole.BOTH),
                fingerprint=self.fingerprint,
            )
            for rank, (name, up) in enumerate(self.up.items())
            if up
        ]

    def send(self, engine: str, request: EngineCoreRequest, *, first: bool) -> None:
        assert self.up[engine]
        assert first == (not self.running[engine])
        if request.request_id in self.unsendable:
            raise ValueError("no bytes can say this")
        self.sent.append((engine, request))
        self.running[engine][request.request_id] = (request, len(request.prior_output_token_ids))

    def abort_on(self, engine: str, request_ids: Sequence[str], reason: str) -> None:
        for request_id in request_ids:
            self.aborts.append((engine, request_id))
            self.running[engine].pop(request_id, None)

    def hand_over(self, engine: str, request_ids: Sequence[str]) -> None:
        self.asked += [(engine, request_id) for request_id in request_ids]

    # Implementation of the dispatch's OutputHandler interface.

    def process(
        self,
        outputs: Sequence[EngineCoreOutput],
        engine: str,
        timestamp: float,
        tokens: Sequence[NewTokens] = (),
        drafts: Sequence[Drafts] = (),
    ) -> list[str]:
        for request_id, token_ids in tokens:
            assert request_id not in self.ended
            self.read.setdefault(request_id, []).extend(token_ids)
            self.brought.add(request_id)
        failed: list[str] = []
        for output in outputs:
            self.outputs.append(output)
            read = self.read.setdefault(output.request_id, [])
            assert output.request_id not in self.ended
            if output.error is not None and (output.finish_reason is None or output.error.reason == "INCIDENT"):
                self.ended[output.request_id] = output.error.to_exception()
                if output.finish_reason is None:
                    failed.append(output.request_id)
                continue
            assert output.offset == len(read)
            read.extend(output.new_token_ids)
            if output.new_token_ids:
                self.brought.add(output.request_id)
            if output.finish_reason is not None:
                self.ended[output.request_id] = (
                    output.finish_reason if output.error is None else output.error.to_exception()
                )
        return failed

    def fail(self, request_ids: Iterable[str], error: RequestFailed) -> None:
        for request_id in request_ids:
            assert request_id not in self.ended
            self.ended[request_id] = error

    def fail_all(self, error: RequestFailed) -> list[str]:
        raise AssertionError("no caller may use this")

    def moved(self, request_ids: Iterable[str]) -> None:
        ids = list(request_ids)
        self.moves.extend(ids)
        self.brought.difference_update(ids)

    # Events.

    def add(self, *request_ids: str, rank: int | None = None, **params: object) -> None:
        self.dispatch.add(
            [
                EngineCoreRequest(
                    request_id=request_id,
                    prompt_token_ids=PROMPT,
                    sampling_params=SamplingParams(**{"max_tokens": MAX_TOKENS} | params),  # type: ignore[arg-type]
                    context=RequestContext(external_request_id=request_id, data_parallel_rank=rank),
                )
                for request_id in request_ids
            ]
        )

    def where(self, request_id: str) -> str:
        """Return the engine that has the request, or "" if none has it."""
        return next((engine for engine, running in self.running.items() if request_id in running), "")

    def advance(self, engine: str, request_id: str, count: int = 1) -> EngineCoreOutput:
        """Return the next output of a request, as its engine makes it."""
        request, offset = self.running[engine][request_id]
        tokens = [token_of(request_id, i) for i in range(offset, min(offset + count, MAX_TOKENS))]
        output = EngineCoreOutput(request_id=request_id, attempt=request.attempt, offset=offset, new_token_ids=tokens)
        self.running[engine][request_id] = (request, offset + len(tokens))
        if offset + len(tokens) == MAX_TOKENS:
            output.finish_reason = FinishReason.LENGTH
            del self.running[engine][request_id]
        elif 0 < request.handoff_after_tokens <= offset + len(tokens) - len(request.prior_output_token_ids):
            output.finish_reason, output.kv_source = FinishReason.HANDOFF, source_at(engine)
            del self.running[engine][request_id]
        return output

    def give_away(self, engine: str, *request_ids: str, source: KvSource | None = None) -> None:
        """Let the engine end these requests without more tokens."""
        outputs = []
        for request_id in request_ids:
            request, offset = self.running[engine].pop(request_id)
            output = EngineCoreOutput(
                request_id=request_id,
                attempt=request.attempt,
                offset=offset,
                finish_reason=FinishReason.HANDOFF,
                kv_source=source,
            )
            outputs.append(output)
        self.deliver(engine, *outputs)

    def give_what_was_asked_for(self) -> None:
        asked, self.asked = self.asked, []
        for engine, request_id in asked:
            if request_id in self.running[engine]:
                self.give_away(engine, request_id, source=source_at(engine))

    def deliver(self, engine: str, *outputs: EngineCoreOutput, counts: bool = True) -> None:
        """Deliver a frame of outputs. With ``counts``, it also has the engine's load."""
        copies = [
            EngineCoreOutput(
                request_id=o.request_id,
                attempt=o.attempt,
                offset=o.offset,
                new_token_ids=list(o.new_token_ids),
                finish_reason=o.finish_reason,
                error=o.error,
                kv_source=o.kv_source,
            )
            for o in outputs
        ]
        if counts:
            self.router.report(engine, waiting=0, running=len(self.running[engine]), kv_cache_usage=0.0)
        rows = [self._row(output) for output in copies]
        if copies and all(rows) and copies[0].offset % 2:  # use columns every other time, where possible
            self.deliver_in_columns(engine, *[row for row in rows if row is not None])
        else:
            self.dispatch.take(engine, engine, EngineCoreOutputs(outputs=copies))

    def _row(self, output: EngineCoreOutput) -> tuple[int, int, list[int]] | None:
        """Return the output as a row of columns, if it has only tokens."""
        if output.finish_reason is not None or output.error is not None or not output.new_token_ids:
            return None
        names = (
            r.request_number for _, r in self.sent if (r.request_id, r.attempt) == (output.request_id, output.attempt)
        )
        return next(names), output.offset, output.new_token_ids

    def deliver_in_columns(self, engine: str, *rows: tuple[int, int, list[int]]) -> None:
        columns = TokenColumns()
        for row in rows:
            columns.add(*row)
        self.dispatch.take(engine, engine, EngineCoreOutputs(tokens=columns))

    def number_of(self, request_id: str) -> int:
        """Return the request's number on the last engine that got it."""
        return next(r.request_number for _, r in reversed(self.sent) if r.request_id == request_id)

    def step(self, engine: str, count: int = 1) -> None:
        self.deliver(engine, *[self.advance(engine, request_id, count) for request_id in list(self.running[engine])])

    def refuse(
        self,
        engine: str,
        request_id: str,
        error: RequestError,
        *,
        counts: bool = True,
        source: KvSource | None = None,
    ) -> None:
        request, offset = self.running[engine].pop(request_id)
        reason = FinishReason.ABORT if error.code == "UNAVAILABLE" else FinishReason.ERROR
        self.deliver(
            engine,
            EngineCoreOutput(
                request_id=request_id,
                attempt=request.attempt,
                offset=offset,
                finish_reason=reason,
                error=error,
                kv_source=source,
            ),
            counts=counts,
        )

    def drain(self, engine: str, time_left: float) -> None:
        self.closed.add(engine)
        self.dispatch.drain(engine, time_left)

    def kill(self, engine: str, *ended_there: str, in_doubt: bool = False) -> None:
        """``ended_there``: requests whose last output was made, and has not come. ``in_doubt``: it is known only when
        it starts again.
        """
        on_engine = list(dict.fromkeys([*self.running[engine], *ended_there]))
        one_call = len({request_id.split("-")[0] for request_id in on_engine}) == 1
        for request_id in on_engine:
            self.alone[request_id] = 0 if request_id in self.brought else self.alone[request_id] + one_call
        self.closed.discard(engine)
        if in_doubt:
            self.fates[engine] = False
        self._lose(engine, "killed")

    def cut(self, engine: str) -> None:
        """Cut an engine's session while the engine survives, which is known once it is connected again."""
        self.alone.update(
            {request_id: -self.alone[request_id] for request_id in self.brought & set(self.running[engine])}
        )
        self.fates[engine] = True
        self._lose(engine, "cut off")

    def _lose(self, engine: str, why: str) -> None:
        self.up[engine] = False
        self.running[engine].clear()
        self.dispatch.lose(engine, why, in_doubt=engine in self.fates)
        self.router.forget(engine)

    def start(self, engine: str) -> None:
        """Connect an engine that restarted or survived."""
        self.up[engine] = True
        self.dispatch.engines_changed()
        match self.fates.pop(engine, None):
            case True:
                self.dispatch.acquit(engine)
            case False:
                self.dispatch.accuse(engine)

    def finish(self) -> None:
        """Start all engines and step until all requests have ended."""
        for engine in self.up:
            self.start(engine)
        for _ in range(200):
            for engine in self.up:
                self.step(engine)
        assert not any(self.running.values())


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["add", "add n", "step", "step 2", "lose output", "duplicate", "keep for later", "late", "kill", "vanish",
                         "start", "drain", "gentle drain", "hand over", "unasked", "put off", "full", "time", "abort", "cut"]),
        st.integers(0, 2),
        st.integers(0, 5),
    ),
    max_size=60,
)  # fmt: skip


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(EVENTS, st.booleans())
@example(
    [
        ("add", 0, 0),
        ("step", 1, 0),
        ("step 2", 1, 0),
        ("lose output", 1, 0),
        ("lose output", 0, 0),
        ("lose output", 2, 0),
    ],
    False,
)
def test_whatever_engines_do_every_request_ends_with_every_token_once(
    events: list[tuple[str, int, int]], legs: bool
) -> None:
    async def run() -> None:
        world, ids = Simulated("a", "b", "c"), itertools.count()
        if legs:
            world.roles, world.fingerprint = {"a": EngineRole.PREFILL}, FINGERPRINT
        started: set[str] = set()
        aborted: set[str] = set()
        refused: set[str] = set()
        for what, which, pick in events:
            engine = "abc"[which]
            on_engine = list(world.running[engine])
            target = on_engine[pick % len(on_engine)] if on_engine else ""
            match what:
                case "add" | "add n":
                    number = next(ids)
                    names = [f"r{number}"] if what == "add" else [f"r{number}-{i}" for i in range(3)]
                    started.update(names)
                    world.add(*names)
                case "step" if world.up[engine]:
                    world.step(engine)
                case "step 2" if world.up[engine]:
                    world.step(engine, 2)
                case "lose output" if target:  # a gap: the engine counts as lost
                    world.advance(engine, target)
                    if target in world.running[engine]:
                        with pytest.raises(EngineFaultError):
                            world.step(engine)
                    world.kill(engine, target)
                case "duplicate" if target:
                    output = world.advance(engine, target)
                    world.deliver(engine, output, output)
                case "keep for later" if target:
                    world.late.append((engine, world.advance(engine, target)))
                    world.kill(engine, target)
                case "late":
                    for where, output in world.late:
                        world.deliver(where, output)
                case "kill" if world.up[engine]:
                    world.kill(engine)
                case "vanish" if world.up[engine]:
                    world.kill(engine, in_doubt=True)
                case "start":
                    world.start(engine)
                case "drain" if world.up[engine]:
                    world.up[engine] = False
                    for request_id in on_engine:
                        world.refuse(engine, request_id, DRAINING)
                case "gentle drain" if world.up[engine] and engine not in world.closed:
                    world.drain(engine, 2.0)
                case "hand over":
                    world.give_what_was_asked_for()
                case "unasked" if target and world.running[engine][target][0].attempt < 50:
                    world.give_away(engine, target)
                case "put off" if target and world.running[engine][target][0].attempt > 0:
                    world.refuse(engine, target, DRAINING)
                case "full" if target:
                    refused.add(target)
                    world.refuse(engine, target, FULL)
                case "time":
                    await asyncio.sleep(0.5)
                case "abort" if target:
                    aborted.add(target)
                    world.dispatch.abort([target], "the client is gone")
                case "cut" if world.up[engine] and engine not in world.closed:
                    world.cut(engine)
                    if pick % 2:  # the engine reconnects immediately
                        world.start(engine)
        for engine in list(world.closed):  # a drain is never cancelled
            world.kill(engine)
        world.finish()
        await asyncio.sleep(2.0)  # engines that were full have space again
        world.finish()
        assert set(world.ended) == started - aborted
        for request_id in started - aborted:
            whole = [token_of(request_id, i) for i in range(MAX_TOKENS)]
            end = world.ended[request_id]
            if isinstance(end, Internal):
                assert end.reason == "QUARANTINED"
                assert world.alone[request_id] >= 2  # an older report of the engine may have hidden one loss
            elif isinstance(end, ResourceExhausted):
                assert request_id in refused
            else:
                assert end is FinishReason.LENGTH
            read = world.read.get(request_id, [])
            assert read == (whole if end is FinishReason.LENGTH else whole[: len(read)])
        assert world.dispatch.num_held == 0
        assert sum(world.dispatch.num_on(engine) for engine in "abc") == 0

    virtual_time.run(run())


async def test_the_sequences_of_a_call_stay_together_when_they_move() -> None:
    world = Simulated("a", "b", "c")
    world.add("r0-0", "r0-1", "r0-2")
    [engine] = {engine for engine, _ in world.sent}
    world.step(engine)
    world.kill(engine)
    assert world.num_moved == len(world.moves) == 3
    again = world.sent[3:]
    assert len({engine for engine, _ in again}) == 1
    assert [(r.request_id, r.attempt, r.prior_output_token_ids) for _, r in again] == [
        (f"r0-{i}", 1, [token_of(f"r0-{i}", 0)]) for i in range(3)
    ]


async def test_a_queue_that_is_full_everywhere_is_the_clients_to_hear_of() -> None:
    world = Simulated("a", "b")
    world.add("r0")
    for _ in range(2):
        [engine] = [engine for engine in "ab" if world.running[engine]]
        world.refuse(engine, "r0", FULL)
    error = world.ended["r0"]
    assert isinstance(error, ResourceExhausted)
    assert error.retry_after == 1.5
    assert world.num_moved == 0, "it never ran anywhere"


@pytest.mark.parametrize("code", ["INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "UNIMPLEMENTED"])
async def test_an_error_of_the_request_itself_is_final(code: str) -> None:
    world = Simulated("a", "b")
    world.add("r0")
    [engine] = [engine for engine in "ab" if world.running[engine]]
    world.refuse(engine, "r0", RequestError(code=code, message="no"))
    assert world.moves == []
    assert isinstance(world.ended["r0"], RequestFailed)


async def test_a_request_ended_by_an_operator_is_not_resumed() -> None:
    world = Simulated("a", "b")
    world.add("r0")
    [engine] = [engine for engine in "ab" if world.running[engine]]
    world.refuse(engine, "r0", RequestError(code="UNAVAILABLE", message="paused", reason="PAUSED"))
    assert isinstance(world.ended["r0"], Unavailable)


async def test_a_request_that_ends_without_an_output_goes_on_elsewhere() -> None:
    world = Simulated("a", "b")
    world.add("r0")
    [engine] = [engine for engine in "ab" if world.running[engine]]
    world.running[engine].clear()
    world.dispatch.take(engine, engine, EngineCoreOutputs(finished_requests=["r0", "unknown"]))
    world.finish()
    assert world.ended["r0"] is FinishReason.LENGTH


async def test_an_unknown_rank_is_refused_and_a_lost_one_is_not_waited_for() -> None:
    world = Simulated("a", "b")
    with pytest.raises(InvalidArgument, match="data_parallel_rank is 5"):
        world.add("r0", rank=5)
    assert world.dispatch.num_on("a") + world.dispatch.num_on("b") == 0
    world.add("r1", rank=0)
    world.kill("a")
    assert list(world.running["b"]) == ["r1"]


async def test_a_request_waits_for_the_engine_that_it_names_and_no_other() -> None:
    world = Simulated("a", "b")
    world.closed = {"b"}
    world.add("r0", rank=1)
    world.dispatch.engines_changed()
    assert (world.where("r0"), world.dispatch.num_held) == ("", 1)
    world.closed = set()
    world.dispatch.engines_changed()
    assert world.where("r0") == "b"


async def test_a_request_that_waits_for_a_rank_ends_when_there_is_none_any_more() -> None:
    world = Simulated("a", "b")
    world.closed = {"b"}
    world.add("r0", rank=1)
    world.up["b"] = False
    world.dispatch.engines_changed()
    error = world.ended["r0"]
    assert isinstance(error, InvalidArgument)
    assert error.message == "routing.data_parallel_rank is 1, but no engine has this rank; known ranks: 0"
    assert world.dispatch.num_held == 0


def mixed(**variants: str) -> Simulated:
    """Return engines by name, each with a variant."""
    world = Simulated(*variants)
    world.variants = variants
    return world


async def test_a_moved_request_keeps_its_variant_while_such_an_engine_accepts_requests() -> None:
    world = mixed(a="old", b="new", c="old")
    world.add("r0", rank=0)
    world.step("a")
    world.router.report("c", waiting=9, running=9, kv_cache_usage=0.9)
    world.kill("a")
    assert world.where("r0") == "c"


async def test_a_request_whose_variant_is_gone_goes_on_with_another_which_is_logged_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    world = mixed(a="old", b="new")
    for number in range(3):
        world.add(f"r{number}", rank=0)
    world.step("a")
    world.kill("a")
    world.finish()
    assert world.ended == {f"r{number}": FinishReason.LENGTH for number in range(3)}
    [line] = [line for line in capsys.readouterr().out.splitlines() if "another configuration" in line]
    assert "count=3" in line
    assert ("variant=old" in line, "new_variant=new" in line) == (True, True)


def on_a_detour() -> tuple[Simulated, str, str]:
    """Return a world with a request, the engine that runs the request, and the other engine of the same variant.

    The request has tokens of the variant ``old``, but runs on an engine of the variant ``new``.
    """
    world = mixed(a="old", b="new", c="old", d="new")
    world.closed = {"c"}
    world.add("r0", rank=0)
    world.step("a")
    world.kill("a")
    world.closed = set()
    engine = world.where("r0")
    return world, engine, "b" if engine == "d" else "d"


async def test_a_request_returns_to_its_variant_when_nothing_came_of_the_other() -> None:
    world, engine, _ = on_a_detour()
    world.router.report("c", waiting=9, running=9, kv_cache_usage=0.9)
    world.kill(engine)
    assert world.where("r0") == "c"


async def test_a_request_belongs_to_the_variant_that_brought_its_last_token() -> None:
    world, engine, other = on_a_detour()
    world.step(engine)
    world.router.report(other, waiting=9, running=9, kv_cache_usage=0.9)
    world.kill(engine)
    assert world.where("r0") == other


async def test_a_request_that_has_nothing_yet_goes_to_any_variant(capsys: pytest.CaptureFixture[str]) -> None:
    world = mixed(a="old", b="new", c="old")
    world.add("r0", rank=0)
    world.router.report("c", waiting=9, running=9, kv_cache_usage=0.9)
    world.kill("a")
    assert world.where("r0") == "b"
    assert "another configuration" not in capsys.readouterr().out


async def test_retries_are_bounded_even_when_each_engine_brings_something() -> None:
    world = Simulated("a", "b", retries=RetriesConfig(max_moves=2, max_strikes=3))
    world.add("r0")
    for _ in range(3):
        [engine] = [engine for engine in "ab" if world.running[engine]]
        world.step(engine)
        world.kill(engine)
        world.start(engine)
    error = world.ended["r0"]
    assert isinstance(error, Unavailable)
    assert (
        error.reason,
        "could not finish on 3 engines; the limit of moves to other engines, retries.max_moves, is 2" in error.message,
    ) == ("RETRIES_EXHAUSTED", True)


async def test_suspects_are_tried_one_at_a_time_and_only_the_guilty_one_is_given_up() -> None:
    world = Simulated("a", "b", retries=RetriesConfig(max_strikes=3))
    names = [f"r{number}" for number in range(6)]
    for name in names:
        world.add(name)
    deaths = 0
    for _ in range(300):
        for engine in "ab":
            if "r3" in world.running[engine]:
                deaths += 1
                world.kill(engine)
                world.start(engine)
            elif world.running[engine]:
                world.step(engine)
    assert deaths == 3
    error = world.ended.pop("r3")
    assert isinstance(error, RequestFailed)
    assert error.reason == "QUARANTINED"
    assert world.ended == {name: FinishReason.LENGTH for name in names if name != "r3"}


async def test_a_suspect_that_waits_for_its_trial_can_be_cancelled() -> None:
    world = Simulated("a", retries=RetriesConfig(max_strikes=2))
    world.add("r0")
    world.add("r1")
    world.kill("a")
    world.start("a")
    assert list(world.running["a"]) == ["r0"]
    world.dispatch.abort(["r1"], "the client is gone")
    world.dispatch.abort(["r0"], "the client is gone")
    assert not world.running["a"]
    world.add("r2")
    world.finish()
    assert world.ended == {"r2": FinishReason.LENGTH}


async def test_suspects_do_not_wait_for_one_that_finds_no_engine() -> None:
    world = Simulated("a", retries=RetriesConfig(max_strikes=2), hold_timeout=0.01)
    for name in ("r0", "r1", "r2"):
        world.add(name)
    world.kill("a")
    assert world.dispatch.num_held == 3
    while len(world.ended) < 3:
        await asyncio.sleep(0.001)
    assert all(isinstance(error, Unavailable) for error in world.ended.values())
    assert world.dispatch.num_held == 0
    world.start("a")
    world.add("r3")
    world.finish()
    assert world.ended["r3"] is FinishReason.LENGTH


async def test_a_drain_gives_no_strike() -> None:
    world = Simulated("a", "b", retries=RetriesConfig(max_strikes=1))
    world.add("r0")
    for _ in range(4):
        [engine] = [engine for engine in "ab" if world.running[engine]]
        world.refuse(engine, "r0", DRAINING)
    world.finish()
    assert world.ended["r0"] is FinishReason.LENGTH


async def test_the_wait_for_an_engine_ends() -> None:
    world = Simulated("a", hold_timeout=0.01)
    world.add("r0")
    world.kill("a")
    assert world.dispatch.num_held == 1
    while "r0" not in world.ended:
        await asyncio.sleep(0.001)
    assert isinstance(world.ended["r0"], Unavailable)
    assert world.dispatch.num_held == 0
    assert world.num_held_changes == 2


def test_views_that_come_all_the_time_do_not_keep_a_request_held() -> None:
    async def run() -> None:
        world = Simulated("a", hold_timeout=3.0)
        world.add("r0")
        world.kill("a")
        for _ in range(7):
            await asyncio.sleep(0.5)
            world.dispatch.engines_changed()
        assert isinstance(world.ended["r0"], Unavailable)

    virtual_time.run(run())


def test_engines_without_output_do_not_reset_a_held_requests_clock() -> None:
    async def run() -> None:
        world = Simulated("a", hold_timeout=3.0)
        world.add("r0")
        for _ in range(2):
            world.up["a"] = False
            world.refuse("a", "r0", DRAINING)
            await asyncio.sleep(1.25)
            world.start("a")
        world.up["a"] = False
        world.refuse("a", "r0", DRAINING)
        await asyncio.sleep(0.75)
        assert isinstance(world.ended["r0"], Unavailable)

    virtual_time.run(run())


def test_what_an_engine_brings_sets_the_clock_of_holding_back() -> None:
    async def run() -> None:
        world = Simulated("a", hold_timeout=3.0)
        world.add("r0")
        for _ in range(3):
            world.kill("a")
            await asyncio.sleep(2.5)
            world.start("a")
            world.step("a")
        world.finish()
        assert world.ended["r0"] is FinishReason.LENGTH

    virtual_time.run(run())


def test_a_suspect_waits_for_its_turn_no_longer_than_any_request_is_held() -> None:
    async def run() -> None:
        world = Simulated("a", retries=RetriesConfig(max_strikes=2), hold_timeout=3.0)
        world.add("r0")
        world.add("r1")
        world.kill("a")
        world.start("a")
        assert list(world.running["a"]) == ["r0"]
        for _ in range(7):
            await asyncio.sleep(0.5)
            world.dispatch.engines_changed()
        assert isinstance(world.ended["r1"], Unavailable)
        assert world.dispatch.num_held == 0
        world.finish()
        assert world.ended["r0"] is FinishReason.LENGTH

    virtual_time.run(run())


async def test_a_suspect_whose_client_has_gone_is_not_held_any_more() -> None:
    world = Simulated("a", retries=RetriesConfig(max_strikes=2))
    world.add("r0")
    world.add("r1")
    world.kill("a")
    world.start("a")
    changes = world.num_held_changes
    assert world.dispatch.num_held == 1
    world.dispatch.abort(["r1"], "the client is gone")
    assert world.dispatch.num_held == 0
    assert world.num_held_changes > changes


def test_an_engine_that_was_full_is_asked_again_after_the_time_it_named() -> None:
    async def run() -> None:
        world = Simulated("a", "b")
        world.add("r0")
        full = world.where("r0")
        world.refuse(full, "r0", FULL)
        [other] = {"a", "b"} - {full}
        assert world.where("r0") == other
        world.up[other] = False
        world.refuse(other, "r0", DRAINING)
        assert world.dispatch.num_held == 1
        await asyncio.sleep(1.4)
        assert world.where("r0") == ""
        await asyncio.sleep(0.2)
        assert world.where("r0") == full
        world.finish()
        assert world.ended["r0"] is FinishReason.LENGTH

    virtual_time.run(run())


async def test_an_engine_that_was_full_and_starts_again_at_the_same_address_is_another_one() -> None:
    world = Simulated("a", "b")
    world.add("r0")
    full = world.where("r0")
    world.refuse(full, "r0", FULL)
    [other] = {"a", "b"} - {full}
    world.kill(full)
    world.start(full)
    world.kill(other)
    assert world.where("r0") == full


def test_a_full_engine_keeps_a_request_away_no_longer_than_it_may_be_held() -> None:
    async def run() -> None:
        world = Simulated("a", "b", hold_timeout=10.0)
        world.add("r0")
        full = world.where("r0")
        world.refuse(
            full, "r0", RequestError(code="RESOURCE_EXHAUSTED", message="full", reason="QUEUE_FULL", retry_after=1e9)
        )
        [other] = {"a", "b"} - {full}
        await asyncio.sleep(10.5)
        world.kill(other)
        assert world.where("r0") == full

    virtual_time.run(run())


async def test_engines_that_take_nothing_do_not_delay_the_answer_that_the_others_are_full() -> None:
    world = Simulated("a", "b")
    world.closed.add("b")
    world.add("r0")
    world.refuse("a", "r0", FULL)
    error = world.ended["r0"]
    assert isinstance(error, ResourceExhausted)
    assert error.retry_after == 1.5


async def test_an_incident_is_final() -> None:
    world = Simulated("a", "b")
    world.add("r0")
    world.refuse(world.where("r0"), "r0", INCIDENT)
    error = world.ended["r0"]
    assert isinstance(error, Internal)
    assert (error.reason, error.message) == ("INCIDENT", "incident 0badcafe")
    assert world.moves == []


async def test_an_incident_behind_an_output_that_could_not_be_sent_is_no_gap() -> None:
    world = Simulated("a")
    for name in ("r0", "r1"):
        world.add(name)
    world.advance("a", "r0")  # the engine has computed the token, but its report is lost
    world.refuse("a", "r0", INCIDENT)
    assert isinstance(world.ended["r0"], Internal)
    world.finish()
    assert world.ended["r1"] is FinishReason.LENGTH


async def test_a_request_that_fails_a_step_is_tried_on_one_more_engine() -> None:
    world = Simulated("a", "b", "c")
    world.add("r0")
    engines = []
    while where := world.where("r0"):
        engines.append(where)
        world.step(where)
        world.refuse(where, "r0", STEP_FAILED)
    assert len(set(engines)) == len(engines) == 2
    error = world.ended["r0"]
    assert isinstance(error, Internal)
    assert error.reason == "QUARANTINED"
    assert "made steps fail on 2 engines" in error.message


async def test_a_request_that_fails_a_step_goes_on_where_its_step_does_not_fail() -> None:
    world = Simulated("a", "b")
    world.add("r0")
    world.refuse(world.where("r0"), "r0", STEP_FAILED)
    world.finish()
    assert world.ended["r0"] is FinishReason.LENGTH


async def test_a_request_that_fails_a_step_ends_where_there_is_no_other_engine() -> None:
    world = Simulated("a")
    world.add("r0")
    world.refuse("a", "r0", STEP_FAILED)
    error = world.ended["r0"]
    assert isinstance(error, Internal)
    assert error.reason == "STEP_FAILED"


async def test_a_request_that_two_engines_died_with_alone_is_not_given_a_third() -> None:
    world = Simulated("a", "b", "c")
    world.add("r0-0", "r0-1")
    for _ in range(2):
        world.kill(world.where("r0-0"))
    for request_id in ("r0-0", "r0-1"):
        error = world.ended[request_id]
        assert isinstance(error, Internal)
        assert error.reason == "QUARANTINED"
        assert "2 engines in a row failed while this request was the only request on the engine" in error.message


@pytest.mark.parametrize("others", [1, 2])
async def test_a_request_that_was_not_alone_when_its_engines_died_goes_on(others: int) -> None:
    world = Simulated("a", "b", "c")
    world.add("r0")
    for _ in range(2):
        where = world.where("r0")
        # The load comes from another frontend.
        world.router.report(where, waiting=others - 1, running=2, kv_cache_usage=0.0)
        world.kill(where)
    world.finish()
    assert world.ended["r0"] is FinishReason.LENGTH


async def test_a_request_whose_engines_were_cut_off_waits_until_they_are_back_and_goes_on() -> None:
    world = Simulated("a", "b", "c")
    world.add("r0-0", "r0-1")
    cut = []
    while engine := world.where("r0-0"):
        cut.append(engine)
        world.cut(engine)
    # The request was alone on both lost engines, so it does not go to the third engine.
    assert (len(cut), world.dispatch.num_held) == (2, 2)
    world.start(cut[1])
    assert world.where("r0-0") == world.where("r0-1") != ""
    assert world.dispatch.num_held == 0
    world.finish()
    assert world.ended == {"r0-0": FinishReason.LENGTH, "r0-1": FinishReason.LENGTH}


async def test_when_all_engines_were_cut_off_all_go_on_at_once() -> None:
    world = Simulated("a", "b", "c", retries=RetriesConfig(max_strikes=3))
    names = [f"r{number}" for number in range(6)]
    for name in names:
        world.add(name)
    for engine in "abc":
        world.cut(engine)
    assert world.dispatch.num_held == len(names)
    for engine in "abc":
        world.start(engine)
    assert all(world.where(name) for name in names)
    world.finish()
    assert world.ended == dict.fromkeys(names, FinishReason.LENGTH)


@pytest.mark.parametrize("at_once", [False, True])
async def test_a_request_that_the_only_engines_die_of_is_found_when_they_start_again(at_once: bool) -> None:
    world = Simulated("a", "b")
    world.add("r0")
    first = world.where("r0")
    world.kill(first, in_doubt=True)
    if not at_once:
        world.start(first)
    second = world.where("r0")
    world.kill(second, in_doubt=True)
    assert (world.where("r0"), world.dispatch.num_held) == ("", 1)
    for engine in "ab":
        world.start(engine)
        assert world.where("r0") == ""
    error = world.ended["r0"]
    assert isinstance(error, Internal)
    assert error.reason == "QUARANTINED"
    assert error.message.endswith("Last loss: killed")
    assert world.dispatch.num_held == 0


async def test_one_engine_that_lives_does_not_acquit_of_two_that_have_died() -> None:
    world = Simulated("a", "b", "c", "d")
    world.add("r0")
    dead = [world.where("r0")]
    world.kill(dead[0], in_doubt=True)
    cut = world.where("r0")
    world.cut(cut)
    world.start(cut)
    dead.append(world.where("r0"))
    world.kill(dead[1], in_doubt=True)
    assert "r0" not in world.ended
    for engine in dead:
        world.start(engine)
    assert isinstance(world.ended["r0"], Internal)


def test_a_request_is_taken_for_what_engines_died_of_that_stay_away() -> None:
    async def run() -> None:
        world = Simulated("a", "b", "c", hold_timeout=3.0)
        world.add("r0")
        for _ in range(2):
            world.kill(world.where("r0"), in_doubt=True)
        await asyncio.sleep(2.75)
        assert "r0" not in world.ended
        await asyncio.sleep(0.5)
        assert isinstance(world.ended["r0"], Internal)
        assert world.dispatch.num_held == 0

    virtual_time.run(run())


async def test_a_request_that_waits_for_a_verdict_can_be_cancelled() -> None:
    world = Simulated("a", "b")
    world.add("r0")
    for engine in "ab":
        world.cut(engine)
    world.dispatch.abort(["r0"], "the client is gone")
    assert world.dispatch.num_held == 0
    world.finish()
    assert world.ended == {}


async def test_a_suspect_that_waits_for_a_verdict_keeps_no_other_from_its_turn() -> None:
    world = Simulated("a", retries=RetriesConfig(max_strikes=2))
    for name in ("r0", "r1"):
        world.add(name)
    world.kill("a")
    world.start("a")
    assert world.where("r0") == "a"  # r1 is still waiting
    world.up["b"], world.running["b"] = True, {}
    world.kill("a", in_doubt=True)
    assert (world.where("r0"), world.where("r1")) == ("", "b")
    world.finish()
    assert isinstance(world.ended["r0"], Internal)
    assert world.ended["r1"] is FinishReason.LENGTH


async def test_a_request_that_cannot_be_sent_ends_alone() -> None:
    world = Simulated("a")
    world.unsendable.add("r1")
    for name in ("r0", "r1", "r2"):
        world.add(name)
    error = world.ended["r1"]
    assert isinstance(error, Internal)
    assert error.reason == "INCIDENT"
    world.finish()
    assert {world.ended[name] for name in ("r0", "r2")} == {FinishReason.LENGTH}
    assert world.dispatch.num_on("a") == 0


async def test_a_held_request_that_cannot_be_sent_does_not_block_others() -> None:
    world = Simulated("a")
    world.up["a"] = False
    for name in ("r0", "r1"):
        world.add(name)
    world.unsendable.add("r0")
    world.start("a")
    world.finish()
    assert isinstance(world.ended["r0"], Internal)
    assert world.ended["r1"] is FinishReason.LENGTH


async def test_an_output_that_cannot_be_written_down_ends_its_request_alone() -> None:
    world = Simulated("a")
    for name in ("r0", "r1"):
        world.add(name, logprobs=0)

    class Unsliceable(Logprobs):
        def slice(self, start: int, stop: int) -> Logprobs:
            raise RuntimeError("no such positions")

        def __len__(self) -> int:
            return 5

    world.step("a")
    broken = EngineCoreOutput(request_id="r0", offset=0, new_token_ids=[1, 2], new_logprobs=Unsliceable())
    world.dispatch.take("a", "a", EngineCoreOutputs(outputs=[broken, world.advance("a", "r1")]))
    error = world.ended["r0"]
    assert isinstance(error, Internal)
    assert error.reason == "INCIDENT"
    assert "r0" not in world.running["a"]
    world.finish()
    assert world.ended["r1"] is FinishReason.LENGTH


async def test_a_request_that_engines_have_only_refused_goes_on_as_one_that_may_be_refused() -> None:
    world = Simulated("a", "b", "c")
    world.add("r0")
    world.refuse(world.where("r0"), "r0", FULL)
    busy = world.where("r0")
    world.closed.add(busy)
    world.running[busy].pop("r0")
    refusal = EngineCoreOutput(request_id="r0", attempt=1, finish_reason=FinishReason.ERROR, error=DRAINING)
    world.deliver(busy, refusal)
    assert [(r.attempt, r.never_admitted) for _, r in world.sent] == [(0, False), (1, True), (2, True)]


@pytest.mark.parametrize("event", ["lost", "drained", "step failed", "ended without an output"])
async def test_a_request_that_an_engine_had_taken_is_refused_by_no_other(event: str) -> None:
    world = Simulated("a", "b", "c")
    world.add("r0")
    world.refuse(world.where("r0"), "r0", FULL)
    taken = world.where("r0")
    match event:
        case "lost":
            world.kill(taken)
        case "drained":
            world.refuse(taken, "r0", DRAINING)
        case "step failed":
            world.refuse(taken, "r0", STEP_FAILED)
        case _:
            world.running[taken].clear()
            world.dispatch.take(taken, taken, EngineCoreOutputs(finished_requests=["r0"]))
    assert [(r.attempt, r.never_admitted) for _, r in world.sent] == [(0, False), (1, True), (2, False)]


async def at_ten_seconds_a_token(world: Simulated, request_id: str, **params: object) -> str:
    """Start a request, and let it get two of its five tokens. Returns its engine."""
    world.add(request_id, **params)
    engine = world.where(request_id)
    world.step(engine)
    await asyncio.sleep(10.0)
    world.step(engine)
    return engine


def test_a_request_that_a_draining_engine_will_not_be_done_with_leaves_at_once() -> None:
    async def run() -> None:
        world = Simulated("a", "b")
        engine = await at_ten_seconds_a_token(world, "r0")
        world.drain(engine, 30.0)  # the last engine is kept in reserve
        assert world.aborts == [(engine, "r0")]
        other, again = world.sent[-1]
        assert other != engine
        assert (again.attempt, again.prior_output_token_ids, again.never_admitted) == (1, world.read["r0"], False)
        world.finish()
        assert world.read["r0"] == [token_of("r0", i) for i in range(MAX_TOKENS)]

    virtual_time.run(run())


def test_a_request_that_a_draining_engine_will_be_done_with_stays() -> None:
    async def run() -> None:
        world = Simulated("a", "b")
        engine = await at_ten_seconds_a_token(world, "r0")
        world.drain(engine, 60.0)
        for _ in range(3):
            await asyncio.sleep(10.0)
            world.step(engine)
        assert world.ended["r0"] is FinishReason.LENGTH
        assert world.moves == []

    virtual_time.run(run())


def test_a_request_that_slows_down_on_a_draining_engine_leaves_before_the_deadline() -> None:
    async def run() -> None:
        world = Simulated("a", "b")
        engine = await at_ten_seconds_a_token(world, "r0")
        world.drain(engine, 40.0)
        await asyncio.sleep(25.0)
        assert world.where("r0") not in ("", engine)

    virtual_time.run(run())


def test_without_max_tokens_a_request_leaves_a_draining_engine_before_the_deadline() -> None:
    async def run() -> None:
        world = Simulated("a", "b")
        engine = await at_ten_seconds_a_token(world, "r0", max_tokens=None)
        world.drain(engine, 20.0)
        await asyncio.sleep(18.9)
        assert world.where("r0") == engine
        await asyncio.sleep(0.2)
        assert world.where("r0") not in ("", engine)

    virtual_time.run(run())


def test_requests_no_other_engine_accepts_stay_on_the_draining_engine() -> None:
    async def run() -> None:
        world = Simulated("a")
        await at_ten_seconds_a_token(world, "r0")
        world.drain("a", 20.0)
        await asyncio.sleep(25.0)
        assert world.where("r0") == "a"
        assert world.dispatch.num_held == 0

    virtual_time.run(run())


def test_a_restarted_engine_ignores_the_drain_of_its_previous_process() -> None:
    async def run() -> None:
        world = Simulated("a", "b")
        world.closed.add("b")
        world.drain("a", 20.0)
        world.kill("a")
        world.closed.clear()
        world.start("a")
        world.add("r0", rank=0)
        await asyncio.sleep(25.0)
        assert world.where("r0") == "a"

    virtual_time.run(run())


async def test_a_drain_fails_no_request_that_may_not_move_any_more() -> None:
    world = Simulated("a", "b", retries=RetriesConfig(max_moves=0))
    world.add("r0")
    engine = world.where("r0")
    world.drain(engine, 0.0)
    assert world.where("r0") == engine
    world.finish()
    assert world.ended["r0"] is FinishReason.LENGTH


INVALID = RequestError(code="INVALID_ARGUMENT", message="no")


def waiting(world: Simulated) -> dict[str, int]:
    """Return the frontend's count of waiting requests by engine."""
    return {engine: world.router.load(engine).waiting for engine in world.up}


@pytest.mark.parametrize("error", [INVALID, INCIDENT, STEP_FAILED], ids=lambda error: error.reason or error.code)
async def test_what_an_engine_refuses_without_a_word_on_its_load_is_not_waiting_there(error: RequestError) -> None:
    world = Simulated("a", "b")
    world.add("r0-0", "r0-1")
    where = world.where("r0-0")
    assert waiting(world)[where] == 2
    for request_id in ("r0-0", "r0-1"):
        while engine := world.where(request_id):
            world.refuse(engine, request_id, error, counts=False)
    assert waiting(world) == {"a": 0, "b": 0}


async def test_what_moves_because_its_engine_drains_waits_at_the_next_one_alone() -> None:
    world = Simulated("a", "b")
    world.add("r0")
    first = world.where("r0")
    world.closed.add(first)
    world.refuse(first, "r0", DRAINING, counts=False)
    assert waiting(world) == {first: 0, world.where("r0"): 1}


async def test_what_every_engine_is_too_full_for_waits_nowhere() -> None:
    world = Simulated("a", "b")
    world.add("r0")
    while engine := world.where("r0"):
        world.refuse(engine, "r0", FULL, counts=False)
    assert waiting(world) == {"a": 0, "b": 0}


async def test_what_its_client_gives_up_before_the_engine_has_counted_it_is_not_waiting() -> None:
    world = Simulated("a")
    world.add("r0")
    world.dispatch.abort(["r0"], "the client is gone")
    assert waiting(world) == {"a": 0}


async def test_requests_that_cannot_be_sent_do_not_count_as_waiting() -> None:
    world = Simulated("a")
    world.unsendable.add("r0")
    world.add("r0")
    assert waiting(world) == {"a": 0}


async def test_requests_that_end_without_output_do_not_count_as_waiting() -> None:
    world = Simulated("a")
    world.add("r0")
    world.closed.add("a")
    world.running["a"].clear()
    world.dispatch.take("a", "a", EngineCoreOutputs(finished_requests=["r0"]))
    assert waiting(world) == {"a": 0}


def logprobs_of(token_ids: Iterable[int]) -> Logprobs:
    logprobs = Logprobs()
    for token_id in token_ids:
        logprobs.add([token_id], [-float(token_id)], [1])
    return logprobs


async def test_log_probabilities_of_prompt_and_output_come_once_from_any_engine() -> None:
    world = Simulated("a", "b")
    world.add("r0", logprobs=0, prompt_logprobs=0)

    def send(offset: int, tokens: list[int], prompt: list[int] | None = None) -> None:
        [engine] = [engine for engine in "ab" if world.running[engine]]
        request, _ = world.running[engine]["r0"]
        frame = EngineCoreOutput(
            request_id="r0",
            attempt=request.attempt,
            offset=offset,
            new_token_ids=tokens,
            new_logprobs=logprobs_of(tokens) if tokens else None,
            new_prompt_logprobs=logprobs_of(prompt) if prompt else None,
            prefill_stats=PrefillStats(num_prompt_tokens=3, num_cached_tokens=request.attempt),
        )
        world.dispatch.take(engine, engine, EngineCoreOutputs(outputs=[frame]))

    def lose() -> None:
        [engine] = [engine for engine in "ab" if world.running[engine]]
        world.kill(engine)
        world.start(engine)

    send(0, [], [2])
    lose()
    assert world.sent[-1][1].sampling_params.prompt_logprobs == 0
    send(0, [10, 11], [2, 3])
    send(0, [10, 11], [2, 3])
    lose()
    assert world.sent[-1][1].sampling_params.prompt_logprobs is None
    send(1, [11, 12])
    got = [o for o in world.outputs if o.new_prompt_logprobs is not None]
    assert [list(o.new_prompt_logprobs.token_ids) for o in got if o.new_prompt_logprobs] == [[2], [3]]
    assert [list(o.new_logprobs.token_ids) for o in world.outputs if o.new_logprobs] == [[10, 11], [12]]
    assert [o.prefill_stats.num_cached_tokens for o in world.outputs if o.prefill_stats] == [0]


def tokens_of(request_id: str, start: int, stop: int) -> list[int]:
    return [token_of(request_id, index) for index in range(start, stop)]


async def test_tokens_in_columns_reach_their_requests() -> None:
    world = Simulated("a", "b")
    world.add("r0")
    world.add("r1")
    for request_id in ("r0", "r1"):
        engine, number = world.where(request_id), world.number_of(request_id)
        world.deliver_in_columns(engine, (number, 0, tokens_of(request_id, 0, 1)))
        world.deliver_in_columns(engine, (number, 1, tokens_of(request_id, 1, 3)))
        assert world.read[request_id] == tokens_of(request_id, 0, 3)


async def test_tokens_in_columns_that_came_before_are_cut_off() -> None:
    world = Simulated("a", "b")
    world.add("r0")
    engine, number = world.where("r0"), world.number_of("r0")
    world.deliver_in_columns(engine, (number, 0, tokens_of("r0", 0, 2)))
    world.deliver_in_columns(engine, (number, 0, tokens_of("r0", 0, 2)), (number, 1, tokens_of("r0", 1, 3)))
    assert world.read["r0"] == tokens_of("r0", 0, 3)


async def test_a_gap_in_columns_is_an_engines_fault_and_what_stands_before_it_counts() -> None:
    world = Simulated("a", "b")
    world.add("r0")
    world.add("r1", rank="ab".index(world.where("r0")))
    rows = [(world.number_of("r0"), 0, tokens_of("r0", 0, 1)), (world.number_of("r1"), 1, tokens_of("r1", 1, 2))]
    with pytest.raises(EngineFaultError, match="r1 continues at token 1, expected 0"):
        world.deliver_in_columns(world.where("r0"), *rows)
    assert world.read["r0"] == tokens_of("r0", 0, 1)


async def test_every_attempt_has_a_number_of_its_own_and_old_ones_mean_nothing() -> None:
    world = Simulated("a", "b")
    world.add("r0")
    first, number = world.where("r0"), world.number_of("r0")
    world.deliver_in_columns(first, (number, 0, tokens_of("r0", 0, 1)))
    world.kill(first)
    second = world.where("r0")
    assert world.number_of("r0") not in (0, number)
    for engine in (first, second):
        world.deliver_in_columns(engine, (number, 1, [999]))
    world.deliver_in_columns(first, (world.number_of("r0"), 1, [999]))
    world.deliver_in_columns(second, (world.number_of("r0"), 1, tokens_of("r0", 1, 2)))
    assert world.read["r0"] == tokens_of("r0", 0, 2)


async def test_numbers_of_ended_requests_mean_nothing() -> None:
    world = Simulated("a", "b")
    world.add("r0")
    engine, number = world.where("r0"), world.number_of("r0")
    world.dispatch.abort(["r0"], "done")
    world.deliver_in_columns(engine, (number, 0, [1]), (7_000_000, 0, [1]))
    assert "r0" not in world.read


async def test_what_cannot_be_written_down_of_columns_ends_its_request_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = Simulated("a", "b")
    world.add("r0")
    world.add("r1", rank="ab".index(world.where("r0")))
    take = JournalEntry.take_tokens

    def fails(entry: JournalEntry, offset: int, token_ids: list[int]) -> list[int]:
        if entry.request_id == "r0":
            raise ValueError("a defect")
        return take(entry, offset, token_ids)

    monkeypatch.setattr(JournalEntry, "take_tokens", fails)
    rows = [(world.number_of(i), 0, tokens_of(i, 0, 1)) for i in ("r0", "r1")]
    world.deliver_in_columns(world.where("r0"), *rows)
    assert isinstance(world.ended["r0"], RequestFailed)
    assert world.ended["r0"].reason == "INCIDENT"
    assert world.read["r1"] == tokens_of("r1", 0, 1)


def two_kinds(*names: str, prefill: str = "a") -> Simulated:
    """Return engines with the same fingerprint, of which one computes prompts."""
    world = Simulated(*names)
    world.roles, world.fingerprint = {prefill: EngineRole.PREFILL}, FINGERPRINT
    return world


async def test_a_request_goes_in_two_legs_which_is_no_move() -> None:
    world = two_kinds("a", "b")
    world.add("r0")
    assert world.sent[-1][0] == "a"
    assert world.sent[-1][1].handoff_after_tokens == 1
    world.step("a")
    engine, second = world.sent[-1]
    assert (engine, second.attempt, second.prior_output_token_ids) == ("b", 1, [token_of("r0", 0)])
    assert (second.kv_source, second.handoff_after_tokens) == (source_at("a"), 0)
    assert not second.never_admitted
    assert world.gaps == []
    world.finish()
    assert world.ended == {"r0": FinishReason.LENGTH}
    assert world.read["r0"] == [token_of("r0", i) for i in range(MAX_TOKENS)]
    assert (world.num_moved, world.moves, world.planned, len(world.gaps)) == (0, ["r0"], [("two", "long")], 1)


async def test_handoffs_count_as_neither_moves_nor_losses() -> None:
    world = Simulated("a", "b", retries=RetriesConfig(max_moves=0, max_strikes=1))
    world.roles, world.fingerprint = {"a": EngineRole.PREFILL}, FINGERPRINT
    world.add("r0")
    world.step("a")
    world.finish()
    assert world.ended == {"r0": FinishReason.LENGTH}


async def test_the_source_is_told_until_an_engine_has_brought_something() -> None:
    world = two_kinds("a", "b", "c", "d")
    world.add("r0")
    world.step("a")
    assert world.sent[-1][1].kv_source == source_at("a")
    world.kill(world.where("r0"))
    engine, request = world.sent[-1]
    assert request.kv_source == source_at("a")
    world.step(engine)
    world.kill(engine)
    assert world.sent[-1][1].kv_source is None
    assert world.num_moved == 2


async def test_a_handoff_without_a_source_resumes_but_not_on_a_prefill_engine() -> None:
    world = two_kinds("a", "b")
    world.add("r0")
    world.advance("a", "r0", 0)
    world.give_away("a", "r0")
    engine, request = world.sent[-1]
    assert (engine, request.kv_source, request.handoff_after_tokens) == ("b", None, 0)


@pytest.mark.parametrize(
    ("params", "why"),
    [({"max_tokens": 1}, "one_token"), ({"prompt_logprobs": 0}, "kind"), ({}, "long")],
)
async def test_requests_without_gain_take_one_leg(params: dict[str, int], why: str) -> None:
    world = two_kinds("a", "b")
    world.add("r0", **params)
    planned = "two" if why == "long" else "one"
    assert world.planned == [(planned, why)]
    assert world.where("r0") == ("a" if planned == "two" else "b")


async def test_without_another_engine_that_can_have_its_blocks_a_request_goes_in_one_leg() -> None:
    world = two_kinds("a", "b")
    world.fingerprint = b""
    world.add("r0")
    assert (world.planned, world.where("r0")) == ([("one", "no_engines")], "b")


async def test_alone_an_engine_of_prompts_serves_everything() -> None:
    world = two_kinds("a", "b")
    world.closed.add("b")
    world.add("r0")
    assert (world.where("r0"), world.sent[-1][1].handoff_after_tokens) == ("a", 0)
    world.step("a", MAX_TOKENS)
    assert world.ended == {"r0": FinishReason.LENGTH}


async def test_where_no_other_engine_is_left_the_engine_of_prompts_goes_on() -> None:
    world = two_kinds("a", "b")
    world.add("r0")
    world.kill("b")
    world.step("a")
    engine, request = world.sent[-1]
    assert (engine, request.attempt, request.handoff_after_tokens) == ("a", 1, 0)
    world.finish()
    assert world.ended == {"r0": FinishReason.LENGTH}


async def test_a_request_that_names_a_rank_goes_there_in_one_leg() -> None:
    world = two_kinds("a", "b")
    world.add("r0", rank=1)
    assert (world.where("r0"), world.planned) == ("b", [])
    world.add("r1", rank=0)
    assert world.sent[-1][1].handoff_after_tokens == 0


async def test_the_sequences_of_a_call_go_on_together() -> None:
    world = two_kinds("a", "b", "c", "d")
    names = [f"r0-{i}" for i in range(3)]
    world.add(*names)
    world.step("a")
    assert len({world.where(name) for name in names}) == 1
    assert world.where(names[0]) != "a"
    world.finish()
    assert set(world.ended.values()) == {FinishReason.LENGTH}


def hand_over_one_by_one(world: Simulated, *names: str) -> list[str]:
    """Hand requests over, in a frame with one token each. Returns their new engines."""
    for name in names:
        world.deliver("a", world.advance("a", name))
    return [world.where(name) for name in names]


async def test_the_sequences_of_a_call_go_on_together_also_when_they_come_one_by_one() -> None:
    world = two_kinds("a", "b", "c", "d")
    names, other = [f"r0-{i}" for i in range(3)], [f"r1-{i}" for i in range(2)]
    world.add(*names)
    [where] = set(hand_over_one_by_one(world, *names))
    world.add(*other)
    [elsewhere] = set(hand_over_one_by_one(world, *other))
    assert len({"a", where, elsewhere}) == 3  # another call goes to the engine with the lowest load
    world.finish()
    assert set(world.ended.values()) == {FinishReason.LENGTH}


@pytest.mark.parametrize("how", ["lost", "draining", "full", "other blocks"])
async def test_sequences_of_a_call_move_together_when_their_engine_takes_no_more(how: str) -> None:
    world = two_kinds("a", "b", "c", "d")
    names = [f"r0-{i}" for i in range(4)]
    world.add(*names)
    [first] = hand_over_one_by_one(world, names[0])
    match how:
        case "lost":
            world.kill(first)
        case "draining":
            world.closed.add(first)
        case "full":
            assert hand_over_one_by_one(world, names[1]) == [first]
            world.refuse(first, names[1], FULL)
        case _:
            world.variants["a"], world.variants[first] = "", "another"
    begun = names[2 if how == "full" else 1 :]
    [then] = set(hand_over_one_by_one(world, *begun))
    assert then not in ("a", first)


async def test_an_engine_that_leaves_its_group_is_where_the_blocks_of_its_requests_are() -> None:
    world = Simulated("a", "b", "c")
    world.add("r0")
    first = world.where("r0")
    world.step(first)
    left = RequestError(code="UNAVAILABLE", message="the rank has left its group", reason="LEFT_GROUP")
    world.closed.add(first)
    world.refuse(first, "r0", left, source=source_at(first))
    engine, request = world.sent[-1]
    assert (engine != first, request.kv_source, world.num_moved) == (True, source_at(first), 1)
    world.step(engine)
    world.kill(engine)
    assert world.sent[-1][1].kv_source is None
    world.finish()
    assert world.ended == {"r0": FinishReason.LENGTH}


async def test_a_request_that_is_given_away_unasked_has_moved() -> None:
    world = Simulated("a", "b", retries=RetriesConfig(max_moves=1, max_strikes=100))
    world.add("r0")
    world.give_away(world.where("r0"), "r0", source=source_at("a"))
    assert (world.num_moved, world.sent[-1][1].kv_source) == (1, None)
    world.give_away(world.where("r0"), "r0")
    error = world.ended["r0"]
    assert isinstance(error, Unavailable)
    assert error.reason == "RETRIES_EXHAUSTED"


async def test_a_stop_that_comes_with_a_handoff_ends_the_request() -> None:
    world = two_kinds("a", "b")
    world.add("r0")
    output = world.advance("a", "r0")
    process = world.process

    def stopped(outputs: Sequence[EngineCoreOutput], *rest: object) -> list[str]:
        process(outputs, *rest)  # type: ignore[arg-type]
        return [o.request_id for o in outputs]

    world.process = stopped  # type: ignore[assignment,method-assign]
    world.deliver("a", output)
    assert [engine for engine, _ in world.sent] == ["a"]
    assert world.dispatch.num_on("b") == 0


def test_an_engine_that_drains_hands_over_a_few_at_a_time() -> None:
    async def run() -> None:
        world = Simulated("a", "b")
        world.fingerprint = FINGERPRINT
        world.closed.add("b")
        names = [f"r{i}" for i in range(20)]
        for name in names:
            world.add(name)
        world.closed.clear()
        world.drain("a", 30.0)
        given: list[str] = []
        while world.running["a"]:
            asked = [name for _, name in world.asked]
            given += asked
            assert len(asked) <= MOST_AT_ONCE
            assert len(given) - len([name for name in given if world.read.get(name)]) <= MOST_AT_ONCE
            world.give_what_was_asked_for()
            assert not world.asked  # no engine has resumed these yet
            world.step("b")
        assert given == names
        assert (world.num_moved, world.aborts) == (0, [])
        assert all(request.kv_source == source_at("a") for engine, request in world.sent if engine == "b")
        world.finish()
        assert set(world.ended.values()) == {FinishReason.LENGTH}

    virtual_time.run(run())


def test_what_is_not_handed_over_in_time_leaves_as_it_always_did() -> None:
    async def run() -> None:
        world = Simulated("a", "b")
        world.fingerprint = FINGERPRINT
        world.closed.add("b")
        names = [f"r{i}" for i in range(10)]
        for name in names:
            world.add(name)
        world.closed.clear()
        world.drain("a", 30.0)
        await asyncio.sleep(28.0)
        assert (len(world.asked), world.aborts) == (MOST_AT_ONCE, [])
        await asyncio.sleep(1.5)
        assert [name for _, name in world.aborts] == names
        assert world.num_moved == 10
        world.kill("a")
        world.finish()
        assert set(world.ended.values()) == {FinishReason.LENGTH}

    virtual_time.run(run())


def test_an_engine_whose_blocks_nobody_can_have_drains_as_it_always_did() -> None:
    async def run() -> None:
        world = Simulated("a", "b")
        world.closed.add("b")
        world.add("r0")
        world.closed.clear()
        world.drain("a", 30.0)
        await asyncio.sleep(29.5)
        assert world.asked == []
        assert world.aborts == [("a", "r0")]

    virtual_time.run(run())
