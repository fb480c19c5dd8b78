"""Requests that a frontend admits, and the errors of refused ones."""

import contextlib
import time
from collections.abc import Callable
from typing import Any

import pytest

from penstock_common.config.settings import Reread
from penstock_common.errors import ConfigError, DeadlineExceeded, ResourceExhausted
from penstock_common.types.prompt_embeds import PromptEmbeds
from penstock_common.types.request import PoolingParams, PoolingTask, RequestContext
from penstock_frontend.call_types import (
    ChatMessage,
    ChatRequest,
    ContentPart,
    GenerateRequest,
    MixedPrompt,
    PoolingRequest,
    ToolCall,
)
from penstock_frontend.calls.admission import (
    DRAINING,
    FULL,
    SEEN,
    Admission,
    Demand,
    InFlight,
    Readiness,
    check_deadline,
    demand_of,
)
from penstock_frontend.config import FairnessConfig, LimitsConfig
from tests.fakes.engines.engine_harness import FakeClock


def refused(action: Callable[[], Any]) -> ResourceExhausted:
    with pytest.raises(ResourceExhausted) as error:
        action()
    return error.value


def test_requests_are_counted_until_they_leave() -> None:
    admission = Admission(Reread(LimitsConfig(max_requests=2)), FakeClock())
    admission.enter(Demand())
    admission.enter(Demand())
    error = refused(lambda: admission.enter(Demand()))
    assert error.message == "2 requests are in flight; the limit limits.max_requests is 2"
    assert (error.reason, error.quota_subject) == ("QUEUE_FULL", "")
    admission.leave(Demand(), served=True)
    admission.enter(Demand())


def test_prompts_are_counted_by_their_lengths() -> None:
    admission = Admission(Reread(LimitsConfig(max_prompt_length_in_flight=100)), FakeClock())
    admission.enter(Demand(length=60))
    error = refused(lambda: admission.enter(Demand(length=41)))
    assert "101 characters and token ids of prompts would be in flight" in error.message
    assert "limits.max_prompt_length_in_flight is 100" in error.message
    admission.enter(Demand(length=40))
    admission.leave(Demand(length=60), served=True)
    admission.enter(Demand(length=60))


def test_any_one_prompt_is_let_in_where_there_is_no_other() -> None:
    admission = Admission(Reread(LimitsConfig(max_prompt_length_in_flight=100)), FakeClock())
    admission.enter(Demand(length=1000))
    refused(lambda: admission.enter(Demand(length=1)))


def test_several_requests_are_asked_for_together() -> None:
    admission = Admission(Reread(LimitsConfig(max_requests=3, max_tenant_requests=2)), FakeClock())
    admission.check([Demand("a")] * 2)
    assert "max_requests is 3" in refused(lambda: admission.check([Demand("a")] * 4)).message
    assert "max_tenant_requests is 2" in refused(lambda: admission.check([Demand("a")] * 3)).message
    admission.enter(Demand("b"))
    assert admission.num_tenants == 1, "asking takes no room"


def test_a_tenant_at_its_limit_is_told_whose_quota_it_is_and_others_come_in() -> None:
    admission = Admission(Reread(LimitsConfig(max_tenant_requests=1)), FakeClock())
    admission.enter(Demand("a"))
    admission.enter(Demand("b"))
    error = refused(lambda: admission.enter(Demand("a")))
    assert error.message == "1 sequences of tenant 'a' are running; the limit limits.max_tenant_requests is 1"
    assert (error.reason, error.quota_subject) == ("TENANT_QUOTA", "tenant:a")
    admission.enter(Demand())
    assert "1 sequences without a tenant" in refused(lambda: admission.enter(Demand())).message


def test_at_the_limit_the_flooding_tenant_is_refused_and_another_one_is_let_in() -> None:
    admission = Admission(Reread(LimitsConfig(max_requests=4, max_prompt_length_in_flight=100)), FakeClock())
    served = 0
    for _ in range(20):
        for _ in range(10):
            with contextlib.suppress(ResourceExhausted):
                admission.enter(Demand("a", length=1))
        assert refused(lambda: admission.enter(Demand("a"))).reason == "QUEUE_FULL"
        admission.enter(Demand("b", length=1))
        admission.leave(Demand("b", length=1), served=True)
        served += 1
    assert served == 20
    admission.enter(Demand("b", length=1))
    error = refused(lambda: admission.enter(Demand("a")))
    assert (
        error.message
        == "5 requests are in flight; the limit limits.max_requests is 4, and 4 requests are of tenant 'a'"
    )


