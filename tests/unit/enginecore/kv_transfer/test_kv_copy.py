"""Blocks are copied whole, each tensor's part of them, to the host and back."""

import pytest
import torch

from penstock_enginecore.kv_transfer.core.base import BlockFacts, Copy
from penstock_enginecore.kv_transfer.kv_copy import Copier, WorkerCopies


@pytest.fixture
def memory():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 256, (6, size), dtype=torch.uint8, generator=generator) for size in (32, 8, 20)]


@pytest.fixture
def copier(memory):
    copies = WorkerCopies(lambda: memory)
    yield Copier(copies.begin, BlockFacts(copies.block_bytes, "", ""))
    copies.stop()


def row(memory, block):
    return b"".join(tensor[block].numpy().tobytes() for tensor in memory)


def test_blocks_go_to_slots_and_come_back_elsewhere(memory, copier):
    assert copier.block_bytes == 60
    copier.reserve(3).result(timeout=30)
    before = [row(memory, block) for block in range(6)]
    copier.save([Copy(4, 2), Copy(1, 0)]).result(timeout=30)
    assert copier.read_slots([2, 0]).result(timeout=30) == [before[4], before[1]]
    copier.load([Copy(5, 2), Copy(0, 0)]).result(timeout=30)
    assert [row(memory, block) for block in range(6)] == [before[1], *before[1:5], before[4]]


def test_bytes_of_blocks_and_slots_can_be_read_and_written(memory, copier):
    copier.reserve(2).result(timeout=30)
    before = [row(memory, block) for block in range(6)]
    contents = copier.read([3, 2]).result(timeout=30)
    assert contents == [before[3], before[2]]
    copier.write([0, 1], [contents[0], memoryview(contents[1])]).result(timeout=30)
    assert [row(memory, block) for block in (0, 1, 2)] == [before[3], before[2], before[2]]
    copier.write_slots([1, 0], contents).result(timeout=30)
    copier.load([Copy(4, 1), Copy(5, 0)]).result(timeout=30)
    assert [row(memory, 4), row(memory, 5)] == contents


def test_copies_are_made_in_the_order_of_the_calls(memory, copier):
    copier.reserve(1).result(timeout=30)
    before = row(memory, 0)
    futures = [copier.save([Copy(0, 0)]), copier.load([Copy(1, 0)]), copier.save([Copy(2, 0)])]
    for future in futures:
        future.result(timeout=30)
    assert row(memory, 1) == before


@pytest.mark.parametrize("written_as", ["saved", "bytes"])
def test_checked_slots_with_a_flipped_bit_are_neither_loaded_nor_read(memory, written_as):
    copies = WorkerCopies(lambda: memory, checked=True)
    copier = Copier(copies.begin, BlockFacts(copies.block_bytes, "", ""))
    copier.reserve(3).result(timeout=30)
    before = [row(memory, block) for block in range(6)]
    if written_as == "saved":
        copier.save([Copy(4, 2), Copy(1, 0)]).result(timeout=30)
    else:
        copier.write_slots([2, 0], [before[4], before[1]]).result(timeout=30)
    copies._host.slots[2, 17] ^= 8
    assert copier.load([Copy(5, 2), Copy(0, 0)]).result(timeout=30) == [2]
    assert [row(memory, block) for block in range(6)] == [before[1], *before[1:]]
    assert copier.read_slots([2, 0]).result(timeout=30) == [None, before[1]]
    copier.save([Copy(3, 2)]).result(timeout=30)
    assert copier.load([Copy(5, 2)]).result(timeout=30) == []
    assert row(memory, 5) == before[3]
    copies.stop()


def test_slots_of_blocks_are_not_checked(memory, copier):
    copier.reserve(1).result(timeout=30)
    copier.save([Copy(4, 0)]).result(timeout=30)
    assert copier.load([Copy(5, 0)]).result(timeout=30) == []


def test_a_worker_without_such_layers_copies_nothing(copier):
    """The joined bytes of all workers leave out its part, which is empty and not damaged."""
    copies = WorkerCopies(list, checked=True)
    assert copies.block_bytes == 0
    copies.begin("reserve", 2).result(timeout=30)
    copies.begin("save", [Copy(3, 1)]).result(timeout=30)
    assert copies.begin("load", [Copy(3, 1)]).result(timeout=30) == []
    assert copies.begin("read", [3, 4]).result(timeout=30) == [b"", b""]
    assert copies.begin("read_slots", [1]).result(timeout=30) == [b""]
    copies.begin("write", [3], [memoryview(b"")]).result(timeout=30)
    copies.begin("write_slots", [1], [memoryview(b"")]).result(timeout=30)
    copies.stop()


def test_what_cannot_be_copied_says_so(memory, copier):
    with pytest.raises(RuntimeError, match="reserve"):
        copier.save([Copy(0, 0)]).result(timeout=30)
    copies = WorkerCopies(lambda: None)
    with pytest.raises(RuntimeError, match="the KV cache is not allocated, or the engine sleeps"):
        copies.begin("read", [0]).result(timeout=30)
    copies.stop()
