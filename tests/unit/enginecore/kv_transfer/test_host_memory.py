"""Page-locked host memory, which a driver registers in pieces of whole slots and whole pages."""

import mmap

import pytest
import torch

from penstock_enginecore.kv_transfer.host_memory import HostMemory
from tests.fakes.fake_cudart import FakeCudart

PAGE = mmap.PAGESIZE


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeCudart:
    driver = FakeCudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    return driver


@pytest.mark.parametrize(
    ("num_slots", "slot_bytes", "pieces"),
    [
        (5, 4 * PAGE, [8 * PAGE, 8 * PAGE, 4 * PAGE]),
        (7, 3 * PAGE, [6 * PAGE, 6 * PAGE, 6 * PAGE, 3 * PAGE]),
        (3, 20 * PAGE, [20 * PAGE] * 3),  # a slot is never in two pieces
        (33, PAGE // 2, [8 * PAGE, 8 * PAGE, PAGE // 2]),
        (2 * PAGE, 3, [6 * PAGE]),
        (1, 5, [5]),
        (0, 8, []),
    ],
)
def test_exactly_the_memory_of_the_slots_is_locked_in_pieces(
    num_slots: int, slot_bytes: int, pieces: list[int], driver: FakeCudart
) -> None:
    host = HostMemory(num_slots, slot_bytes, pinned=True, piece=8 * PAGE)
    assert host.slots.shape == (num_slots, slot_bytes)
    assert not host.slots.any()
    begin = host.slots.data_ptr()
    assert list(driver.registered.values()) == pieces  # torch would round the sum up to a power of two
    for address in driver.registered:
        assert (address % PAGE, (address - begin) % slot_bytes) == (0, 0)
    assert sum(driver.registered.values()) == num_slots * slot_bytes
    host.slots.fill_(7)
    assert host.slots.numpy().sum() == 7 * num_slots * slot_bytes
    host.close()
    assert driver.registered == {}
    assert len(host.slots) == 0


def test_a_refused_piece_unlocks_the_others(driver: FakeCudart) -> None:
    driver.limit = 20 * PAGE
    with pytest.raises(MemoryError, match="cannot allocate 3 slots of 32768 bytes of host memory: .* CUDA error 2"):
        HostMemory(3, 8 * PAGE, pinned=True, piece=8 * PAGE)
    assert driver.registered == {}


def test_more_memory_than_there_are_addresses_is_a_memory_error(driver: FakeCudart) -> None:
    for pinned in (False, True):
        with pytest.raises(MemoryError, match="cannot allocate 2 slots of"):
            HostMemory(2, 1 << 62, pinned=pinned)


def test_a_driver_that_keeps_a_piece_is_told_in_the_log(driver: FakeCudart, caplog: pytest.LogCaptureFixture) -> None:
    host = HostMemory(2, PAGE, pinned=True)
    driver.registered.clear()
    host.close()
    assert "cannot unregister page-locked host memory: cuda_error=713" in caplog.text


def test_memory_for_a_cpu_is_not_locked(driver: FakeCudart) -> None:
    host = HostMemory(3, 100, pinned=False)
    assert not host.slots.any()
    assert driver.registered == {}
    host.close()
    assert len(host.slots) == 0
