"""Models that do not fit their device."""

import pytest
import torch

from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.models.placement import place

CUDA = torch.device("cuda", 0)


class MovedError(Exception):
    pass


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> torch.nn.Module:
    """4 MiB of weights, of which two layers share what counts once."""
    model = torch.nn.Sequential(torch.nn.Linear(1024, 1024, bias=False), torch.nn.Linear(1024, 1024, bias=False))
    model[1].weight = model[0].weight

    def moved(device: torch.device) -> None:
        raise MovedError

    monkeypatch.setattr(model, "to", moved)
    return model


def left(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (num_bytes, 8 * 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA L4")


def test_weights_that_do_not_fit_are_told_with_numbers(
    monkeypatch: pytest.MonkeyPatch, module: torch.nn.Module
) -> None:
    left(monkeypatch, 4 * 2**20 - 1)
    with pytest.raises(ModelLoadError, match=r"take 4\.0 MiB as float32; NVIDIA L4 has 4\.0 MiB of 8\.0 GiB left"):
        place(module, "org/name", CUDA)


def test_weights_that_fit_are_moved(monkeypatch: pytest.MonkeyPatch, module: torch.nn.Module) -> None:
    left(monkeypatch, 4 * 2**20)
    with pytest.raises(MovedError):
        place(module, "org/name", CUDA)


def test_on_a_cpu_nobody_asks() -> None:
    module = torch.nn.Linear(2, 2)
    place(module, "org/name", torch.device("cpu"))
    assert not module.training
    assert not module.weight.requires_grad
