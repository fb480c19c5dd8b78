"""The library for long prompts is used only after its results were compared, and settings that exclude it are refused."""

import logging
from typing import Any

import pytest
import torch

from penstock_common.errors import ConfigError
from penstock_enginecore.attention.base import AttentionParams
from penstock_enginecore.config import CacheConfig, EngineCoreConfig, KernelsConfig, ModelConfig
from penstock_enginecore.executor.loading import check_attention_library
from penstock_enginecore.forward.cuda import library_check
from penstock_enginecore.forward.cuda.library_attention import Attend, Geometry, LibraryAttention
from penstock_enginecore.forward.cuda.library_check import AttentionLayers, difference, open_library
from penstock_enginecore.models.attention_hook import AttentionCall
from tests.fakes.models.torch_library import SMALL, attend

CPU, GPU = torch.device("cpu"), torch.device("cuda")
GEOMETRY = Geometry(4, 2, 64, 64)


def call(params: AttentionParams, geometry: Geometry = GEOMETRY) -> AttentionCall:
    heads, kv_heads, size, size_v = geometry
    sizes = (heads, size), (kv_heads, size), (kv_heads, size_v)
    return AttentionCall(torch.nn.Identity(), *(torch.empty(1, *each) for each in sizes), params, None, {})


def layers(dtype: torch.dtype = torch.bfloat16, cache: torch.dtype | None = None, **params: Any) -> AttentionLayers:
    return AttentionLayers([call(AttentionParams(1.0, **params))] * 2, GPU, dtype, cache or dtype)


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the GPU one of capability 9.0, and compute the check on the CPU."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    on_cpu = lambda library, geometry, dtype, device: difference(library, geometry, dtype, CPU)  # noqa: E731
    monkeypatch.setattr(library_check, "difference", on_cpu)


def opened(setting: str, model: AttentionLayers, library: Attend = attend, **kernels: Any) -> LibraryAttention | None:
    return open_library(KernelsConfig(attention_library=setting, **kernels), model, library, SMALL)


def a_key_too_far(q: Any, k: Any, v: Any, scaling: float, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to the next key too."""
    if not causal:
        return attend(q, k, v, scaling, causal)
    scores = (q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(2, 3)).float() * scaling
    scores.masked_fill_(torch.ones(scores.shape[2:]).triu(2).bool(), -torch.inf)
    return scores.softmax(3).to(v.dtype) @ v.repeat_interleave(q.shape[1] // v.shape[1], 1), scores.logsumexp(3)


def base_two(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    out, sums = attend(*given)
    return out, sums * 1.4427


def unscaled(q: Any, k: Any, v: Any, scaling: float, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    return attend(q, k, v, 1.0, causal)


def without_prefix(q: Any, k: Any, v: Any, scaling: float, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Lose the first piece of 8 keys."""
    out, sums = attend(q, k, v, scaling, causal)
    return out, sums if causal or k.shape[2] > 8 else sums - 100


def fails(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    raise RuntimeError("No valid execution plans built.\nmore")


WRONG: list[Attend] = [a_key_too_far, base_two, unscaled, without_prefix]


@pytest.mark.parametrize("geometry", [GEOMETRY, Geometry(4, 1, 128, 128), Geometry(2, 2, 256, 256)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_check_accepts_rounding_and_no_fault(geometry: Geometry, dtype: torch.dtype) -> None:
    found = difference(LibraryAttention(attend, [geometry], dtype, SMALL), geometry, dtype, CPU)
    assert found < (0.006 if dtype == torch.bfloat16 else 1e-5)
    for wrong in WRONG:
        assert difference(LibraryAttention(wrong, [geometry], dtype, SMALL), geometry, dtype, CPU) > 0.03


@pytest.mark.parametrize("setting", ["auto", "cudnn"])
def test_a_library_is_used_after_its_check(setting: str) -> None:
    assert opened(setting, layers()) is not None
    assert opened(setting, layers(torch.float16, sliding_window=99)) is not None


@pytest.mark.parametrize("library", [a_key_too_far, fails])
def test_a_library_that_fails_its_check_is_not_used(library: Attend, caplog: pytest.LogCaptureFixture) -> None:
    reason = "its results differ by" if library is a_key_too_far else "RuntimeError: No valid execution plans built.$"
    assert opened("auto", layers(), library) is None
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert record.message.startswith("using Triton instead of cuDNN for the attention of long prompts reason=Geometry(")
    with pytest.raises(ConfigError, match=f"kernels.attention_library is 'cudnn', but .*{reason.removesuffix('$')}"):
        opened("cudnn", layers(), library)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (layers(torch.float32), "the model computes in torch.float32"),
        (layers(cache=torch.float8_e4m3fn), "the KV cache has the dtype torch.float8_e4m3fn"),
        (layers(softcap=2.0), "all attention layers of the model have soft caps or sinks"),
        (layers(sliding_window=19, attention_chunk=99), "all attention layers of the model have windows of at most 19"),
        (AttentionLayers([], GPU, torch.bfloat16, torch.bfloat16), "all attention layers"),
    ],
    ids=["float32", "fp8 cache", "soft caps", "windows", "no layers"],
)
def test_unsuitable_models_use_triton_or_are_refused(
    model: AttentionLayers, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert opened("auto", model) is None
    assert f"reason={reason}" in caplog.text
    with pytest.raises(ConfigError, match=f"but {reason}.*; set kernels.attention_library to 'auto' or 'triton'"):
        opened("cudnn", model)


def test_auto_uses_triton_on_older_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert opened("auto", layers()) is None
    assert opened("cudnn", layers()) is not None


def test_triton_batch_invariance_and_cpus_use_no_library() -> None:
    assert opened("triton", layers()) is None
    assert opened("auto", layers(), batch_invariant=True) is None
    assert opened("auto", AttentionLayers([], CPU, torch.bfloat16, torch.bfloat16)) is None


def test_settings_that_exclude_cudnn_are_refused() -> None:
    with pytest.raises(ConfigError, match="'flashinfer', which this version does not support; use 'cudnn'"):
        KernelsConfig(attention_library="flashinfer")
    with pytest.raises(ConfigError, match="'cudnn', but kernels.batch_invariant is true"):
        KernelsConfig(attention_library="cudnn", batch_invariant=True)


@pytest.mark.parametrize(
    ("settings", "device", "task", "reason"),
    [
        ({}, CPU, "generate", "the model runs on a device of type cpu"),
        ({"model": ModelConfig(path="m", attention_backend="reference")}, GPU, "generate", "model.attention_backend"),
        ({"cache": CacheConfig(dtype="fp8")}, GPU, "generate", "cache.dtype is 'fp8'"),
        ({}, GPU, "embed", "the task of the model is embed"),
    ],
)
def test_cudnn_is_refused_before_the_model_is_loaded(
    settings: dict[str, Any], device: torch.device, task: str, reason: str
) -> None:
    def check(library: str) -> None:
        kernels = KernelsConfig(attention_library=library)
        check_attention_library(
            EngineCoreConfig(**{"model": ModelConfig(path="m")} | settings, kernels=kernels), device, task
        )

    check("auto")
    with pytest.raises(ConfigError, match=f"kernels.attention_library is 'cudnn', but {reason}"):
        check("cudnn")
