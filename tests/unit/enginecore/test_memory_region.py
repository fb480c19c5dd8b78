"""Memory that is mapped and unmapped at fixed addresses."""

import pytest

from penstock_enginecore.cuda_virtual_memory import Region
from tests.fakes.models.fake_driver import LOST, FakeDriver


def test_memory_is_taken_in_chunks_as_it_is_needed_and_given_back_whole() -> None:
    driver = FakeDriver()
    region = Region(driver, 1000, chunk=256)
    assert (region.num_bytes, region.mapped_bytes, driver.used) == (1024, 0, 0)
    region.map(1)
    region.map(256)
    assert region.mapped_bytes == driver.used == 256
    region.map(257)
    region.map()
    region.map()
    assert region.mapped_bytes == driver.used == 1024
    address = region.memory.data_ptr()
    region.memory.fill_(7)
    region.unmap()
    assert (region.mapped_bytes, driver.used) == (0, 0)
    region.map()
    assert region.memory.data_ptr() == address
    assert (region.memory == LOST).all()
    region.close()
    assert driver.is_clean


def test_the_last_chunk_is_as_small_as_may_be() -> None:
    driver = FakeDriver()
    Region(driver, 300, chunk=256).map()
    assert driver.calls == ["create 256", "create 64"]


def test_what_does_not_fit_takes_nothing() -> None:
    driver = FakeDriver(room=700)
    region = Region(driver, 1000, chunk=256)
    region.map(256)
    with pytest.raises(MemoryError):
        region.map()
    assert region.mapped_bytes == driver.used == 256
    driver.room = 1024
    region.map()
    assert driver.used == 1024


def test_memory_that_cannot_be_mapped_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver()
    region = Region(driver, 64)

    def refuses(*args: object) -> None:
        raise RuntimeError("no access")

    monkeypatch.setattr(driver, "map", refuses)
    with pytest.raises(RuntimeError, match="no access"):
        region.map()
    assert driver.used == 0


def test_a_region_that_never_had_memory_is_not_read() -> None:
    with pytest.raises(RuntimeError, match="was read before physical memory was mapped to it"):
        _ = Region(FakeDriver(), 64).memory
