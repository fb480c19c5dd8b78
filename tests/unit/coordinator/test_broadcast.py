import asyncio

from penstock_coordinator.broadcast import Broadcast


async def test_a_late_reader_gets_the_newest_value_at_once():
    values = Broadcast()
    values.publish("old")
    values.publish("new")
    assert await values.newer_than(0) == (2, "new")


async def test_readers_wait_for_a_newer_value():
    values = Broadcast()
    values.publish("first")
    readers = [asyncio.create_task(values.newer_than(1)) for _ in range(3)]
    await asyncio.wait(readers, timeout=0)
    assert not any(reader.done() for reader in readers)
    values.publish("second")
    assert await asyncio.gather(*readers) == [(2, "second")] * 3
