"""Requests that take two legs, and the engines of each leg."""

from typing import Any

import msgspec
import pytest

from penstock_common.types.kv_transfer import EngineRole, KvParams, KvSource
from penstock_common.types.request import EngineCoreRequest, PoolingParams, PoolingTask, RequestContext
from penstock_common.types.sampling import SamplingParams
from penstock_frontend.config import DisaggregationConfig
from penstock_frontend.dispatch.disaggregation import Legs
from penstock_frontend.dispatch.journal import Call, JournalEntry
from penstock_frontend.dispatch.router import Candidate, Router

LONG = 100
PREFILL, DECODE, BOTH = EngineRole.PREFILL, EngineRole.DECODE, EngineRole.BOTH


def engine(key: str, role: EngineRole = BOTH, *, accepting: bool = True, blocks: bytes = b"f" * 16) -> Candidate:
    return Candidate(key, None, accepting, role=role, fingerprint=blocks)


def entry_of(num_tokens: int = LONG, *, prior: int = 0, **fields: Any) -> JournalEntry:
    request = EngineCoreRequest(
        request_id="r",
        prompt_token_ids=[1] * num_tokens,
        prior_output_token_ids=[2] * prior,
        **{"sampling_params": SamplingParams(max_tokens=50)} | fields,
    )
    return JournalEntry(request, Call())


class Rig:
    def __init__(self, *engines: Candidate, overflow: bool = True) -> None:
        self.engines = engines
        self.router = Router()
        self.said: list[tuple[str, str]] = []
        self.legs = Legs(
            DisaggregationConfig(min_prefill_tokens=LONG, overflow=overflow),
            self.router,
            lambda *plan: self.said.append(plan),
        )

    def plan(self, entry: JournalEntry, **cached: int) -> tuple[str, int]:
        """Return the keys of the engines, and the number of tokens after which the first one hands over."""
        found = self.legs.plan(entry, self.engines, cached)
        return "".join(c.key for c in found.candidates), found.handoff_after_tokens


def test_without_engines_of_prompts_nothing_is_planned() -> None:
    rig = Rig(engine("a"), engine("b", DECODE))
    assert rig.plan(entry_of()) == ("ab", 0)
    assert rig.said == []


def test_long_prompts_take_two_legs_and_short_ones_avoid_prefill_engines() -> None:
    rig = Rig(engine("p", PREFILL), engine("q", PREFILL), engine("d", DECODE), engine("b"))
    assert rig.plan(entry_of()) == ("pq", 1)
    assert rig.plan(entry_of(LONG - 1)) == ("db", 0)
    assert rig.said == [("two", "long"), ("one", "short")]


def test_output_so_far_counts_as_what_must_be_computed() -> None:
    rig = Rig(engine("p", PREFILL), engine("d", DECODE))
    assert rig.plan(entry_of(LONG - 10, prior=10)) == ("p", 1)


def test_tokens_cached_on_the_likely_engine_count_as_computed() -> None:
    rig = Rig(engine("p", PREFILL), engine("d", DECODE), engine("e", DECODE))
    assert rig.plan(entry_of(), d=1) == ("de", 0)
    assert rig.said == [("one", "cached")]
    rig.router.report("d", waiting=50, running=0, kv_cache_usage=0.0)
    assert rig.plan(entry_of(), d=1) == ("p", 1)


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        (entry_of(sampling_params=SamplingParams(max_tokens=1)), "one_token"),
        (entry_of(prior=49), "one_token"),
        (entry_of(sampling_params=SamplingParams(max_tokens=5, prompt_logprobs=0)), "kind"),
        (entry_of(pooling_params=PoolingParams(task=PoolingTask.EMBED)), "kind"),
    ],
)
def test_some_requests_go_in_one_leg_however_long(entry: JournalEntry, why: str) -> None:
    rig = Rig(engine("p", PREFILL), engine("d", DECODE))
    assert rig.plan(entry) == ("d", 0)
    assert rig.said == [("one", why)]


