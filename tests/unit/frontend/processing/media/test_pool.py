"""The pool of media workers: results, workers that end, and the queue that tenants share."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_common.errors import ConfigError, ResourceExhausted, Unavailable
from penstock_frontend.config import MediaConfig
from penstock_frontend.metrics import FrontendMetrics, MediaMetrics
from penstock_frontend.processing.media import pool as worker_process
from penstock_frontend.processing.media.families.base import ProcessedItem
from penstock_frontend.processing.media.pool import FairQueue, Job, WorkerPool
from penstock_frontend.processing.media.worker_messages import TooLarge, Unreadable
from tests.fakes.media_family import RATE, PlainFamily
from tests.fakes.media_files import image_file, png_bomb, sound_file
from tests.fakes.patience import PATIENCE

MakePool = Callable[..., WorkerPool]


@pytest.fixture
async def make() -> AsyncIterator[MakePool]:
    pools: list[WorkerPool] = []

    def make(fault: str = "", **settings: Any) -> WorkerPool:
        config = MediaConfig(**{"workers": 1, "worker_timeout": PATIENCE, **settings})
        metrics = MediaMetrics(FrontendMetrics("m").registry, "m")
        pools.append(WorkerPool(PlainFamily(fault).make_processor(), RATE, config, metrics))
        return pools[-1]

    yield make
    for pool in pools:
        pids = pool.pids
        await pool.close()
        assert not any(is_alive(pid) for pid in pids)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def is_running(pid: int) -> bool:
    """Return whether the process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def image(data: bytes | None = None, **kwargs: Any) -> Job:
    return Job("image", [data if data is not None else image_file()], [], json.dumps(kwargs).encode())


def array(item: ProcessedItem, name: str) -> "np.ndarray[Any, Any]":
    tensor = item.data[name]
    return np.frombuffer(tensor.data, tensor.dtype).reshape(tensor.shape)


async def test_an_item_comes_back_as_the_processor_made_it(make: MakePool) -> None:
    pool = make()
    await pool.start()
    item = await pool.process(image(image_file(size=(8, 6))))
    assert array(item, "pixel_values").shape == (1, 3, 6, 8)
    assert item.modality == "image"


async def test_a_video_has_all_its_frames_and_their_times(make: MakePool) -> None:
    pool = make()
    await pool.start()
    item = await pool.process(Job("video", [image_file(seed=n) for n in range(3)], [0.0, 0.5, 1.0], b"{}"))
    assert array(item, "pixel_values_videos").shape == (3, 6, 8, 3)
    assert array(item, "timestamps").tolist() == [0.0, 0.5, 1.0]


