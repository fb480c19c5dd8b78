"""The collector: one slot per request, merged while the client does not read."""

import asyncio

import pytest

from penstock_common.errors import Unavailable
from penstock_common.types.outputs import FinishReason, Logprobs
from penstock_common.types.sampling import OutputKind
from penstock_frontend.call_types import Finish, Usage
from penstock_frontend.processing.outputs.collector import OutputCollector
from penstock_frontend.processing.outputs.detokenizer import TextDelta

FINISH = Finish(FinishReason.STOP, None, Usage(1, 0, 3))


def collector(kind: OutputKind = OutputKind.DELTA, interval: int = 1) -> OutputCollector:
    return OutputCollector(kind, interval)


async def ready(collector: OutputCollector) -> bool:
    """Return whether output is ready, without taking it."""
    return collector.ready


async def test_deltas_that_were_not_taken_merge() -> None:
    slot = collector()
    slot.put(TextDelta("a", [1]))
    slot.put(TextDelta("b", [2, 3]))
    output = await slot.get()
    assert (output.text, output.token_ids, output.finish) == ("ab", [1, 2, 3], None)


async def test_taken_output_is_not_returned_again() -> None:
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


async def test_an_empty_delta_wakes_no_reader() -> None:
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


def one_each(*token_ids: int) -> Logprobs:
    logprobs = Logprobs()
    for token_id in token_ids:
        logprobs.add([token_id], [-1.0], [1])
    return logprobs


async def test_log_probabilities_merge_with_their_tokens() -> None:
    slot = collector()
    slot.put(TextDelta("a", [1], logprobs=one_each(1)))
    slot.put(TextDelta("bc", [2, 3], logprobs=one_each(2, 3)))
    output = await slot.get()
    assert output.logprobs == one_each(*output.token_ids)
    slot.put(TextDelta("d", [4], logprobs=one_each(4)))
    assert (await slot.get()).logprobs == one_each(4)


async def test_cumulative_log_probabilities_cover_all_tokens_so_far_and_do_not_change() -> None:
    slot = collector(OutputKind.CUMULATIVE)
    slot.put(TextDelta("a", [1], logprobs=one_each(1)))
    first = await slot.get()
    slot.put(TextDelta("b", [2], logprobs=one_each(2)), FINISH)
    second = await slot.get()
    assert (first.logprobs, second.logprobs) == (one_each(1), one_each(1, 2))


async def test_the_prompts_log_probabilities_wait_for_the_first_token_and_come_once() -> None:
    slot = collector(OutputKind.CUMULATIVE)
    slot.put(TextDelta(), prompt_logprobs=one_each(8))
    assert not await ready(slot)
    slot.put(TextDelta("a", [1]), prompt_logprobs=one_each(9))
    first = await slot.get()
    slot.put(TextDelta("b", [2]), FINISH)
    assert (first.prompt_logprobs, (await slot.get()).prompt_logprobs) == (one_each(8, 9), None)


async def test_sequences_are_served_in_the_order_in_which_they_have_something() -> None:
    slot = OutputCollector(OutputKind.DELTA, 1, num_sequences=3)
    for index, text in [(2, "a"), (0, "b"), (2, "c"), (1, "d")]:
        slot.put(TextDelta(text, [index]), index=index)
    taken = [await slot.get() for _ in range(3)]
    assert [(output.index, output.text) for output in taken] == [(2, "ac"), (0, "b"), (1, "d")]
    assert not await ready(slot)


async def test_a_request_is_finished_when_the_end_of_every_sequence_was_taken() -> None:
    slot = OutputCollector(OutputKind.FINAL, 1, num_sequences=2)
    slot.put(TextDelta("b", [2]), FINISH, index=1)
    slot.put(TextDelta("a", [1]), FINISH, index=0)
    assert (await slot.get()).index == 1
    assert not slot.finished
    assert (await slot.get()).index == 0
    assert slot.finished


async def test_the_stream_interval_counts_each_sequence_alone() -> None:
    slot = OutputCollector(OutputKind.DELTA, 2, num_sequences=2)
    for index in (0, 1):
        slot.put(TextDelta("x", [1]), index=index)
        await slot.get()
    slot.put(TextDelta("x", [2]), index=0)
    slot.put(TextDelta("x", [2]), index=1)
    assert not await ready(slot)
    slot.put(TextDelta("x", [3]), index=1)
    output = await slot.get()
    assert (output.index, output.token_ids) == (1, [2, 3])


async def test_the_first_failure_of_a_sequence_ends_the_request() -> None:
    slot = OutputCollector(OutputKind.DELTA, 1, num_sequences=2)
    slot.put(TextDelta("a", [1]), index=0)
    slot.fail(Unavailable("first"))
    slot.fail(Unavailable("second"))
    with pytest.raises(Unavailable, match="first"):
        await slot.get()


async def test_a_slow_reader_costs_its_output_and_nothing_else() -> None:
    slot = collector()
    for token in range(1000):
        slot.put(TextDelta("x", [token]))
    assert len((await slot.get()).token_ids) == 1000
    assert not await ready(slot)
