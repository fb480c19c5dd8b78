"""The device that is measured, and how long work on it takes."""

import statistics
import time
from collections.abc import Callable

import torch


def pick(*, tiny: bool) -> torch.device:
    """The first GPU; the CPU for a tiny run."""
    return torch.device("cpu") if tiny else torch.device("cuda", 0)


def name(device: torch.device) -> str:
    """As its maker calls it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_seconds(device: torch.device, work: Callable[[], object], *, rounds: int, warm_up: int = 3) -> float:
    """Of ``work``, from its call to its end on the device."""
    for _ in range(warm_up):
        work()
    synchronize(device)
    seconds = []
    for _ in range(rounds):
        begun = time.perf_counter()
        work()
        synchronize(device)
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds)


def seconds_in_a_row(device: torch.device, work: Callable[[], object], *, rounds: int, warm_up: int = 3) -> float:
    """Of one ``work`` among ``rounds`` that follow each other without a wait: what a device takes that is never idle."""
    for _ in range(warm_up):
        work()
    synchronize(device)
    begun = time.perf_counter()
    for _ in range(rounds):
        work()
    synchronize(device)
    return (time.perf_counter() - begun) / rounds
