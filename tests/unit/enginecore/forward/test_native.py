"""Encoders whose linear layers run on the native kernels."""

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock_enginecore.config import KernelsConfig, ModelConfig
from penstock_enginecore.forward.native import pack_towers
from penstock_enginecore.models.loader import load_model
from penstock_enginecore.models.multimodal.base import MediaEncoder
from penstock_enginecore.native.backend import NativeBackend, open_backend
from penstock_enginecore.native.linear import PackedLinear
from tests.fakes.multimodal_items import audio_tensors, features, image_tensors, item
from tests.fakes.multimodal_models import AUDIO_FAMILIES, FAMILIES, save_multimodal_model

CPU = torch.device("cpu")


def kernels() -> NativeBackend:
    native = open_backend(KernelsConfig(), CPU, 1)
    if native is None:
        pytest.skip("no kernels are built")
    return native


def encode(
    encoder: MediaEncoder, tensors: dict[str, torch.Tensor], count: int, modality: Any, budget: int
) -> torch.Tensor:
    encoder.start(item(tensors, count, modality))
    while encoder.has_work:
        for done in encoder.advance(budget):
            assert done.rows is not None, done.failure
            return done.rows
    raise AssertionError("nothing was encoded")


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_those_of_transformers_but_for_the_order_of_sums(tmp_path: Path, family: str) -> None:
    oracle = save_multimodal_model(family, tmp_path)
    encoder = load_model(ModelConfig(path=str(tmp_path)), CPU, lambda line: None, with_towers=True).encoder
    assert encoder is not None
    packed = pack_towers(encoder, kernels())
    linears = [each for module in encoder.modules for each in module.modules() if isinstance(each, torch.nn.Linear)]
    assert packed == len(linears) > 2
    assert all(isinstance(each, PackedLinear) for each in linears)
    modality: Any = "audio" if family in AUDIO_FAMILIES else "image"
    if modality == "audio":
        tensors = normalized = audio_tensors(family, tmp_path)
    else:
        tensors, normalized = image_tensors(family, tmp_path), image_tensors(family, tmp_path, raw=False)
    expected = features(oracle, modality, normalized)
    whole = encode(encoder, tensors, len(expected), modality, 10**9)
    torch.testing.assert_close(whole, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(encode(encoder, tensors, len(expected), modality, 0), whole)


def test_without_kernels_towers_stay_as_they_are(tmp_path: Path) -> None:
    save_multimodal_model("llava", tmp_path)
    encoder = load_model(ModelConfig(path=str(tmp_path)), CPU, lambda line: None, with_towers=True).encoder
    assert pack_towers(encoder, None) == 0
    assert pack_towers(None, kernels()) == 0
    assert pack_towers(encoder, open_backend(KernelsConfig(linear=False), CPU, 1)) == 0


def test_a_layer_that_computes_something_else_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save_multimodal_model("llava", tmp_path)
    encoder = load_model(ModelConfig(path=str(tmp_path)), CPU, lambda line: None, with_towers=True).encoder
    forward = PackedLinear.forward
    monkeypatch.setattr(PackedLinear, "forward", lambda self, x: forward(self, x) + (self.out_features == 48))
    native = kernels()
    assert pack_towers(encoder, native) > 0
    assert "2 of 14 linear layers of media encoders use PyTorch instead of native kernels" in caplog.text