async def test_sound_comes_at_the_rate_of_the_model(make: MakePool) -> None:
    pool = make()
    await pool.start()
    item = await pool.process(Job("audio", [sound_file(rate=48_000, seconds=0.5, channels=2)], [], b"{}"))
    assert array(item, "input_features").shape == (1, 1, RATE // 2)


async def test_a_worker_has_no_torch_whatever_is_installed(make: MakePool) -> None:
    pool = make()
    await pool.start()
    assert array(await pool.process(image(torch=True)), "loaded").tolist() == [0]


@pytest.mark.parametrize("fault", ["exit", "kill"])
async def test_a_file_that_ends_its_worker_twice_costs_its_own_request_alone(make: MakePool, fault: str) -> None:
    pool = make()
    await pool.start()
    outcomes = await asyncio.gather(
        pool.process(image()), pool.process(image(fault=fault)), pool.process(image()), return_exceptions=True
    )
    assert [type(each) for each in outcomes] == [ProcessedItem, Unreadable, ProcessedItem]


async def test_an_item_outlives_a_worker_that_ends_by_itself(make: MakePool, tmp_path: Path) -> None:
    pool = make()
    await pool.start()
    (before,) = pool.pids
    assert isinstance(await pool.process(image(fault="kill", once=str(tmp_path / "once"))), ProcessedItem)
    assert before not in pool.pids


async def test_workers_that_end_with_nothing_to_do_are_no_items_fault(make: MakePool) -> None:
    pool = make(workers=3)
    await pool.start()
    while len(pool.pids) < 3:
        await asyncio.sleep(0.01)
    for pid in pool.pids:
        os.kill(pid, signal.SIGKILL)
    for pid in pool.pids:
        while is_running(pid):
            await asyncio.sleep(0.01)
    assert isinstance(await pool.process(image()), ProcessedItem)


async def test_a_worker_that_ends_while_it_starts_is_replaced(make: MakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make()
    await pool.start()
    started: list[int] = []

    class Killed(worker_process.WorkerProcess):
        async def set_up(self, setup: Any) -> None:
            started.append(self.pid)
            if len(started) <= 2:
                os.kill(self.pid, signal.SIGKILL)
            await super().set_up(setup)

    monkeypatch.setattr("penstock_frontend.processing.media.pool.WorkerProcess", Killed)
    (pid,) = pool.pids
    os.kill(pid, signal.SIGKILL)
    while is_running(pid):
        await asyncio.sleep(0.01)
    assert isinstance(await pool.process(image()), ProcessedItem)
    assert len(started) == 3


@pytest.mark.parametrize("fault", ["hang", "spin"])
async def test_an_item_that_takes_too_long_is_refused_and_its_worker_replaced(make: MakePool, fault: str) -> None:
    pool = make(worker_timeout=0.5)
    await pool.start()
    (before,) = pool.pids
    with pytest.raises(TooLarge) as error:
        await pool.process(image(fault=fault))
    assert (error.value.setting, error.value.limit) == ("media.worker_timeout", 0.5)
    while not pool.pids or before in pool.pids:
        await asyncio.sleep(0.01)
    assert not is_alive(before)


async def test_an_item_that_needs_too_much_memory_is_refused(make: MakePool) -> None:
    pool = make(worker_memory=256 * 1024 * 1024)
    await pool.start()
    with pytest.raises(TooLarge) as error:
        await pool.process(image(fault="memory"))
    assert error.value.setting == "media.worker_memory"
    assert isinstance(await pool.process(image()), ProcessedItem)


async def test_a_picture_that_fits_the_pixels_and_not_the_memory_is_refused(make: MakePool) -> None:
    pool = make(worker_memory=64 * 1024 * 1024, max_pixels=64_000_000)
    await pool.start()
    with pytest.raises(TooLarge):
        await pool.process(image(png_bomb(8000, 8000)))
    assert isinstance(await pool.process(image()), ProcessedItem)


async def test_what_a_processor_says_of_its_arguments_is_told(make: MakePool) -> None:
    pool = make()
    await pool.start()
    with pytest.raises(Unreadable, match=r"processor_kwargs.fault is 'wrong'"):
        await pool.process(image(fault="wrong"))


async def test_what_an_unexpected_error_says_is_not_told(make: MakePool) -> None:
    pool = make()
    await pool.start()
    with pytest.raises(Unreadable) as error:
        await pool.process(image(fault="raise"))
    assert "secret" not in str(error.value)


async def test_a_full_queue_refuses_with_a_time_to_come_back(make: MakePool) -> None:
    pool = make(max_queued=2)
    await pool.start()
    running = asyncio.create_task(pool.process(image(fault="hang")))
    await asyncio.sleep(0)
    while pool.num_queued:
        await asyncio.sleep(0.01)
    waiting = [asyncio.create_task(pool.process(image())) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(ResourceExhausted) as error:
        await pool.process(image())
    assert error.value.retry_after is not None
    assert "media.max_queued is 2" in error.value.message
    await pool.close()
    ended = await asyncio.gather(running, *waiting, return_exceptions=True)
    assert [type(each) for each in ended] == [Unavailable] * 3


async def test_a_tenant_with_much_to_do_delays_others_by_an_item(make: MakePool) -> None:
    pool = make()
    await pool.start()
    order: list[str] = []

    async def process(tenant: str) -> None:
        await pool.process(image(), tenant)
        order.append(tenant)

    much = [asyncio.create_task(process("much")) for _ in range(6)]
    await asyncio.sleep(0)
    await asyncio.gather(*much, process("little"))
    assert order.index("little") <= 2


async def test_the_last_of_who_has_most_makes_room_in_a_full_queue(make: MakePool) -> None:
    pool = make(max_queued=3)
    await pool.start()
    running = asyncio.create_task(pool.process(image(fault="hang")))
    await asyncio.sleep(0)
    while pool.num_queued:
        await asyncio.sleep(0.01)
    many = [asyncio.create_task(pool.process(image(), "many")) for _ in range(3)]
    await asyncio.sleep(0)
    few = asyncio.create_task(pool.process(image(), "few"))
    with pytest.raises(ResourceExhausted, match=r"media\.max_queued is 3"):
        await many[-1]
    with pytest.raises(ResourceExhausted):
        await pool.process(image(), "many")
    assert pool.num_queued > 2
    await pool.close()
    ended = await asyncio.gather(running, *many[:2], few, return_exceptions=True)
    assert [type(each) for each in ended] == [Unavailable] * 4


async def test_a_worker_that_ends_without_an_item_is_replaced_at_once(make: MakePool) -> None:
    pool = make()
    await pool.start()
    for _ in range(2):
        (before,) = pool.pids
        os.kill(before, signal.SIGKILL)
        async with asyncio.timeout(PATIENCE):
            while pool.pids in ([], [before]):
                await asyncio.sleep(0.01)
    assert isinstance(await pool.process(image()), ProcessedItem)


async def test_media_without_waiting_requests_are_not_processed(make: MakePool, tmp_path: Path) -> None:
    pool = make()
    await pool.start()
    running = asyncio.create_task(pool.process(image(fault="hang")))
    given_up = asyncio.create_task(pool.process(image(fault="exit", once=str(tmp_path / "processed"))))
    await asyncio.sleep(0)
    given_up.cancel()
    for _ in range(2):
        while not pool.pids or pool.num_queued > 1:
            await asyncio.sleep(0.01)
        (pid,) = pool.pids
        os.kill(pid, signal.SIGKILL)
        while pid in pool.pids:
            await asyncio.sleep(0.01)
    with pytest.raises(Unreadable):
        await running
    assert isinstance(await pool.process(image()), ProcessedItem)
    assert not (tmp_path / "processed").exists()


async def test_a_processor_that_cannot_be_made_is_an_error_of_the_configuration(make: MakePool) -> None:
    with pytest.raises(ConfigError, match="no such checkpoint"):
        await make(fault="no such checkpoint").start()


async def test_a_pool_of_two_works_at_two_items_at_once(make: MakePool) -> None:
    pool = make(workers=2)
    await pool.start()
    while len(pool.pids) < 2:
        await asyncio.sleep(0.01)
    hanging = asyncio.create_task(pool.process(image(fault="hang")))
    assert isinstance(await pool.process(image()), ProcessedItem)
    assert not hanging.done()
    hanging.cancel()


async def test_workers_know_nothing_of_the_frontends_environment(
    make: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_SECRET", "a-secret")
    pool = make()
    await pool.start()
    (pid,) = pool.pids
    environ = await asyncio.to_thread(Path(f"/proc/{pid}/environ").read_bytes)
    assert b"a-secret" not in environ
    assert os.getpriority(os.PRIO_PROCESS, pid) > os.getpriority(os.PRIO_PROCESS, 0)


@pytest.mark.parametrize(
    "answer",
    [
        "another modality",
        "another size",
        "negative shape",
        "negative rows",
        "rows without end",
        "unknown dtype",
        "all memory",
        "bytes that do not come",
        "no msgpack",
        "endless head",
        "nothing",
    ],
)
async def test_what_no_worker_says_is_not_believed(
    make: MakePool, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    monkeypatch.setattr(worker_process, "_MODULE", "tests.fakes.evil_media_worker")
    pool = make()
    await pool.start()
    with pytest.raises(Unreadable):
        await pool.process(image(answer=answer))
    good = await pool.process(image(answer="good"))
    assert array(good, "pixel_values").tolist() == [[0, 1], [2, 3]]


# A fair queue for several tenants.

TENANTS = "abc"


def filled(text: str) -> FairQueue[str]:
    """Return a queue of items. Each item is named by its tenant's letter and its number within the tenant."""
    queue: FairQueue[str] = FairQueue()
    for index, tenant in enumerate(text):
        queue.put(tenant, f"{tenant}{text[:index].count(tenant)}")
    return queue


def emptied(queue: FairQueue[str]) -> list[str]:
    return [queue.take() for _ in range(len(queue))]


def test_tenants_take_turns_and_each_is_served_in_order() -> None:
    assert emptied(filled("aaaabbc")) == ["a0", "b0", "c0", "a1", "b1", "a2", "a3"]


def test_who_comes_later_waits_for_one_of_each_other_at_most() -> None:
    queue = filled("aaabbb")
    assert queue.take() == "a0"
    queue.put("c", "c0")
    assert emptied(queue) == ["b0", "a1", "c0", "b1", "a2", "b2"]


def test_what_is_put_back_is_next() -> None:
    queue = filled("aabb")
    assert queue.take() == "a0"
    queue.put_back("a", "a0")
    assert emptied(queue) == ["a0", "b0", "a1", "b1"]


def test_the_last_of_whoever_has_most_is_displaced() -> None:
    queue = filled("aaab")
    assert queue.displace("c") == "a2"
    assert queue.displace("b") is None
    assert emptied(queue) == ["a0", "b0", "a1"]


@pytest.mark.parametrize(
    ("text", "tenant"), [("", "a"), ("a", "b"), ("ab", "c"), ("aa", "a"), ("aab", "a"), ("aab", "b")]
)
def test_nobody_is_displaced_by_who_would_have_as_many(text: str, tenant: str) -> None:
    queue = filled(text)
    assert queue.displace(tenant) is None
    assert len(queue) == len(text)


def test_nothing_comes_of_an_empty_queue() -> None:
    with pytest.raises(IndexError, match="the queue of media items is empty"):
        filled("").take()


@given(
    st.lists(
        st.sampled_from(["take", *(f"put {t}" for t in TENANTS), *(f"displace {t}" for t in TENANTS)]), max_size=60
    )
)
def test_nothing_is_lost_and_nobody_waits_for_more_than_one_of_each_other(actions: list[str]) -> None:
    queue: FairQueue[tuple[str, int]] = FairQueue()
    waiting: dict[str, list[int]] = {tenant: [] for tenant in TENANTS}
    others: dict[str, dict[str, int]] = {}
    for number, action in enumerate(actions):
        what, _, tenant = action.partition(" ")
        if what == "put":
            queue.put(tenant, (tenant, number))
            waiting[tenant].append(number)
            if len(waiting[tenant]) == 1:
                others[tenant] = dict.fromkeys(TENANTS, 0)
        elif what == "displace":
            if (gone := queue.displace(tenant)) is not None:
                assert waiting[gone[0]].pop() == gone[1]
        elif len(queue):
            whose, first = queue.take()
            assert waiting[whose].pop(0) == first
            others[whose] = dict.fromkeys(TENANTS, 0)
            for each in TENANTS:
                if waiting[each] and each != whose:
                    others[each][whose] += 1
                    assert others[each][whose] <= 1
        assert len(queue) == sum(map(len, waiting.values()))
