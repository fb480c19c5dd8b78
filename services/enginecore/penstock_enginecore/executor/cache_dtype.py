"""Which devices and attention backends keep an fp8 KV cache."""

import torch

from penstock_common.errors import ConfigError
from penstock_enginecore.attention.factory import create_backend
from penstock_enginecore.config import EngineCoreConfig

FLOAT8_CAPABILITY = (8, 9)
"""The least compute capability that converts numbers of 8 bits: Ada's."""


def check_cache_dtype(config: EngineCoreConfig, device: torch.device) -> None:
    """Raise ConfigError, before anything is loaded, for an fp8 cache that the device or what attends does not keep."""
    if config.cache.dtype != "fp8":
        return
    name = config.model.attention_backend
    if not create_backend(name, device).keeps_float8:
        what = "the kernels for CPUs do" if name == "auto" else f"model.attention_backend {name!r} does"
        raise ConfigError(
            f"cache.dtype is 'fp8', which {what} not keep; use 'auto', or model.attention_backend 'reference', which is slow"
        )
    if device.type == "cuda" and (found := torch.cuda.get_device_capability(device)) < FLOAT8_CAPABILITY:
        have, need = (".".join(map(str, capability)) for capability in (found, FLOAT8_CAPABILITY))
        raise ConfigError(
            f"cache.dtype is 'fp8' but {torch.cuda.get_device_name(device)} has compute capability {have}, and {need} is "
            "needed; use 'auto'"
        )
