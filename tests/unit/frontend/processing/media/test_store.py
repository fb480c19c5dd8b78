import asyncio
import gc
from collections.abc import Awaitable, Callable

import pytest

from penstock_common.types.media import TensorData
from penstock_frontend.processing.media.families.base import ProcessedItem
from penstock_frontend.processing.media.service import MediaStore


def item(size: int = 10) -> ProcessedItem:
    return ProcessedItem(
        modality="image", data={"pixel_values": TensorData("uint8", (size,), bytes(size))}, num_embeds=3, layout=(1, 2)
    )


class Making:
    """Counts what it makes; waits for ``go`` where ``held``."""

    def __init__(self, size: int = 10, *, held: bool = False, error: Exception | None = None) -> None:
        self.count = 0
        self.cancelled = 0
        self.go = asyncio.Event()
        self._size, self._error = size, error
        if not held:
            self.go.set()

    def __call__(self) -> Awaitable[ProcessedItem]:
        return self._make()

    async def _make(self) -> ProcessedItem:
        self.count += 1
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self._error is not None:
            raise self._error
        return item(self._size)


async def test_an_item_is_made_once() -> None:
    store, making = MediaStore(100), Making()
    assert await store.get("a", making) is await store.get("a", making)
    assert making.count == 1


async def test_all_who_ask_at_once_get_what_is_made_once() -> None:
    store, making = MediaStore(100), Making(held=True)
    asking = [asyncio.create_task(store.get("a", making)) for _ in range(5)]
    await asyncio.sleep(0)
    making.go.set()
    first, *others = await asyncio.gather(*asking)
    assert making.count == 1
    assert all(other is first for other in others)


async def test_the_first_who_is_cancelled_does_not_cancel_the_others() -> None:
    store, making = MediaStore(100), Making(held=True)
    first, second = (asyncio.create_task(store.get("a", making)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    making.go.set()
    assert (await second).num_embeds == 3
    assert (making.count, making.cancelled) == (1, 0)


async def test_the_last_who_is_cancelled_ends_it_and_who_comes_then_begins_anew() -> None:
    store, making = MediaStore(100), Making(held=True)
    asking = [asyncio.create_task(store.get("a", making)) for _ in range(2)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    making.go.set()
    assert (await store.get("a", making)).num_embeds == 3
    assert (making.count, making.cancelled) == (2, 1)


async def test_all_who_ask_get_what_it_fails_with_and_nothing_is_kept_of_it() -> None:
    store, making = MediaStore(100), Making(error=ValueError("broken"))
    outcomes = await asyncio.gather(*(store.get("a", making) for _ in range(3)), return_exceptions=True)
    assert [str(each) for each in outcomes] == ["broken"] * 3
    with pytest.raises(ValueError, match="broken"):
        await store.get("a", making)
    assert making.count == 2
    assert (len(store), store.num_alive) == (0, 0)


async def test_the_least_recently_used_goes_when_there_is_no_room() -> None:
    store, makings = MediaStore(30), {name: Making() for name in "abcd"}
    for name in "abcad":
        await store.get(name, makings[name])
    assert (len(store), store.num_bytes) == (3, 30)
    for name in "acd":
        await store.get(name, makings[name])
    assert [making.count for making in makings.values()] == [1, 1, 1, 1]
    await store.get("b", makings["b"])
    assert makings["b"].count == 2


async def test_an_item_that_a_request_has_is_found_though_it_is_not_kept() -> None:
    store, making = MediaStore(10), Making()
    tensor = (await store.get("a", making)).data["pixel_values"]
    await store.get("b", Making())
    found = await store.get("a", making)
    assert found.data["pixel_values"] is tensor
    assert (found.layout, found.num_embeds) == ((1, 2), 3)
    assert making.count == 1


@pytest.mark.parametrize("max_bytes", [0, 9])
async def test_an_item_larger_than_all_the_room_is_found_while_somebody_has_it(max_bytes: int) -> None:
    store, making = MediaStore(max_bytes), Making()
    held = [await store.get("a", making), await store.get("a", making)]
    assert (making.count, store.num_bytes) == (1, 0)
    held.clear()
    await asyncio.sleep(0)  # the loop has what woke this up until then
    gc.collect()
    assert store.num_alive == 0
    await store.get("a", making)
    assert making.count == 2


async def test_nothing_is_left_of_items_that_nobody_has() -> None:
    store = MediaStore(20)
    for number in range(50):
        await store.get(str(number), Making())
    gc.collect()
    assert (len(store), store.num_alive, store.num_bytes) == (2, 2, 20)


async def test_after_clearing_an_item_is_made_anew() -> None:
    sizes: list[int] = []
    store, making = MediaStore(100, on_size=sizes.append), Making()
    held = await store.get("a", making)
    store.clear()
    assert (await store.get("a", making)) is not held
    assert making.count == 2
    assert sizes == [10, 0, 10]


async def test_lookups_are_told_as_hits_where_it_is_there_or_in_the_making() -> None:
    hits: list[bool] = []
    store, making = MediaStore(100, on_lookup=hits.append), Making(held=True)
    asking: list[Callable[[], Awaitable[ProcessedItem]]] = [lambda: store.get("a", making)] * 2
    tasks = [asyncio.ensure_future(ask()) for ask in asking]
    await asyncio.sleep(0)
    making.go.set()
    await asyncio.gather(*tasks)
    await store.get("a", making)
    await store.get("b", making)
    assert hits == [False, True, True, False]
