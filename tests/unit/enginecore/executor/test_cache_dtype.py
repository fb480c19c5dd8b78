"""Configurations that refuse an fp8 KV cache, and those that support it."""

import pytest
import torch

from penstock_common.errors import ConfigError
from penstock_enginecore.config import CacheConfig, EngineCoreConfig, ModelConfig
from penstock_enginecore.executor.loading import check_cache_dtype

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def check(device: torch.device, backend: str = "auto", dtype: str = "fp8") -> None:
    model = ModelConfig(path="model", attention_backend=backend)
    check_cache_dtype(EngineCoreConfig(model=model, cache=CacheConfig(dtype=dtype)), device)


@pytest.mark.parametrize(("backend", "what"), [("auto", "the kernels for CPUs do"), ("cpu", ".*'cpu' does")])
def test_kernels_for_cpus_do_not_keep_it(backend: str, what: str) -> None:
    with pytest.raises(
        ConfigError, match=f"cache.dtype is 'fp8', which {what} not support; set cache.dtype to 'auto', or model.att"
    ):
        check(CPU, backend)
    check(CPU, "reference")
    check(CPU, backend, dtype="auto")


def test_gpus_from_ada_on_keep_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    check(CUDA)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    check(CUDA, dtype="auto")
    with pytest.raises(
        ConfigError, match="NVIDIA A100 has compute capability 8.0, and 8.9 is required; set cache.dtype to 'auto'"
    ):
        check(CUDA)
