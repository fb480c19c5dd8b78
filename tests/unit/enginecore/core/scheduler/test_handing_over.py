"""Handoffs of requests to other engines: after how many tokens, on request, and the leases on their blocks."""

import msgspec
import pytest

from penstock_common.errors import InvalidArgument
from penstock_common.types.kv_transfer import KvParams, KvSource
from penstock_common.types.outputs import FinishReason, RequestError
from penstock_common.types.request import PoolingParams, RequestContext
from penstock_common.types.sampling import StructuredOutput
from penstock_enginecore.config import SpeculativeConfig
from penstock_enginecore.kv_transfer.core.validation import check_kv_transfer
from tests.fakes.engines.engine_harness import (
    CLIENT,
    FakeClock,
    Transcript,
    add,
    assert_as_expected,
    assert_nothing_left,
    expected_output,
    make_engine,
    make_request,
    run_to_end,
    step,
)
from tests.fakes.engines.fake_executor import FakeExecutor
from tests.fakes.engines.fake_grammars import FakeGrammars
from tests.fakes.engines.fake_leases import FakeLeases

NGRAM = SpeculativeConfig(method="ngram", num_speculative_tokens=3, adaptive=False)
KINDS = {
    "plain": {},
    "runs ahead": {"async_scheduling": True},
    "drafts": {"speculative": NGRAM},
    "small steps": {"max_num_batched_tokens": 8},
}
PARAMS = {
    "length": {"max_tokens": 9},
    "repetitive": {"max_tokens": 9, "min_tokens": 9},
    "constraint": {"max_tokens": 20, "structured_output": StructuredOutput(regex="even:5")},
}
SOURCE = KvSource(
    engine_id="a", incarnation="1", address="h:1", lease_id=b"l" * 16, num_tokens=4, fingerprint=b"f" * 16
)


def engine_of(kind, **config):
    return make_engine(
        FakeExecutor(block_size=4, eos_token_ids=frozenset({999})),
        None,
        FakeGrammars(1000, 999),
        **KINDS[kind],
        **config,
    )


def first_leg(request, count):
    return msgspec.structs.replace(request, handoff_after_tokens=count)


def second_leg(request, tokens):
    return msgspec.structs.replace(request, attempt=request.attempt + 1, prior_output_token_ids=tokens)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("params", PARAMS)
def test_two_legs_give_what_one_gives_wherever_they_are_cut(kind, params):
    whole = make_request(14, **PARAMS[params])
    tokens, reason = expected_output(whole, max_model_len=1000, eos=frozenset({999}))
    for count in range(1, len(tokens) + 2):
        source, destination = engine_of(kind), engine_of(kind)
        transcript = run_to_end(source, first_leg(whole, count))
        got, end = transcript.tokens[whole.request_id], transcript.ends[whole.request_id]
        assert got == tokens[:count]
        assert_nothing_left(source)
        if count >= len(tokens):
            assert end.finish_reason is reason
            continue
        assert (end.finish_reason, end.error, end.kv_source) == (FinishReason.HANDOFF, None, None)
        rest = second_leg(whole, got)
        assert_as_expected(destination, run_to_end(destination, rest), rest)


def test_a_stop_goes_before_a_handoff():
    tokens, _ = expected_output(make_request(max_tokens=9), max_model_len=1000)
    engine = make_engine()
    request = first_leg(make_request(max_tokens=9, stop_token_ids=(tokens[2],)), 3)
    assert run_to_end(engine, request).reason(request.request_id) is FinishReason.STOP


def test_a_later_leg_counts_its_own_tokens_alone():
    tokens, _ = expected_output(make_request(max_tokens=9), max_model_len=1000)
    engine = make_engine()
    request = first_leg(second_leg(make_request(max_tokens=9), tokens[:4]), 2)
    transcript = run_to_end(engine, request)
    assert transcript.tokens[request.request_id] == tokens[4:6]
    assert transcript.reason(request.request_id) is FinishReason.HANDOFF


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_asked_for_is_given_away_wherever_it_is(kind):
    engine = engine_of(kind, max_num_seqs=1)
    running, waiting, other = (make_request(5, max_tokens=30) for _ in range(3))
    transcript = Transcript()
    add(engine, running, waiting, other)
    for _ in range(4):
        step(engine, transcript)
    asked = [running.request_id, waiting.request_id, "unknown"]
    engine.scheduler.abort_requests("somebody else", asked, hand_over=True)
    engine.scheduler.abort_requests(CLIENT, asked, hand_over=True)
    engine.scheduler.abort_requests(CLIENT, asked, hand_over=True)
    run_to_end(engine, transcript=transcript)
    assert [transcript.reason(r.request_id) for r in (running, waiting)] == [FinishReason.HANDOFF] * 2
    assert transcript.reason(other.request_id) is FinishReason.LENGTH
    assert_nothing_left(engine)
    for request in (running, waiting):
        rest = second_leg(request, transcript.tokens[request.request_id])
        destination = engine_of(kind)
        assert_as_expected(destination, run_to_end(destination, rest), rest)


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_kept_from_a_handoff_to_the_end_of_the_lease(kind):
    clock = FakeClock()
    engine = engine_of(kind)
    leases = FakeLeases(engine, clock)
    request = first_leg(make_request(14, max_tokens=9), 3)
    transcript = run_to_end(engine, request)
    source = transcript.ends[request.request_id].kv_source
    assert source.num_tokens == 16
    pool = engine.scheduler.kv_cache.pool
    assert pool.num_usable_blocks - pool.num_free_blocks == 4
    assert (bool(engine.leases), engine.time_to_next_deadline()) == (True, 5.0)
    clock.now += 4.9
    engine.leases.expire()
    assert engine.leases
    clock.now += 0.1
    engine.leases.expire()
    assert not engine.leases
    assert not leases.blocks
    assert_nothing_left(engine)


