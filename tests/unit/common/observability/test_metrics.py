"""Metrics that every service exports about itself."""

import asyncio
import threading

import prometheus_client
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from penstock_common.observability.metrics import Histogram, count_tasks, service_registry, tell_connected


async def test_running_tasks_of_the_loop_are_counted_from_any_thread() -> None:
    registry = CollectorRegistry()
    count_tasks(registry, asyncio.get_running_loop())

    async def now() -> float | None:
        return await asyncio.to_thread(registry.get_sample_value, "penstock:asyncio_tasks")

    before = await now()
    end = asyncio.Event()
    tasks = [asyncio.create_task(end.wait()) for _ in range(5)]
    during = await now()
    end.set()
    await asyncio.gather(*tasks)
    assert before is not None
    assert (during, await now()) == (before + 5, before)


def test_threads_are_counted() -> None:
    registry = service_registry("test")
    before = registry.get_sample_value("penstock:threads")
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    assert before is not None
    assert registry.get_sample_value("penstock:threads") == before + 1
    end.set()
    thread.join()
    assert registry.get_sample_value("penstock:threads") == before


def test_whether_the_coordinator_is_there_is_told_as_it_is_when_asked() -> None:
    registry, there = CollectorRegistry(), [False]
    tell_connected(registry, lambda: there[0])
    assert registry.get_sample_value("penstock:coordinator_connected") == 0
    there[0] = True
    assert registry.get_sample_value("penstock:coordinator_connected") == 1


# Penstock's histogram compared with prometheus_client's histogram.

BOUNDS = (0.01, 1, 2.5, 10)
VALUES = st.one_of(st.sampled_from([0.0, 0.01, 1.0, 2.5, 10.0, 11.0]), st.floats(0, 20, width=16))


@given(st.lists(st.tuples(VALUES, st.integers(1, 4), st.sampled_from("ab"))))
def test_it_exposes_what_the_librarys_does_for_the_same_observations(
    observations: list[tuple[float, int, str]],
) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    mine = Histogram("x_seconds", "text", ["engine"], bounds=BOUNDS, registry=ours)
    library = prometheus_client.Histogram("x_seconds", "text", ["engine"], buckets=BOUNDS, registry=theirs)
    for value, count, label in observations:
        mine.labels(label).observe(value, count)
        for _ in range(count):
            library.labels(label).observe(value)
    for metric in theirs.collect():
        for sample in metric.samples:
            if sample.name.endswith("_created"):
                continue
            found = ours.get_sample_value(sample.name, sample.labels)
            assert found is not None
            assert abs(found - sample.value) < 1e-6
    bare = [line for line in generate_latest(theirs).decode().splitlines() if "_created" not in line]
    assert [line.rsplit(" ", 1)[0] for line in generate_latest(ours).decode().splitlines()] == [
        line.rsplit(" ", 1)[0] for line in bare
    ]


def test_a_series_shows_as_zero_once_it_is_asked_for() -> None:
    registry = CollectorRegistry()
    Histogram("x", "text", ["engine"], bounds=BOUNDS, registry=registry).labels("a")
    assert registry.get_sample_value("x_count", {"engine": "a"}) == 0