def test_prompt_lengths_at_their_limit_are_shared_by_tenants_weights() -> None:
    limits = LimitsConfig(max_prompt_length_in_flight=100)
    fairness = Reread(FairnessConfig(weights={"gold": 3.0}))
    admission = Admission(Reread(limits), FakeClock(), fairness=fairness)
    admission.enter(Demand("gold", length=65))
    admission.enter(Demand("b", length=30))
    refused(lambda: admission.enter(Demand("b", length=6)))
    admission.enter(Demand("c", length=8))
    assert "of tenant 'b'" in refused(lambda: admission.enter(Demand("b", length=6))).message


def test_a_frontend_that_one_tenant_has_filled_is_not_full_for_the_others() -> None:
    admission = Admission(Reread(LimitsConfig(max_requests=20)), FakeClock())
    for _ in range(20):
        admission.enter(Demand("a"))
    assert not admission.full, "balancers would take it away from every tenant"
    admission.enter(Demand("b"))
    admission.enter(Demand("c"))
    assert admission.full


def test_a_full_frontend_has_room_again_when_a_tenth_is_free() -> None:
    told: list[bool] = []
    limits = LimitsConfig(max_requests=20, max_prompt_length_in_flight=1000)
    admission = Admission(Reread(limits), FakeClock(), on_full=lambda: told.append(admission.full))
    for _ in range(20):
        admission.enter(Demand())
    assert told == [True]
    admission.leave(Demand(), served=True)
    assert told == [True]
    admission.leave(Demand(), served=True)
    assert told == [True, False]
    admission.enter(Demand(length=1000))
    assert told == [True, False, True]


def test_limits_that_change_hold_for_what_comes_next_and_end_nothing() -> None:
    told: list[bool] = []
    limits = Reread(LimitsConfig(max_requests=3))
    admission = Admission(limits, FakeClock(), on_full=lambda: told.append(admission.full))
    for _ in range(2):
        admission.enter(Demand("a"))
    limits.now = LimitsConfig(max_requests=1)
    admission.look()
    assert told == [True], "who asks for its health hears of it"
    assert (
        "2 requests are in flight; the limit limits.max_requests is 1"
        in refused(lambda: admission.enter(Demand())).message
    )
    limits.now = LimitsConfig(max_requests=10, max_tenant_requests=2)
    admission.look()
    assert told == [True, False]
    assert refused(lambda: admission.enter(Demand("a"))).reason == "TENANT_QUOTA", "what came before counts"
    for _ in range(2):
        admission.leave(Demand("a"), served=True)
    admission.enter(Demand("a"))
    limits.now = LimitsConfig()
    admission.leave(Demand("a"), served=True)
    assert admission.num_tenants == 0


def test_a_tenant_without_requests_is_forgotten() -> None:
    admission = Admission(Reread(LimitsConfig(max_tenant_requests=1)), FakeClock())
    for index in range(100):
        admission.enter(Demand(f"t{index}"))
        admission.leave(Demand(f"t{index}"), served=True)
    assert admission.num_tenants == 0


def test_the_time_to_retry_after_is_that_of_the_measured_rate() -> None:
    clock = FakeClock()
    admission = Admission(Reread(LimitsConfig(max_requests=2, max_prompt_length_in_flight=250)), clock)
    demand = Demand(length=100)
    admission.enter(demand)
    admission.enter(demand)
    assert refused(lambda: admission.enter(Demand())).retry_after == 1.0, "nothing is measured yet"
    for _ in range(40):
        clock.now += 4.0
        admission.leave(demand, served=True)
        admission.enter(demand)
    assert refused(lambda: admission.enter(Demand())).retry_after == pytest.approx(4.0, rel=0.25)
    assert refused(lambda: admission.check([Demand()] * 3)).retry_after == pytest.approx(12.0, rel=0.25)
    admission.leave(demand, served=True)
    assert refused(lambda: admission.enter(Demand(length=350))).retry_after == pytest.approx(8.0, rel=0.6)


