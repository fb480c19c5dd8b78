"""Copies of blocks on a device go through a ring of pieces, for blocks and pieces of all sizes."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_enginecore.kv_transfer.kv_copy import WorkerCopies
from penstock_enginecore.kv_transfer.staged_blocks import NUM_PIECES, StagedBlocks, plan_pieces
from penstock_enginecore.worker.staging import StagingRing
from tests.fakes.deferred_stream import DeferredStream
from tests.fakes.patience import PATIENCE

CPU = torch.device("cpu")


def pool(widths, num_blocks=9):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 256, (num_blocks, width), dtype=torch.uint8, generator=generator) for width in widths]


def content(memory, block):
    return b"".join(tensor[block].numpy().tobytes() for tensor in memory)


def staged(piece_bytes):
    stream = DeferredStream()
    return StagedBlocks(StagingRing(NUM_PIECES, piece_bytes, stream, CPU)), stream


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([1, 8, 20, 32, 48, 200]), min_size=1, max_size=4),
    st.lists(st.integers(0, 8), max_size=9),
    st.sampled_from([16, 48, 64, 256, 1024]),
)
def test_blocks_are_read_and_written_as_without_a_ring(widths, ids, piece_bytes) -> None:
    memory = pool(widths)
    before = [content(memory, block) for block in range(9)]
    blocks, stream = staged(piece_bytes)
    contents = blocks.read(memory, ids)
    assert contents == [before[block] for block in ids]
    assert stream.running == 0
    other = pool(widths, 9 + len(ids))
    kept = [content(other, block) for block in range(9)]
    blocks.write(other, range(9, 9 + len(ids)), contents)
    assert stream.running == 0
    assert [content(other, block) for block in range(9, 9 + len(ids))] == contents
    assert [content(other, block) for block in range(9)] == kept


@given(st.lists(st.integers(1, 300), min_size=1, max_size=4), st.integers(1, 40), st.sampled_from([16, 64, 512, 4096]))
def test_pieces_hold_each_byte_once(widths, num_blocks, piece_bytes) -> None:
    found = set()
    for parts in plan_pieces(widths, num_blocks, piece_bytes):
        assert [part.place for part in parts] == sorted(part.place for part in parts)
        assert all(one.end <= two.place for one, two in pairwise(parts))
        assert parts[-1].end <= piece_bytes
        for part in parts:
            assert part.place % 16 == part.column % 16 == 0
            assert part.offset == sum(widths[: part.tensor]) + part.column
            own = {
                (part.tensor, block, column)
                for block in range(part.first, part.first + part.num_blocks)
                for column in range(part.column, part.column + part.width)
            }
            assert not own & found
            found |= own
    assert len(found) == num_blocks * sum(widths)


def test_many_blocks_share_a_piece_and_the_device_copies_ahead() -> None:
    assert [parts[0].num_blocks for parts in plan_pieces([32, 96], 20, 1024)] == [8, 8, 4]
    blocks, stream = staged(1024)
    blocks.read(pool([32, 96], 20), range(20))
    assert stream.calls[:4] == ["launch", "launch", "wait", "run"]


def test_contents_stay_when_the_ring_is_used_again() -> None:
    memory = pool([64])
    blocks, _ = staged(128)
    first = blocks.read(memory, [0, 1, 2])
    blocks.read(memory, [3, 4, 5])
    assert first == [content(memory, block) for block in (0, 1, 2)]
    assert not first[0].readonly  # memory of its own


@pytest.mark.parametrize("fail_at", range(4))
@pytest.mark.parametrize("method", ["read", "write"])
def test_after_an_error_nothing_runs_and_the_ring_can_be_used(method, fail_at) -> None:
    memory = pool([64])
    before = [content(memory, block) for block in range(9)]
    blocks, stream = staged(128)
    stream.fail_at = fail_at
    arguments = [bytes(64)] * 8 if method == "write" else None
    with pytest.raises(OSError, match="refuses"):
        blocks.write(memory, range(8), arguments) if arguments else blocks.read(memory, range(8))
    assert stream.running == 0
    if method == "write":  # two blocks a piece
        assert [content(memory, block) for block in range(8)] == [bytes(64)] * 2 * fail_at + before[2 * fail_at : 8]
    blocks.write(memory, range(9), before)
    assert blocks.read(memory, range(9)) == before


def test_contents_of_other_sizes_are_refused_before_a_write() -> None:
    memory = pool([64, 8])
    before = [content(memory, block) for block in range(9)]
    blocks, stream = staged(128)
    with pytest.raises(ValueError, match="a block has 72 bytes, but its content has only 65 bytes"):
        blocks.write(memory, [0, 1], [bytes(72), bytes(65)])
    with pytest.raises(ValueError, match="zip"):
        blocks.write(memory, [0, 1], [bytes(72)])
    assert stream.calls == []
    assert [content(memory, block) for block in range(9)] == before


def test_the_ring_can_be_allocated_before_the_first_copy() -> None:
    memory = pool([64])
    copies = WorkerCopies(lambda: memory, open_stream=lambda device: DeferredStream(), piece_bytes=256)
    copies.begin("prepare").result(PATIENCE)
    prepared = copies._staged
    assert prepared is not None
    assert copies.begin("read", [1]).result(PATIENCE) == [content(memory, 1)]
    assert copies._staged is prepared
    copies.stop()


def test_a_worker_s_copies_end_before_it_stops() -> None:
    memory, stream = pool([64, 24]), DeferredStream()
    before = [content(memory, block) for block in range(9)]
    copies = WorkerCopies(lambda: memory, open_stream=lambda device: stream, piece_bytes=256)
    read = copies.begin("read", [1, 2, 3, 4, 5, 6, 7])
    written = copies.begin("write", [0, 8], [before[4], memoryview(before[5])])
    failed = copies.begin("write", [1], [b"short"])
    again = copies.begin("read", [0, 8, 1])
    copies.stop()
    assert read.result(PATIENCE) == before[1:8]
    assert written.result(PATIENCE) is None
    assert isinstance(failed.exception(PATIENCE), ValueError)
    assert again.result(PATIENCE) == [before[4], before[5], before[1]]
    assert stream.running == 0
