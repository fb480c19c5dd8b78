"""A step's outputs, split into frames that do not exceed the frontend's limit."""

import msgspec
import pytest

from penstock_common.types.kv_transfer import BlockMedia, BlockRemoved, BlockStored, KvMedium
from penstock_common.types.outputs import (
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
    Logprobs,
    PrefillStats,
    SchedulerStats,
    TokenColumns,
    UtilityOutput,
)
from penstock_enginecore.rpc.convert import outputs_to_proto
from penstock_enginecore.rpc.frames import split

LIMIT = 64 * 1024


def logprobs(positions: int, entries: int) -> Logprobs:
    made = Logprobs()
    for position in range(positions):
        made.add([2**31 + position] * entries, [-1.0] * entries, [2**31] * entries)
    return made


def frames(outputs: EngineCoreOutputs) -> list[EngineCoreOutputs]:
    """Return the frames of a step, and check that none is too large."""
    made = split(outputs, LIMIT)
    assert made.refused == []
    assert max(outputs_to_proto(frame).ByteSize() for frame in made.frames) <= LIMIT
    return made.frames


def test_many_outputs_go_in_order_over_several_frames() -> None:
    outputs = [EngineCoreOutput(request_id=f"r{i}", new_token_ids=[2**31] * 50) for i in range(500)]
    made = frames(EngineCoreOutputs(outputs=list(outputs), timestamp=7.0))
    assert len(made) > 1
    assert [output for frame in made for output in frame.outputs] == outputs
    assert {frame.timestamp for frame in made} == {7.0}


def test_a_request_has_ended_in_the_frame_of_its_last_output() -> None:
    ids = [f"r{i}" for i in range(500)]
    outputs = [EngineCoreOutput(request_id=i, new_token_ids=[2**31] * 50, finish_reason=FinishReason.STOP) for i in ids]
    made = frames(EngineCoreOutputs(outputs=outputs, finished_requests=[*ids, "silent"]))
    assert len(made) > 1
    *others, last = made
    for frame in others:
        assert frame.finished_requests == [output.request_id for output in frame.outputs]
    assert last.finished_requests == [*(output.request_id for output in last.outputs), "silent"]


def test_the_statistics_are_told_once_and_last() -> None:
    outputs = [EngineCoreOutput(request_id=f"r{i}", new_token_ids=[2**31] * 50) for i in range(500)]
    *others, last = frames(EngineCoreOutputs(outputs=outputs, scheduler_stats=SchedulerStats(num_running_reqs=3)))
    assert [frame.scheduler_stats for frame in others] == [None] * len(others)
    assert last.scheduler_stats == SchedulerStats(num_running_reqs=3)


def test_log_probabilities_are_cut_by_position() -> None:
    prompt, own = logprobs(700, 21), logprobs(9, 1000)
    output = EngineCoreOutput(
        request_id="r",
        offset=4,
        new_token_ids=list(range(9)),
        new_logprobs=own,
        new_prompt_logprobs=prompt,
        prefill_stats=PrefillStats(num_prompt_tokens=701, num_cached_tokens=0),
        finish_reason=FinishReason.LENGTH,
    )
    pieces = [
        piece
        for frame in frames(EngineCoreOutputs(outputs=[output], finished_requests=["r"]))
        for piece in frame.outputs
    ]
    joined, joined_prompt, token_ids = Logprobs(), Logprobs(), []
    for piece in pieces:
        assert piece.offset == 4 + len(token_ids)
        token_ids += piece.new_token_ids
        if piece.new_logprobs is not None:
            assert len(piece.new_logprobs) == len(piece.new_token_ids)
            joined.extend(piece.new_logprobs)
        if piece.new_prompt_logprobs is not None:
            assert not token_ids
            joined_prompt.extend(piece.new_prompt_logprobs)
    assert (token_ids, joined, joined_prompt) == (list(range(9)), own, prompt)
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + [FinishReason.LENGTH]
    assert pieces[-1].prefill_stats is not None


def test_one_position_that_no_frame_holds_ends_its_request_alone() -> None:
    small = EngineCoreOutput(request_id="small", new_token_ids=[1])
    wide = EngineCoreOutput(request_id="wide", offset=2, new_token_ids=[1], new_logprobs=logprobs(1, 9000))
    made = split(EngineCoreOutputs(outputs=[small, wide]), LIMIT)
    assert made.refused == ["wide"]
    (frame,) = made.frames
    assert frame.outputs[0] == small
    error = frame.outputs[1].error
    assert error is not None
    assert (frame.outputs[1].offset, frame.outputs[1].finish_reason) == (2, FinishReason.ERROR)
    assert (error.code, error.reason) == ("RESOURCE_EXHAUSTED", "MESSAGE_TOO_LARGE")


