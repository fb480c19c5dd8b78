"""The router picks the least loaded engine, equal ones in turn, and never one that accepts no requests."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_common.errors import InvalidArgument, Unavailable
from penstock_common.types.request import EngineCoreRequest
from penstock_frontend.dispatch.router import Candidate, Load, Router, takers
from tests.fakes.systems.media_session import item

ENGINES = [Candidate(f"e{i}", i) for i in range(4)]


def send(router: Router, engines: list[Candidate], *request_ids: str) -> str:
    """Pick one engine, and send the requests to it. Returns the engine."""
    chosen = router.pick(engines)
    for request_id in request_ids:
        router.sent(chosen, request_id)
    return chosen


def test_idle_engines_are_taken_in_turn() -> None:
    router = Router()
    assert Counter(router.pick(ENGINES) for _ in range(40)) == {e.key: 10 for e in ENGINES}


def test_two_frontends_start_at_different_engines() -> None:
    assert len({Router(start).pick(ENGINES) for start in range(4)}) == 4


def test_the_least_loaded_engine_is_picked_until_the_others_are_no_worse() -> None:
    router = Router()
    router.report("e0", waiting=0, running=0, kv_cache_usage=0.0)
    router.report("e1", waiting=0, running=12, kv_cache_usage=0.0)
    assert [send(router, ENGINES[:2], f"r{i}") for i in range(3)] == ["e0", "e0", "e0"]
    assert "e1" in [send(router, ENGINES[:2], f"s{i}") for i in range(2)]


def test_waiting_requests_weigh_four_times_running_ones() -> None:
    assert Load(waiting=2, running=0).score == Load(waiting=0, running=8).score


def test_requests_that_belong_together_all_count() -> None:
    router = Router()
    chosen = send(router, ENGINES[:2], *(f"r{i}" for i in range(8)))
    assert router.load(chosen).waiting == 8
    assert {send(router, ENGINES[:2], f"s{i}") for i in range(8)} == {e.key for e in ENGINES[:2]} - {chosen}


def test_kv_usage_counts_beyond_one_half_only() -> None:
    assert Load(kv_cache_usage=0.5).score == Load(kv_cache_usage=0.1).score
    assert Load(kv_cache_usage=0.9).score > Load(kv_cache_usage=0.7).score > Load(kv_cache_usage=0.5).score


def test_embeddings_to_compute_count_as_prompt_tokens_do_until_others_are_told() -> None:
    router = Router()
    for engine in ENGINES[1:]:
        router.report(engine.key, waiting=0, running=4, kv_cache_usage=0.0)
    router.report("e0", waiting=0, running=0, kv_cache_usage=0.0, pending_embeds=128 * 5)
    assert router.pick(ENGINES) != "e0"
    router.report("e0", waiting=0, running=0, kv_cache_usage=0.0)
    assert router.load("e0").pending_embeds == 128 * 5
    router.report("e0", waiting=0, running=0, kv_cache_usage=0.0, pending_embeds=128 * 3)
    assert router.pick(ENGINES) == "e0"


def test_requests_with_media_go_to_engines_that_take_them() -> None:
    engines = [Candidate("e0", 0), Candidate("e1", 1, modalities=("image",))]
    images = EngineCoreRequest(request_id="r", prompt_token_ids=[1], mm_features=[item("a", 1)])
    assert [c.key for c in takers(engines, images)] == ["e1"]
    text = EngineCoreRequest(request_id="r", prompt_token_ids=[1])
    assert [c.key for c in takers(engines, text)] == ["e0", "e1"]


def test_a_report_replaces_what_was_sent_since_the_last() -> None:
    router = Router()
    send(router, ENGINES[:1], "r0")
    router.report("e0", waiting=0, running=1, kv_cache_usage=0.0)
    assert router.load("e0") == Load(0, 1, 0.0)


def test_what_leaves_before_a_report_has_counted_it_counts_no_longer() -> None:
    router = Router()
    send(router, ENGINES[:1], "r0", "r1")
    router.left("e0", "r0")
    assert router.load("e0") == Load(1, 0, 0.0)


def test_what_a_report_has_counted_is_taken_back_by_the_next_report_alone() -> None:
    router = Router()
    send(router, ENGINES[:1], "r0")
    router.report("e0", waiting=1, running=0, kv_cache_usage=0.0)
    router.left("e0", "r0")
    assert router.load("e0") == Load(1, 0, 0.0)


def test_nothing_is_taken_back_of_an_engine_that_is_another_one_now() -> None:
    router = Router()
    send(router, ENGINES[:1], "r0")
    router.forget("e0")
    send(router, ENGINES[:1], "r1")
    router.left("e0", "r0")
    assert router.load("e0") == Load(1, 0, 0.0)


def test_an_engine_that_takes_nothing_is_passed_over() -> None:
    engines = [Candidate("e0", 0, accepting=False), Candidate("e1", 1)]
    router = Router()
    router.report("e1", waiting=100, running=100, kv_cache_usage=1.0)
    assert {router.pick(engines) for _ in range(5)} == {"e1"}


def test_an_explicit_rank_wins_over_load() -> None:
    router = Router()
    router.report("e2", waiting=50, running=50, kv_cache_usage=0.9)
    assert router.pick(ENGINES, rank=2) == "e2"


def test_a_rank_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(InvalidArgument, match="is 9, but no engine has this rank; known ranks: 0, 1, 2, 3") as e:
        Router().pick(ENGINES, rank=9)
    assert e.value.field == "routing.data_parallel_rank"


def test_an_engine_without_a_rank_serves_all_but_those_who_name_one() -> None:
    engines = [Candidate("e0", None), Candidate("e1", 0)]
    router = Router()
    assert {router.pick(engines) for _ in range(4)} == {"e0", "e1"}
    assert {router.pick(engines, rank=0) for _ in range(4)} == {"e1"}
    with pytest.raises(InvalidArgument, match="known ranks: 0$"):
        router.pick(engines, rank=1)


def test_a_rank_that_takes_nothing_is_unavailable() -> None:
    with pytest.raises(Unavailable, match="rank 0"):
        Router().pick([Candidate("e0", 0, accepting=False), Candidate("e1", 1)], rank=0)


VARIANTS = [Candidate(f"e{i}", i, variant="new" if i else "old") for i in range(4)]


def test_a_request_stays_with_its_variant_however_loaded_that_is() -> None:
    router = Router()
    router.report("e0", waiting=100, running=100, kv_cache_usage=1.0)
    assert {router.pick(VARIANTS, variant="old") for _ in range(5)} == {"e0"}
    assert {router.pick(VARIANTS, variant="new") for _ in range(9)} == {"e1", "e2", "e3"}


def test_a_request_whose_variant_takes_nothing_goes_to_another() -> None:
    engines = [Candidate("e0", 0, accepting=False, variant="old"), *VARIANTS[1:]]
    assert Router().pick(engines, variant="old") in ("e1", "e2", "e3")


def test_new_requests_go_to_all_variants() -> None:
    router = Router()
    assert {router.pick(VARIANTS) for _ in range(4)} == {"e0", "e1", "e2", "e3"}


def test_without_engines_the_request_is_unavailable() -> None:
    with pytest.raises(Unavailable):
        Router().pick([])


@given(loads=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 50), st.floats(0, 1)), min_size=4, max_size=4))
def test_the_pick_always_has_the_lowest_score(loads: list[tuple[int, int, float]]) -> None:
    router = Router()
    for engine, (waiting, running, usage) in zip(ENGINES, loads, strict=True):
        router.report(engine.key, waiting=waiting, running=running, kv_cache_usage=usage)
    scores = {engine.key: router.load(engine.key).score for engine in ENGINES}
    assert scores[router.pick(ENGINES)] == min(scores.values())


MANY = [Candidate(f"e{i:03}", i) for i in range(200)]


def test_the_engine_that_has_the_prompt_is_picked_among_equals() -> None:
    router = Router()
    assert {router.pick(ENGINES, cached={"e2": 64, "e1": 16}) for _ in range(8)} == {"e2"}


def test_a_cached_prompt_outweighs_waiting_requests_with_equal_compute_time() -> None:
    router = Router()
    router.report("e0", waiting=2, running=0, kv_cache_usage=0.0)
    assert {router.pick(ENGINES[:2], cached={"e0": 1023}) for _ in range(4)} == {"e1"}
    assert {router.pick(ENGINES[:2], cached={"e0": 1025}) for _ in range(4)} == {"e0"}
    assert {router.pick(ENGINES[:2], cached={"e0": 1024}) for _ in range(4)} == {"e0", "e1"}


def test_the_named_rank_wins_over_what_is_cached() -> None:
    assert Router().pick(ENGINES, rank=3, cached={"e0": 100_000}) == "e3"


def test_an_engine_that_takes_nothing_is_not_picked_for_what_it_has_cached() -> None:
    engines = [Candidate("e0", 0, accepting=False), Candidate("e1", 1)]
    assert Router().pick(engines, cached={"e0": 100_000}) == "e1"


def test_the_least_loaded_policy_does_not_look_at_what_is_cached() -> None:
    router = Router(policy="least_loaded")
    router.report("e0", waiting=0, running=1, kv_cache_usage=0.0)
    assert {router.pick(ENGINES[:2], cached={"e0": 100_000}) for _ in range(4)} == {"e1"}


def test_round_robin_looks_at_nothing() -> None:
    router = Router(policy="round_robin")
    router.report("e0", waiting=50, running=50, kv_cache_usage=1.0)
    assert Counter(router.pick(ENGINES, cached={"e1": 100_000}) for _ in range(40)) == {e.key: 10 for e in ENGINES}


def test_of_many_engines_those_with_most_of_the_prompt_are_always_compared() -> None:
    router = Router()
    cached = {engine.key: 256 for engine in MANY[:100]} | {"e150": 512}
    assert {router.pick(MANY, cached=cached) for _ in range(50)} == {"e150"}


def test_of_many_engines_a_random_few_are_compared() -> None:
    router = Router()
    for engine in MANY[1:]:
        router.report(engine.key, waiting=0, running=1, kv_cache_usage=0.0)
    picked = Counter(router.pick(MANY) for _ in range(200))
    assert 1 <= picked["e000"] < 60, "it is compared in one of twelve, and chosen then"
    assert len(picked) > 50
