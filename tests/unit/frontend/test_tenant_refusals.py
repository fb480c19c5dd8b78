"""Log lines about refused tenants."""

import asyncio

import pytest
import structlog
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from penstock_common.errors import InvalidArgument, ResourceExhausted
from penstock_frontend import tenants as tenant_refusals
from penstock_frontend.tenants import OTHER, Refused, TenantRefusals
from tests.fakes.engines.engine_harness import FakeClock

FULL = ResourceExhausted("it is full")


def made(clock: FakeClock) -> tuple[TenantRefusals, CollectorRegistry]:
    registry = CollectorRegistry()
    return TenantRefusals("m", registry, clock), registry


def counted(registry: CollectorRegistry, tenant: str) -> float | None:
    labels = {"model_name": "m", "tenant": tenant, "reason": "QUEUE_FULL"}
    return registry.get_sample_value("penstock:tenant_requests_refused_total", labels)


async def test_a_flood_is_one_line_per_interval_that_says_who_how_often_and_why() -> None:
    clock = FakeClock()
    tenants, _ = made(clock)
    with capture_logs() as lines:
        for _ in range(312):
            tenants.refused("acme", FULL)
        tenants.refused("", ResourceExhausted("quota", reason="TENANT_QUOTA"))
        clock.now += 10.0
        tenants.flush()
        tenants.flush()
    assert lines == [
        {
            "event": "refused requests of a tenant, because a limit was reached",
            "log_level": "warning",
            "tenant": tenant,
            "count": count,
            "seconds": 10.0,
            "reason": reason,
        }
        for tenant, count, reason in (("acme", 312, "QUEUE_FULL"), ("", 1, "TENANT_QUOTA"))
    ]


async def test_the_line_comes_by_itself_when_the_interval_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenant_refusals, "LOG_INTERVAL", 0.0)
    tenants, _ = made(FakeClock())
    with capture_logs() as lines:
        tenants.refused("acme", FULL)
        assert lines == []
        await asyncio.sleep(0.001)
    assert [line["count"] for line in lines] == [1]


async def test_the_line_is_of_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenant_refusals, "LOG_INTERVAL", 0.01)
    tenants, _ = made(FakeClock())
    seen: list[dict[str, object]] = []

    class Logger:
        def warning(self, *_: object, **__: object) -> None:
            seen.append(structlog.contextvars.get_contextvars())

    monkeypatch.setattr(tenant_refusals, "get_logger", Logger)
    with structlog.contextvars.bound_contextvars(request="r-1"):
        tenants.refused("acme", FULL)
        for _ in range(1000):
            if seen:
                break
            await asyncio.sleep(0.01)
    assert seen == [{}]


async def test_refusals_of_the_last_minute_are_kept_and_older_ones_forgotten() -> None:
    clock = FakeClock()
    tenants, _ = made(clock)
    tenants.refused("a", FULL)
    tenants.flush()
    clock.now += 30.0
    for _ in range(2):
        tenants.refused("b", FULL)
    assert tenants.recent() == [Refused("b", "QUEUE_FULL", 2), Refused("a", "QUEUE_FULL", 1)]
    tenants.flush()
    clock.now += 31.0
    assert tenants.recent() == [Refused("b", "QUEUE_FULL", 2)]


async def test_a_request_that_is_wrong_is_no_refusal_at_a_limit() -> None:
    tenants, registry = made(FakeClock())
    tenants.refused("a", InvalidArgument("top_p is 2", field="top_p"))
    assert (tenants.recent(), counted(registry, "a")) == ([], None)
    tenants.flush()


async def test_many_tenants_are_summed_in_the_log_in_the_table_and_in_metrics() -> None:
    tenants, registry = made(FakeClock())
    for number in range(3000):
        tenants.refused(f"t{number}", FULL)
    recent = tenants.recent()
    assert (len(recent), sum(each.num_refused for each in recent), recent[-1].tenant) == (21, 3000, OTHER)
    with capture_logs() as lines:
        tenants.flush()
    assert len(lines) == 21
    assert counted(registry, OTHER) == 2980


async def test_a_tenant_named_other_is_not_summed_with_all_others() -> None:
    tenants, registry = made(FakeClock())
    tenants.accepted("other")
    for _ in range(5):
        tenants.refused("other", FULL)
    for number in range(30):
        tenants.refused(f"t{number}", FULL)
    assert counted(registry, "tenant:other") == 5
    assert counted(registry, OTHER) == 11
    recent = {each.tenant: each.num_refused for each in tenants.recent()}
    assert (recent["tenant:other"], recent[OTHER]) == (5, 11)
    tenants.flush()


async def test_a_series_stands_for_one_tenant_and_ends_with_its_label() -> None:
    tenants, registry = made(FakeClock())
    for number in range(20):
        tenants.refused(f"t{number}", FULL)
    for _ in range(4):
        tenants.refused("flood", FULL)
    assert counted(registry, "flood") == 1, "those before are among the others"
    assert counted(registry, OTHER) == 3
    assert [counted(registry, f"t{number}") for number in range(20)].count(None) == 1
    tenants.flush()