def test_an_answer_to_a_call_that_no_frame_holds_is_an_error() -> None:
    (frame,) = frames(EngineCoreOutputs(utility_output=UtilityOutput(call_id=3, result=bytes(LIMIT))))
    assert frame.utility_output is not None
    assert frame.utility_output.call_id == 3
    assert frame.utility_output.error is not None
    assert frame.utility_output.error.message.startswith("the answer to the utility call has 65536 bytes")


def test_blocks_that_were_stored_together_are_told_in_a_chain() -> None:
    hashes = [bytes([i % 256] * 15 + [i // 256]) for i in range(3000)]
    media = [[BlockMedia(f"{i:064x}", -(2**31) + i), BlockMedia("other", i)] for i in range(3000)]
    event = BlockStored(
        block_hashes=hashes,
        parent_hash=b"p",
        token_ids=[2**31] * 12_000,
        block_size=4,
        lora_name="\N{SHIP}" * 256,
        extra_keys=media,
    )
    events = [e for frame in frames(EngineCoreOutputs(kv_events=[event])) for e in frame.kv_events]
    parent = b"p"
    for each in events:
        assert isinstance(each, BlockStored)
        assert each.parent_hash == parent
        assert each.lora_name == event.lora_name
        assert len(each.token_ids) == 4 * len(each.block_hashes)
        parent = each.block_hashes[-1]
    assert [h for each in events if isinstance(each, BlockStored) for h in each.block_hashes] == hashes
    assert [keys for each in events if isinstance(each, BlockStored) for keys in each.extra_keys] == media


@pytest.mark.parametrize("medium", [KvMedium.DEVICE, KvMedium.DISK])
def test_blocks_that_were_removed_together_are_told_in_order(medium: KvMedium) -> None:
    hashes = [bytes([i % 256] * 15 + [i // 256]) for i in range(5000)]
    made = frames(EngineCoreOutputs(kv_events=[BlockRemoved(block_hashes=hashes, medium=medium)]))
    events = [e for f in made for e in f.kv_events if isinstance(e, BlockRemoved)]
    assert [h for e in events for h in e.block_hashes] == hashes
    assert {e.medium for e in events} == {medium}


def test_blocks_outside_the_device_have_no_parent_in_any_frame() -> None:
    hashes = [bytes([i % 256] * 15 + [i // 256]) for i in range(5000)]
    event = BlockStored(block_hashes=hashes, parent_hash=b"", token_ids=[], block_size=16, medium=KvMedium.HOST)
    events = [e for f in frames(EngineCoreOutputs(kv_events=[event])) for e in f.kv_events]
    assert len(events) > 1
    assert [h for e in events if isinstance(e, BlockStored) for h in e.block_hashes] == hashes
    assert {(e.parent_hash, e.medium, len(e.token_ids)) for e in events if isinstance(e, BlockStored)} == {
        (b"", KvMedium.HOST, 0)
    }


@pytest.mark.parametrize("count", [0, 3])
def test_outputs_that_fit_stay_in_one_frame(count: int) -> None:
    outputs = EngineCoreOutputs(
        outputs=[EngineCoreOutput(request_id="r")] * count, finished_requests=["r"] * bool(count)
    )
    (frame,) = frames(outputs)
    assert frame == msgspec.structs.replace(outputs)


@pytest.mark.parametrize("count", [1, 3, 40])
def test_columns_that_are_larger_than_a_frame_go_in_order_over_several(count: int) -> None:
    columns = TokenColumns()
    for number in range(1, 10_001):
        columns.add(number, number, [2**31] * (count if number % 2 else 1), 50 if number == 9000 else 0)
    made = frames(EngineCoreOutputs(tokens=columns, outputs=[EngineCoreOutput(request_id="r")]))
    assert len(made) > 1
    assert [row for frame in made if frame.tokens for row in frame.tokens.rows()] == list(columns.rows())
    assert [row for frame in made if frame.tokens for row in frame.tokens.drafted()] == [(9000, 50, 0)]
    assert [bool(frame.outputs) for frame in made] == [False] * (len(made) - 1) + [True]