@pytest.mark.parametrize(
    "engines",
    [
        (engine("p", PREFILL, accepting=False), engine("d", DECODE)),
        (engine("p", PREFILL, blocks=b"g" * 16), engine("d", DECODE)),
        (engine("p", PREFILL, blocks=b""), engine("d", DECODE, blocks=b"")),
    ],
)
def test_two_legs_need_two_engines_that_can_have_each_others_blocks(engines: tuple[Candidate, ...]) -> None:
    rig = Rig(*engines)
    assert rig.plan(entry_of()) == ("d", 0)
    assert rig.said == [("one", "no_engines")]


def test_alone_an_engine_serves_everything() -> None:
    rig = Rig(engine("p", PREFILL), engine("d", DECODE, accepting=False))
    assert rig.plan(entry_of()) == ("pd", 0)


def test_the_engine_of_the_prompt_is_one_whose_blocks_the_likely_one_can_have() -> None:
    rig = Rig(
        engine("p", PREFILL),
        engine("q", PREFILL, blocks=b"g" * 16),
        engine("d", DECODE),
        engine("e", DECODE, blocks=b"g" * 16),
    )
    rig.router.report("d", waiting=5, running=0, kv_cache_usage=0.0)
    assert rig.plan(entry_of()) == ("q", 1)
    rig.router.report("e", waiting=9, running=0, kv_cache_usage=0.0)
    assert rig.plan(entry_of()) == ("p", 1)


@pytest.mark.parametrize(
    ("waiting", "running", "streams", "legs"),
    [
        (0, 1, 8, "two"),
        (1, 1, 8, "two"),
        (2, 1, 8, "one"),
        (0, 0, 0, "two"),
        (0, 1, 0, "two"),
        (1, 1, 0, "one"),
        (1, 1, 5, "two"),
    ],
)
def test_a_prompt_goes_in_one_leg_where_engines_of_prompts_have_more_to_do(
    waiting: int, running: int, streams: int, legs: str
) -> None:
    rig = Rig(engine("p", PREFILL), engine("d", DECODE))
    rig.router.report("p", waiting=waiting, running=running, kv_cache_usage=0.0)
    rig.router.report("d", waiting=0, running=streams, kv_cache_usage=0.0)
    assert rig.plan(entry_of()) == (("p", 1) if legs == "two" else ("d", 0))
    assert rig.said == [(legs, "long" if legs == "two" else "busy")]


def test_the_least_busy_engine_of_prompts_is_compared() -> None:
    rig = Rig(engine("p", PREFILL), engine("q", PREFILL), engine("d", DECODE))
    rig.router.report("p", waiting=9, running=1, kv_cache_usage=0.0)
    rig.router.report("d", waiting=0, running=2, kv_cache_usage=0.0)
    assert rig.plan(entry_of()) == ("pq", 1)
    rig.router.report("q", waiting=9, running=1, kv_cache_usage=0.0)
    assert rig.plan(entry_of()) == ("d", 0)


def test_without_overflow_long_prompts_go_to_engines_of_prompts_however_many_wait() -> None:
    rig = Rig(engine("p", PREFILL), engine("d", DECODE), overflow=False)
    rig.router.report("p", waiting=9, running=1, kv_cache_usage=0.0)
    assert rig.plan(entry_of()) == ("p", 1)


def test_a_handed_over_request_goes_to_an_engine_that_can_pull_its_blocks() -> None:
    rig = Rig(engine("p", PREFILL), engine("d", DECODE, blocks=b"g" * 16), engine("e"), engine("f"))
    source = KvSource(
        engine_id="p", incarnation="1", address="h:1", lease_id=b"l" * 16, num_tokens=96, fingerprint=b"f" * 16
    )
    entry = entry_of()
    entry.hand_over(source, 0.0)
    assert rig.plan(entry) == ("ef", 0)
    entry.kv_source = msgspec.structs.replace(source, fingerprint=b"x" * 16)
    assert rig.plan(entry) == ("def", 0)
    entry.kv_source = None
    assert rig.plan(entry) == ("def", 0)
    assert rig.said == []


def test_a_gateways_first_request_goes_to_an_engine_of_prompts_and_stays() -> None:
    rig = Rig(engine("p", PREFILL), engine("d", DECODE))
    leased = RequestContext(kv=KvParams(lease=True))
    assert rig.plan(entry_of(context=leased)) == ("p", 0)
    assert Rig(engine("p", PREFILL, accepting=False), engine("d")).plan(entry_of(context=leased)) == ("pd", 0)