def test_requests_that_were_never_begun_say_nothing_about_the_speed() -> None:
    clock = FakeClock()
    in_flight = InFlight(clock)
    in_flight.enter()
    for _ in range(1000):
        in_flight.enter()
        in_flight.leave(served=False)
    clock.now += 8.0
    in_flight.leave()
    assert in_flight.retry_after(1) == pytest.approx(8.0, rel=0.5)


def test_a_prompt_is_measured_without_being_read() -> None:
    vectors = PromptEmbeds(dtype="bfloat16", num_tokens=2, hidden_size=4, data=bytes(16))
    mixed = MixedPrompt(("ab", [1, 2, 3], vectors), ("a", "b", "c"))
    chat = ChatRequest(
        messages=[
            ChatMessage(role="user", content="four"),
            ChatMessage(
                role="user", content=[ContentPart(type="text", text="abc"), ContentPart(type="text", text="d")]
            ),
            ChatMessage(role="assistant", reasoning="hm", tool_calls=[ToolCall(name="f", arguments="{}")]),
        ],
        context=RequestContext(tenant="t"),
    )
    pooling = PoolingRequest(
        inputs=["ab", [1, 2]], seconds=["xyz"], fields=["i", "j"], params=PoolingParams(task=PoolingTask.EMBED)
    )
    assert demand_of(GenerateRequest(prompt="text", context=RequestContext(tenant="t"))) == Demand("t", 4)
    assert demand_of(GenerateRequest(prompt=[1, 2, 3], sampling={"n": 4})) == Demand("", 3, 4)
    assert demand_of(GenerateRequest(prompt=mixed)) == Demand("", 2 + 3 + 2 * (4 * 4 + 1))
    assert demand_of(chat) == Demand("t", 4 + 4 + 2 + 2)
    assert demand_of(pooling) == Demand("", 7, 2)


def test_a_deadline_that_has_passed_ends_a_request_before_it_is_begun() -> None:
    check_deadline(None)
    check_deadline(time.time() + 60)
    with pytest.raises(DeadlineExceeded, match="before the request started"):
        check_deadline(time.time() - 1)


def test_weights_are_those_of_named_tenants_or_the_default() -> None:
    fairness = FairnessConfig(default_weight=0.5, weights={"gold": 4.0})
    assert [fairness.weight_of(tenant) for tenant in ("gold", "other", "")] == [4.0, 0.5, 0.5]


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), 1001.0])
def test_a_weight_out_of_range_is_refused_with_its_tenant(weight: float) -> None:
    with pytest.raises(ConfigError, match=r"fairness.weights.gold is .*; it must be from 0.001 to 1000"):
        FairnessConfig(weights={"gold": weight})


# Readiness of a frontend for requests.


def test_it_is_ready_from_the_first_engine_on_whatever_becomes_of_it() -> None:
    readiness = Readiness(without_engines=False)
    assert not readiness.update(engine=False, view=True, full=False)
    assert (readiness.ready, readiness.answers, readiness.why) == (False, False, SEEN)
    assert readiness.update(engine=True, view=True, full=False)
    assert not readiness.update(engine=False, view=True, full=False)
    assert (readiness.ready, readiness.why) == (True, "")


def test_without_engines_it_is_ready_from_the_first_view_on() -> None:
    readiness = Readiness(without_engines=True)
    assert not readiness.update(engine=False, view=False, full=False)
    assert readiness.update(engine=False, view=True, full=False)
    assert readiness.ready


def test_it_is_not_ready_while_it_is_full() -> None:
    readiness = Readiness(without_engines=False)
    readiness.update(engine=True, view=False, full=False)
    assert readiness.update(engine=True, view=False, full=True)
    assert readiness.why == FULL
    assert readiness.answers
    assert readiness.update(engine=False, view=False, full=False)
    assert readiness.ready


def test_it_is_not_ready_any_more_once_it_drains() -> None:
    readiness = Readiness(without_engines=False)
    readiness.update(engine=True, view=False, full=False)
    readiness.drain(moves_clients=False)
    assert not readiness.update(engine=True, view=False, full=False)
    assert readiness.why == DRAINING
    assert not readiness.answers


def test_while_it_moves_its_clients_they_may_begin_calls_until_it_closes() -> None:
    readiness = Readiness(without_engines=False)
    readiness.update(engine=True, view=False, full=False)
    readiness.drain(moves_clients=True)
    assert (readiness.ready, readiness.answers) == (False, True)
    readiness.close()
    assert not readiness.answers