def test_blocks_of_a_request_that_is_taken_back_are_kept_too():
    engine = make_engine()
    leases = FakeLeases(engine, FakeClock())
    running, waiting = make_request(14, max_tokens=30), make_request(14, max_tokens=30)
    transcript = Transcript()
    add(engine, running)
    for _ in range(4):
        step(engine, transcript)
    add(engine, waiting)
    engine.scheduler.abort_requests(CLIENT, [running.request_id, waiting.request_id], hand_over=True)
    run_to_end(engine, transcript=transcript)
    assert transcript.ends[running.request_id].kv_source.num_tokens == 16
    assert transcript.ends[waiting.request_id].kv_source is None
    engine.leases.revoke_all()
    assert not leases.blocks
    assert_nothing_left(engine)


@pytest.mark.parametrize("keep_blocks", [True, False])
def test_an_engine_that_ends_all_requests_keeps_their_blocks_if_configured(keep_blocks):
    engine = make_engine()
    leases = FakeLeases(engine, FakeClock())
    running, waiting = make_request(14, max_tokens=30), make_request(14, max_tokens=30)
    transcript = Transcript()
    add(engine, running)
    for _ in range(4):
        step(engine, transcript)
    add(engine, waiting)
    error = RequestError(code="UNAVAILABLE", message="it leaves", reason="LEFT_GROUP")
    engine.scheduler.abort_all(error, keep_blocks=keep_blocks)
    run_to_end(engine, transcript=transcript)
    end = transcript.ends[running.request_id]
    assert (end.finish_reason, end.error) == (FinishReason.ABORT, error)
    assert (end.kv_source is not None and end.kv_source.num_tokens == 16) == keep_blocks
    assert transcript.ends[waiting.request_id].kv_source is None
    engine.leases.revoke_all()
    assert not leases.blocks
    assert_nothing_left(engine)


def test_a_lease_that_is_refused_leaves_nothing_behind():
    engine = make_engine()
    FakeLeases(engine, FakeClock()).refuses = True
    request = first_leg(make_request(14), 2)
    transcript = run_to_end(engine, request)
    end = transcript.ends[request.request_id]
    assert (end.finish_reason, end.kv_source) == (FinishReason.HANDOFF, None)
    assert_nothing_left(engine)


def test_blocks_are_kept_after_an_end_on_request_and_never_after_an_abort():
    engine = make_engine()
    leases = FakeLeases(engine, FakeClock())
    asking, plain, aborted = (
        msgspec.structs.replace(make_request(14, max_tokens=4), context=RequestContext(kv=KvParams(lease=lease)))
        for lease in (True, False, True)
    )
    transcript = Transcript()
    add(engine, asking, plain, aborted)
    step(engine, transcript)
    engine.scheduler.abort_requests(CLIENT, [aborted.request_id])
    run_to_end(engine, transcript=transcript)
    sources = {name: end.kv_source for name, end in transcript.ends.items()}
    assert sources.pop(asking.request_id).num_tokens == 16
    assert set(sources.values()) == {None}
    assert transcript.reason(asking.request_id) is FinishReason.LENGTH
    assert len(leases) == 1


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"lease_id": b"short"}, "lease_id"),
        ({"fingerprint": b""}, "fingerprint"),
        ({"address": "nowhere"}, "address"),
        ({"engine_id": ""}, "engine_id"),
        ({"incarnation": "x" * 257}, "incarnation"),
    ],
)
def test_a_source_that_is_none_is_refused_by_name(change, field):
    source = msgspec.structs.replace(SOURCE, **change)
    with pytest.raises(InvalidArgument) as refused:
        check_kv_transfer(msgspec.structs.replace(make_request(), kv_source=source))
    assert refused.value.field == f"kv_source.{field}"


def test_a_source_is_taken_and_nothing_to_pool_is_handed_over():
    check_kv_transfer(msgspec.structs.replace(make_request(), kv_source=SOURCE))
    pooled = msgspec.structs.replace(make_request(), pooling_params=PoolingParams(task="embed"))
    leased = {"context": RequestContext(kv=KvParams(lease=True))}
    for name, fields in (("handoff_after_tokens", {"handoff_after_tokens": 1}), ("lease_kv", leased)):
        with pytest.raises(InvalidArgument) as refused:
            check_kv_transfer(msgspec.structs.replace(pooled, **fields))
        assert refused.value.field == name
