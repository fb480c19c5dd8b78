"""Linear layers that keep their quantized weights."""

import logging
from pathlib import Path

import pytest
import torch

from penstock_enginecore.attention.factory import create_backend
from penstock_enginecore.config import KernelsConfig, ModelConfig
from penstock_enginecore.forward.build import ForwardConfig, build_forward
from penstock_enginecore.forward.dummy_inputs import Probe, probe_logits
from penstock_enginecore.forward.modules import ModulesForward, probe_model
from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.models.loader import LoadedModel, load_model
from penstock_enginecore.models.quantization.layers import QuantizedLinear
from penstock_enginecore.models.quantization.loading import dequantize_kept
from tests.fakes.models.quantized_models import save_quantized_model

CPU = torch.device("cpu")


def load(path: Path, *, keep: bool = True) -> LoadedModel:
    return load_model(ModelConfig(path=str(path)), CPU, lambda line: None, lambda scheme: keep)


def logits(model: LoadedModel) -> torch.Tensor:
    with torch.inference_mode():
        forward = ModulesForward(probe_model(model, CPU, 16), create_backend("reference", CPU))
        return probe_logits(forward, Probe.prompt(model.vocab_size))


def quantized(model: LoadedModel) -> list[str]:
    return [name for name, module in model.module.named_modules() if isinstance(module, QuantizedLinear)]


@pytest.mark.parametrize(
    ("architecture", "form", "kept"),
    [
        ("qwen2", "awq", 14),
        ("qwen2", "fp8-blocks", 14),
        ("qwen3_moe", "compressed-int4", 8),
        ("gpt_oss", "mxfp4", 0),
    ],
)
def test_a_model_that_keeps_them_computes_as_one_that_does_not(
    architecture: str, form: str, kept: int, tmp_path: Path
) -> None:
    save_quantized_model(architecture, form, tmp_path, hidden_size=64)
    keeping = load(tmp_path)
    assert len(quantized(keeping)) == kept
    expected = logits(load(tmp_path, keep=False))
    assert torch.equal(logits(keeping), expected)
    dequantize_kept(keeping.module, keeping.dtype)
    assert quantized(keeping) == []
    assert torch.equal(logits(keeping), expected)


def test_the_log_tells_what_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_quantized_model("qwen3_moe", "fp8-blocks", tmp_path, hidden_size=64)
    with caplog.at_level(logging.INFO):
        load(tmp_path)
    [kept] = [r.getMessage() for r in caplog.records if "quantized" in r.getMessage()]
    assert kept == "8 linear layers and the experts of 2 layers keep their quantized weights (fp8 by blocks of 32x32)"


def test_layers_that_do_not_fit_when_dequantized_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> torch.nn.Linear:
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    save_quantized_model("llama", "awq", tmp_path)
    model = load(tmp_path)
    monkeypatch.setattr(QuantizedLinear, "dense", full)
    config = ForwardConfig(CPU, "auto", KernelsConfig(isa="off"), num_threads=1, block_size=16)
    with pytest.raises(ModelLoadError, match="LlamaForCausalLM .* do not fit when dequantized to float32: tried to"):
        build_forward(model, config)


def test_layers_that_no_decoder_takes_are_dequantized_before_they_serve(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_quantized_model("llama", "gptq", tmp_path)
    model = load(tmp_path)
    config = ForwardConfig(CPU, "auto", KernelsConfig(isa="off"), num_threads=1, block_size=16)
    with caplog.at_level(logging.WARNING):
        build_forward(model, config)
    assert quantized(model) == []
    assert (
        "dequantized the weights of linear layers and experts, because only the fused decoder computes with quantized weights, "
        "and the fused decoder is not used for this model memory=0.1 MiB" in caplog.text
    )
