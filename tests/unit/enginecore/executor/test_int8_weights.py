"""What weights of 8-bit integers cannot be had with is said before anything is loaded."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from penstock_common.errors import ConfigError
from penstock_enginecore.config import EngineCoreConfig
from penstock_enginecore.executor.loading import check_int8
from penstock_enginecore.models.errors import ModelLoadError
from tests.fakes.models.tiny_models import save_tiny_model


def configured(path: Path, *, kernels: Any = None, executor: Any = None, **model: Any) -> EngineCoreConfig:
    model = {"path": str(path), "quantization": "int8", **model}
    return msgspec.convert({"model": model, "kernels": kernels or {}, "executor": executor or {}}, EngineCoreConfig)


@pytest.mark.parametrize(
    ("settings", "device", "words"),
    [
        ({}, "cuda", "model.device is 'cuda', and CPUs alone compute by them"),
        ({"dtype": "bfloat16"}, "cpu", "model.dtype is 'bfloat16', and they are computed with in float32"),
        ({"kernels": {"isa": "off"}}, "cpu", "kernels.isa is 'off'"),
        ({"kernels": {"linear": False}}, "cpu", "kernels.linear is false"),
        ({"executor": {"tensor_parallel_size": 2}}, "cpu", "the executor has 2 workers"),
    ],
)
def test_settings_that_contradict_it_are_named(
    settings: dict[str, Any], device: str, words: str, tmp_path: Path
) -> None:
    save_tiny_model("llama", tmp_path)
    with pytest.raises(ConfigError, match=f"model.quantization is 'int8' but {words}.*set it to 'auto'"):
        check_int8(configured(tmp_path, **settings), torch.device(device))


def test_a_checkpoint_that_is_quantized_is_refused(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path)
    check_int8(configured(tmp_path), torch.device("cpu"))
    file = tmp_path / "config.json"
    config = json.loads(file.read_bytes())
    config["quantization_config"] = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
    file.write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match="model.quantization is 'int8' but the checkpoint is quantized already"):
        check_int8(configured(tmp_path), torch.device("cpu"))
    check_int8(configured(tmp_path, quantization="auto", dtype="bfloat16"), torch.device("cuda"))
