"""Lookup of kernels that were compiled in advance."""

import importlib.util
from pathlib import Path

import torch

from penstock_common.errors import ConfigError
from penstock_enginecore.kernel_cache.lookups import Lookups


def open_cache(path: str, device: torch.device) -> Lookups | None:
    """Look up kernels for ``device`` in the directory ``path`` from now on. Raises ConfigError if ``path`` is not a
    directory.

    Returns None if ``path`` is empty, the device is not a GPU, or Triton is not installed.
    """
    if not path or device.type != "cuda":
        return None
    if not Path(path).is_dir():
        raise ConfigError(f"kernels.cache is {path!r}, which is not a directory on this machine")
    if importlib.util.find_spec("triton") is None:
        return None
    # Triton is imported only if there is a device for its kernels.
    from penstock_enginecore.kernel_cache.two_layer_cache import use_cache

    return use_cache(Path(path))
