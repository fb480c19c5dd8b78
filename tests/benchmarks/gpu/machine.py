"""The measured device, and timing of work on the device."""

import importlib.util
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from typing import Any

import torch

from tests.device.phases import Row, Settings, Stage

SHOWN = ("torch", "triton", "transformers")


def stages(settings: Settings) -> list[Stage]:
    """Return one row: the device, and the versions of the software."""
    return [Stage("machine", [Row("machine", partial(describe, settings))])]


def describe(settings: Settings, _: None) -> dict[str, Any]:
    """Return name, compute capability and memory of the device. A CPU has no compute capability."""
    found: dict[str, Any] = {"device": "CPU", "capability": None, "python": platform.python_version()}
    found |= {name: version(name) for name in SHOWN if importlib.util.find_spec(name)}
    if settings.cpu:
        return found
    if not torch.cuda.is_available():
        return found | {"device": "none: torch finds no CUDA device"}
    properties = torch.cuda.get_device_properties(0)
    capability = 10 * properties.major + properties.minor
    return found | {"device": properties.name, "capability": capability, "memory": properties.total_memory}


def pick(settings: Settings) -> torch.device:
    """Return the first GPU, or the CPU if the settings select the CPU."""
    return torch.device("cpu") if settings.cpu else torch.device("cuda", 0)


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all submitted work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_seconds(device: torch.device, work: Callable[[], object], *, rounds: int, warm_up: int = 3) -> float:
    """Return the median time of ``work``, from the call to its end on the device."""
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
    """Return the seconds of one ``work`` in a sequence of ``rounds`` without waits, so that the device is never idle."""
    for _ in range(warm_up):
        work()
    synchronize(device)
    begun = time.perf_counter()
    for _ in range(rounds):
        work()
    synchronize(device)
    return (time.perf_counter() - begun) / rounds
