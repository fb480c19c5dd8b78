"""What every service tells of itself."""

import asyncio
import threading

from prometheus_client import CollectorRegistry

from penstock_common.observability.metrics import count_tasks, service_registry, tell_connected


async def test_tasks_of_the_loop_are_counted_from_any_thread_and_leave_the_count_when_they_end() -> None:
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
