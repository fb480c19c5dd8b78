"""Weights and caches that leave a device and come back to where they were."""

import pytest
import torch

from penstock_enginecore.cuda_virtual_memory import KeptMemory
from tests.fakes.models.fake_driver import FakeDriver

CHUNK = 1024


def moved(driver: FakeDriver) -> tuple[KeptMemory, torch.nn.Module, torch.Tensor, list[int]]:
    """Yield two layers, a view of one of them, and the memory in use at each release."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Linear(30, 7, dtype=torch.bfloat16)).eval()
    module.requires_grad_(False)
    view = module[0].weight.t()[3:]
    used: list[int] = []
    kept = KeptMemory(driver, lambda: used.append(driver.used), chunk=CHUNK)
    kept.move_in(module.parameters())
    return kept, module, view, used


def numbers(module: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.clone() for parameter in module.parameters()]


def addresses(module: torch.nn.Module) -> list[int]:
    return [parameter.data_ptr() for parameter in module.parameters()]


def same(module: torch.nn.Module, before: list[torch.Tensor]) -> bool:
    return all(torch.equal(now, then) for now, then in zip(module.parameters(), before, strict=True))


def test_weights_move_in_chunk_by_chunk_with_all_that_lies_where_they_do() -> None:
    driver = FakeDriver()
    torch.manual_seed(0)
    expected = numbers(torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Linear(30, 7, dtype=torch.bfloat16)))
    _, module, view, used = moved(driver)
    assert same(module, expected)
    assert torch.equal(view, module[0].weight.t()[3:])
    assert view.untyped_storage().data_ptr() == module[1].bias.untyped_storage().data_ptr()
    assert all((address - addresses(module)[0]) % 256 == 0 for address in addresses(module))
    assert driver.used == used[-1] == 3584  # 2400, 120, 420 and 14 bytes, each at a multiple of 256
    assert len(used) == 2


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleep_frees_the_device_and_a_wake_up_brings_all_back_to_its_place(level: int) -> None:
    driver = FakeDriver()
    kept, module, view, _ = moved(driver)
    cache = kept.empty(5, 64, torch.float16)
    cache.fill_(1)
    before, places = numbers(module), addresses(module)
    kept.sleep(level)
    assert driver.used == 0
    assert (kept.weights, kept.cache) == (("on the host" if level == 1 else "dropped"), "dropped")
    assert not same(module, before)
    assert kept.wake_weights() is (level == 1)
    assert addresses(module) == places
    if level == 2:  # the engine reads them again when it wakes
        for parameter, number in zip(module.parameters(), before, strict=True):
            parameter.copy_(number)
        kept.weights_are_read()
    assert same(module, before)
    assert torch.equal(view, module[0].weight.t()[3:])
    kept.wake_cache()
    assert not cache.any()
    assert (kept.weights, kept.cache) == ("here", "here")
    assert kept.wake_weights() is True
    kept.wake_cache()
    del cache
    kept.close()
    assert driver.is_clean


def test_a_deeper_sleep_forgets_what_a_lighter_one_kept() -> None:
    kept, _, _, _ = moved(FakeDriver())
    kept.sleep(1)
    kept.sleep(1)
    assert kept.weights == "on the host"
    kept.sleep(2)
    assert kept.weights == "dropped"
    assert kept.wake_weights() is False
    assert kept.weights == "dropped"  # the weights are read again later, which may fail
    kept.sleep(1)
    assert kept.weights == "dropped"
    assert kept.wake_weights() is False


def test_weights_wake_before_the_cache_and_a_sleep_takes_what_is_awake() -> None:
    driver = FakeDriver()
    kept, module, _, _ = moved(driver)
    kept.empty(5, 64, torch.float16)
    before = numbers(module)
    kept.sleep(1)
    assert kept.wake_weights()
    assert (driver.used, kept.cache) == (3584, "dropped")
    kept.sleep(1)
    kept.wake_weights()
    kept.wake_cache()
    assert same(module, before)


def test_a_wake_up_without_enough_memory_keeps_sleeping_and_may_be_retried() -> None:
    driver = FakeDriver()
    kept, module, _, _ = moved(driver)
    caches = [kept.empty(8, 64, torch.float16) for _ in range(2)]
    before = numbers(module)
    kept.sleep(1)
    driver.room = 3000  # another process has allocated the rest of the memory
    with pytest.raises(MemoryError):
        kept.wake_weights()
    assert (kept.weights, driver.used) == ("on the host", 0)
    driver.room = 3584 + 1024
    assert kept.wake_weights()
    assert same(module, before)
    with pytest.raises(MemoryError):
        kept.wake_cache()
    assert (kept.cache, driver.used) == ("dropped", 3584)
    driver.room = 2**20
    kept.wake_cache()
    assert not any(cache.any() for cache in caches)


def test_a_model_without_weights_keeps_none() -> None:
    driver = FakeDriver()
    kept = KeptMemory(driver, lambda: None)
    kept.move_in([torch.empty(0)])
    kept.sleep(1)
    assert kept.wake_weights() is True
    assert driver.is_clean
