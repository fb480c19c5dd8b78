"""Tile sizes by device: the file of the device in use replaces that of the H200."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from penstock_enginecore.attention.base import AttentionParams
from penstock_enginecore.forward.cuda.kernel_api import Float8Weight
from tests.fakes.models.interpreted_kernels import interpreted
from tests.unit.enginecore.attention.test_backends import make_step
from tests.unit.enginecore.forward.cuda.kernels.paged import Paged

configurations = interpreted("configurations")
attention, latent = interpreted("attention"), interpreted("latent_attention")
invariant, grouped, quantized = interpreted("invariant"), interpreted("grouped"), interpreted("quantized")
DEVICE = "Fake GPU"
ENDS = torch.tensor([2], dtype=torch.int32)


def float8(*shape: int) -> Float8Weight:
    return Float8Weight(torch.zeros(*shape, 8, 16, dtype=torch.int16), torch.ones(*shape, 1, 8), 32, 16)


def attend() -> None:
    Paged.of(make_step([1], [20], block_size=16)).attend(AttentionParams(1.0))


LAUNCHES: dict[str, tuple[object, Callable[[], None]]] = {
    "product": (
        invariant,
        lambda: invariant.invariant_product(torch.zeros(2, 16), torch.zeros(8, 16), None, 1.0, torch.empty(2, 8)),
    ),
    "grouped product": (
        grouped,
        lambda: grouped.grouped_product(torch.zeros(2, 16), torch.zeros(1, 8, 16), None, ENDS, torch.empty(2, 8)),
    ),
    "quantized product": (
        quantized,
        lambda: quantized.quantized_product(torch.zeros(2, 32), float8(), None, 1.0, torch.empty(2, 8)),
    ),
    "quantized experts": (
        quantized,
        lambda: quantized.quantized_grouped_product(torch.zeros(2, 32), float8(1), None, ENDS, torch.empty(2, 8)),
    ),
    "attention": (attention, attend),
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_kernels_use_the_tiles_of_their_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, launch = LAUNCHES[name]
    real, seen = configurations.load_tuned, []

    def load(device: str) -> object:
        seen.append(device)
        return real(device)

    monkeypatch.setattr(configurations, "load_tuned", load)
    monkeypatch.setattr(module, "device_name", lambda device: f"{DEVICE} {name}")
    launch()
    assert set(seen) == {f"{DEVICE} {name}"}


def test_a_file_for_a_device_replaces_the_usual_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = configurations.load_tuned("another GPU")
    own = configurations.msgspec.structs.replace(usual, device=DEVICE, experts=usual.experts[-1:])
    (tmp_path / "fake_gpu.json").write_bytes(configurations.msgspec.json.encode(own))
    monkeypatch.setattr(configurations, "_TUNED", tmp_path)
    assert configurations.load_tuned(DEVICE).experts == usual.experts[-1:]
    assert configurations.expert_tiles(1, usual.experts[-1].kind, DEVICE) == usual.experts[-1]


def test_devices_have_the_name_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")
    assert configurations.device_name(torch.device("cpu")) == ""
    assert configurations.device_name(torch.device("cuda:6")) == "GPU 6"
