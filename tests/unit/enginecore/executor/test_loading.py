"""Configurations that refuse batch invariance before loading, and those that support it."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from penstock_common.errors import ConfigError
from penstock_enginecore.config import EngineCoreConfig, ExecutorConfig, KernelsConfig, ModelConfig
from penstock_enginecore.executor.loading import (
    check_batch_invariant,
    check_computed,
    check_float8,
    check_int8,
    load_runner,
)
from penstock_enginecore.models.errors import ModelLoadError
from tests.fakes.models.tiny_models import save_tiny_model


def check(
    device: str = "cuda", backend: str = "auto", task: str = "generate", workers: int = 1, **kernels: Any
) -> None:
    config = EngineCoreConfig(
        model=ModelConfig(path="model", attention_backend=backend),
        executor=ExecutorConfig(tensor_parallel_size=workers),
        kernels=KernelsConfig(**{"batch_invariant": True} | kernels),
    )
    check_batch_invariant(config, torch.device(device), task)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_model_that_a_decoder_may_serve_is_loaded(device: str) -> None:
    check(device)
    check(device, task="embed", batch_invariant=False)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"decoder": False}, "kernels.decoder is false"),
        ({"device": "cpu", "isa": "off"}, "kernels.isa is 'off'"),
        ({"device": "cpu", "attention": False}, "kernels.attention is false"),
        ({"backend": "triton"}, "model.attention_backend is 'triton', and decoders are used only with 'auto'"),
        ({"task": "embed"}, "the task of the model is embed, and decoders support only generate"),
        ({"workers": 2}, "the executor has 2 workers, and batch invariance needs exactly one"),
    ],
)
def test_where_no_decoder_is_tried_it_is_refused_with_the_reason(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=f"kernels.batch_invariant is true, but {said}"):
        check(**changes)
    check(**changes, batch_invariant=False)


@pytest.mark.parametrize("kernels", [{"isa": "off"}, {"attention": False}])
def test_what_only_cpus_need_is_not_asked_of_gpus(kernels: dict[str, Any]) -> None:
    check("cuda", **kernels)


def test_an_engine_is_told_before_its_weights_are_read() -> None:
    kernels = KernelsConfig(isa="off", batch_invariant=True)
    config = EngineCoreConfig(model=ModelConfig(path="/nowhere", task="generate"), kernels=kernels)
    with pytest.raises(ConfigError, match="kernels.batch_invariant is true, but kernels.isa is 'off'"):
        load_runner(config, torch.device("cpu"), lambda line: None)


# Features that do not support 8-bit integer weights are refused before anything is loaded.


def configured(path: Path, *, kernels: Any = None, executor: Any = None, **model: Any) -> EngineCoreConfig:
    model = {"path": str(path), "quantization": "int8", **model}
    return msgspec.convert({"model": model, "kernels": kernels or {}, "executor": executor or {}}, EngineCoreConfig)


@pytest.mark.parametrize(
    ("settings", "device", "words"),
    [
        ({}, "cuda", "model.device is 'cuda', and only CPUs support int8 weights"),
        ({"dtype": "bfloat16"}, "cpu", "model.dtype is 'bfloat16', and int8 weights are computed in float32"),
        ({"kernels": {"isa": "off"}}, "cpu", "kernels.isa is 'off'"),
        ({"kernels": {"linear": False}}, "cpu", "kernels.linear is false"),
        ({"executor": {"tensor_parallel_size": 2}}, "cpu", "the executor has 2 workers"),
    ],
)
def test_settings_that_contradict_it_are_named(
    settings: dict[str, Any], device: str, words: str, tmp_path: Path
) -> None:
    save_tiny_model("llama", tmp_path)
    with pytest.raises(
        ConfigError, match=f"model.quantization is 'int8', but {words}.*set model.quantization to 'auto'"
    ):
        check_int8(configured(tmp_path, **settings), torch.device(device))


@pytest.mark.parametrize(
    ("settings", "device", "task", "words"),
    [
        ({}, "cpu", "generate", "model.device is 'cpu', and only GPUs support fp8 weights"),
        ({"kernels": {"decoder": False}}, "cuda", "generate", "kernels.decoder is false"),
        ({"attention_backend": "triton"}, "cuda", "generate", "model.attention_backend is 'triton'"),
        ({}, "cuda", "embed", "the task of the model is embed"),
        ({"executor": {"tensor_parallel_size": 2}}, "cuda", "generate", "the executor has 2 workers"),
    ],
)
def test_settings_that_contradict_fp8_are_named(
    settings: dict[str, Any], device: str, task: str, words: str, tmp_path: Path
) -> None:
    save_tiny_model("llama", tmp_path)
    config = configured(tmp_path, **{"quantization": "fp8", **settings})
    with pytest.raises(
        ConfigError, match=f"model.quantization is 'fp8', but {words}.*set model.quantization to 'auto'"
    ):
        check_float8(config, torch.device(device), task)
    check_float8(configured(tmp_path, quantization="fp8"), torch.device("cuda"), "generate")
    check_float8(configured(tmp_path), torch.device("cpu"), "generate")


def test_another_implementation_than_the_fused_decoder_is_refused_for_fp8(tmp_path: Path) -> None:
    forward: Any = object()
    check_computed(configured(tmp_path, quantization="auto"), forward, torch.nn.Linear(1, 1))
    with pytest.raises(ModelLoadError, match="the fused decoder does not support Linear, .* set model.quantization to"):
        check_computed(configured(tmp_path, quantization="fp8"), forward, torch.nn.Linear(1, 1))


def test_a_checkpoint_that_is_quantized_is_refused(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path)
    check_int8(configured(tmp_path), torch.device("cpu"))
    file = tmp_path / "config.json"
    config = json.loads(file.read_bytes())
    config["quantization_config"] = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
    file.write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match="model.quantization is 'int8', but the checkpoint is already quantized"):
        check_int8(configured(tmp_path), torch.device("cpu"))
    with pytest.raises(ModelLoadError, match="model.quantization is 'fp8', but the checkpoint is already quantized"):
        check_float8(configured(tmp_path, quantization="fp8"), torch.device("cuda"), "generate")
    check_int8(configured(tmp_path, quantization="auto", dtype="bfloat16"), torch.device("cuda"))
