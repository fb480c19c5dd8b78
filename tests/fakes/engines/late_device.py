"""CPU device that samples tokens itself, and whose tokens reach the host late."""

import threading
from functools import partial

import numpy as np
import pytest
import torch

from penstock_enginecore.executor.generation.runner import GenerationRunner
from penstock_enginecore.forward.cuda.sampler import DeviceLauncher
from penstock_enginecore.worker.device_thread import BeginCopy
from tests.fakes.models.recorded_launches import RecordedSampling
from tests.fakes.patience import PATIENCE


class HeldArrival:
    """``Arrival`` whose numbers arrive when a test calls ``release``, or that fails with ``error``."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._numbers = tensor.clone().numpy()
        self._there = threading.Event()
        self.error: Exception | None = None

    def release(self) -> None:
        self._there.set()

    def arrived(self) -> bool:
        return self._there.is_set()

    def wait(self) -> np.ndarray:
        assert self._there.wait(PATIENCE), "nobody lets the tokens arrive"
        if self.error is not None:
            raise self.error
        return self._numbers


class HeldCopies:
    """``BeginCopy`` that records the started copies in order."""

    def __init__(self) -> None:
        self.begun: list[HeldArrival] = []

    def __call__(self, tensor: torch.Tensor) -> HeldArrival:
        self.begun.append(HeldArrival(tensor))
        return self.begun[-1]


class LastMoment:
    """``Arrival`` whose numbers arrive only when a caller waits for them."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._numbers = tensor.clone().numpy()

    def arrived(self) -> bool:
        return False

    def wait(self) -> np.ndarray:
        return self._numbers


def choose_on_device(monkeypatch: pytest.MonkeyPatch, begin_copy: BeginCopy) -> None:
    """Let engines of this test sample tokens on the device, which is a CPU, and copy them with ``begin_copy``."""
    monkeypatch.setattr(
        "penstock_enginecore.forward.build.device_launcher",
        lambda device, uses, sampler, vocab, dtype: DeviceLauncher(vocab, device, RecordedSampling),
    )
    monkeypatch.setattr(
        "penstock_enginecore.executor.loading.GenerationRunner", partial(GenerationRunner, begin_copy=begin_copy)
    )
