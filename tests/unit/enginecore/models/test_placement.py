"""Models that do not fit their device."""

from pathlib import Path

import pytest
import torch
from transformers import modeling_utils

from penstock_enginecore.config import ModelConfig
from penstock_enginecore.models import attention_hook
from penstock_enginecore.models.dtypes import Dtypes
from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.models.loader import load_weights
from penstock_enginecore.models.placement import check_weights_fit, place, read_to
from tests.fakes.models.tiny_models import save_tiny_model

CUDA = torch.device("cuda", 0)


class MovedError(Exception):
    pass


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> torch.nn.Module:
    """Return a module with 4 MiB of weights. Weights that two layers share count once."""
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


def test_weights_are_not_read_into_one_segment_of_the_size_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Merged weights would leave holes in such a segment."""
    allocated: list[object] = []
    monkeypatch.setattr(modeling_utils, "caching_allocator_warmup", lambda *of: allocated.append(of))
    with read_to(CUDA):
        modeling_utils.caching_allocator_warmup("model", {"": CUDA}, None)
        assert allocated == []
    modeling_utils.caching_allocator_warmup("model", {"": CUDA}, None)
    assert len(allocated) == 1


def test_on_a_cpu_nobody_asks() -> None:
    module = torch.nn.Linear(2, 2)
    place(module, "org/name", torch.device("cpu"))
    assert not module.training
    assert not module.weight.requires_grad


def test_weights_go_from_their_files_straight_to_the_device(tmp_path: Path) -> None:
    expected = save_tiny_model("llama", tmp_path).state_dict()
    attention_hook.register()
    config, lines = ModelConfig(path=str(tmp_path)), list[str]()
    loaded = load_weights(config, Dtypes.of(torch.float32), torch.device("meta"), lines.append)
    assert {name: tensor.device.type for name, tensor in loaded.state_dict().items()} == dict.fromkeys(expected, "meta")
    assert lines[-1].startswith("loading weights: ")
    again = load_weights(config, Dtypes.of(torch.float32), torch.device("cpu"), lines.append)
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def test_files_that_do_not_fit_are_told_before_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_tiny_model("llama", tmp_path)
    num_bytes = 2 * sum(tensor.numel() for tensor in model.state_dict().values())
    left(monkeypatch, num_bytes - 1)
    with pytest.raises(ModelLoadError, match=r"its weights take .* as bfloat16; NVIDIA L4 has"):
        load_weights(ModelConfig(path=str(tmp_path)), Dtypes.of(torch.bfloat16), CUDA, lambda line: None)
    check_weights_fit(num_bytes - 1, "org/name", torch.bfloat16, CUDA)
