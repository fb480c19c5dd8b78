"""The collector: one slot per request, merged while the client does not read."""

import asyncio

import pytest

from penstock_common.errors import Unavailable
from penstock_common.types.outputs import FinishReason
from penstock_common.types.sampling import OutputKind
from penstock_frontend.processing.collector import OutputCollector
from penstock_frontend.processing.output_text import TextDelta
from penstock_frontend.processing.request import Finish, Usage

FINISH = Finish(FinishReason.STOP, None, Usage(1, 0, 3))


def collector(kind: OutputKind = OutputKind.DELTA, interval: int = 1) -> OutputCollector:
    return OutputCollector(kind, interval)


async def ready(collector: OutputCollector) -> bool:
    """Whether there is something to take; takes nothing."""
    return collector._event.is_set()


async def test_deltas_that_were_not_taken_merge() -> None:
    slot = collector()
    slot.put(TextDelta("a", [1]))
    slot.put(TextDelta("b", [2, 3]))
    output = await slot.get()
    assert (output.text, output.token_ids, output.finish) == ("ab", [1, 2, 3], None)


async def test_what_was_taken_does_not_come_again() -> None:
    slot = collector()
    slot.put(TextDelta("a", [1]))
    await slot.get()
    slot.put(TextDelta("b", [2]), FINISH)
    output = await slot.get()
    assert (output.text, output.token_ids, output.finish) == ("b", [2], FINISH)


async def test_cumulative_outputs_hold_everything_so_far_and_are_not_changed_later() -> None:
    slot = collector(OutputKind.CUMULATIVE)
    slot.put(TextDelta("a", [1]))
    first = await slot.get()
    slot.put(TextDelta("b", [2]), FINISH)
    second = await slot.get()
    assert (first.text, first.token_ids) == ("a", [1])
    assert (second.text, second.token_ids) == ("ab", [1, 2])


async def test_final_gives_one_output_at_the_end() -> None:
    slot = collector(OutputKind.FINAL)
    slot.put(TextDelta("a", [1]))
    assert not await ready(slot)
    slot.put(TextDelta("b", [2]), FINISH)
    output = await slot.get()
    assert (output.text, output.token_ids) == ("ab", [1, 2])


async def test_stream_interval_gives_the_first_every_nth_and_the_last_token() -> None:
    slot, sizes = collector(interval=3), []
    for token in range(8):
        slot.put(TextDelta("x", [token]), FINISH if token == 7 else None)
        if await ready(slot):
            sizes.append(len((await slot.get()).token_ids))
    assert sizes == [1, 3, 3, 1]


async def test_nothing_new_wakes_nobody() -> None:
    slot = collector()
    slot.put(TextDelta())
    assert not await ready(slot)


async def test_a_failure_reaches_the_reader_that_waits() -> None:
    slot = collector(OutputKind.FINAL)
    reader = asyncio.create_task(slot.get())
    await asyncio.sleep(0)
    slot.fail(Unavailable("gone"))
    with pytest.raises(Unavailable, match="gone"):
        await reader


async def test_a_slow_reader_costs_its_output_and_nothing_else() -> None:
    slot = collector()
    for token in range(1000):
        slot.put(TextDelta("x", [token]))
    assert len((await slot.get()).token_ids) == 1000
    assert not await ready(slot)
