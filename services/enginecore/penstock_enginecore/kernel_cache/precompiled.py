"""Lookup of kernels that were compiled in advance."""

import importlib.util
from pathlib import Path

import torch

from penstock_common.errors import ConfigError
from penstock_enginecore.kernel_cache.lookups import Lookups


def open_cache(path: str, device: torch.device) -> Lookups | None:
    """Make Triton look up kernels for ``device`` in the directory ``path`` from now on. Returns the counters of found
    and compiled kernels. Raises ConfigError if ``path`` is not a directory.

    Returns None if ``path`` is empty, the device is not a GPU, or Triton is not installed.
    """
    if not path or device.type != "cuda":
        return None
    if not Path(path).is_dir():
        raise ConfigError(f"kernels.cache is {path!r}, which is not a directory on this machine")
    if importlib.util.find_spec("triton") is None:
        return None
    # Import Triton only here, because a process without a GPU does not need it.
    from penstock_enginecore.kernel_cache.two_layer_cache import use_cache

    return use_cache(Path(path))
