"""Where an engine looks for kernels that were compiled before."""

import importlib.util
from pathlib import Path

import torch

from penstock_common.errors import ConfigError
from penstock_enginecore.kernel_cache.lookups import Lookups

# Where an engine looks for kernels that were compiled before.


def open_cache(path: str, device: torch.device) -> Lookups | None:
    """Have kernels for ``device`` looked up in the directory ``path`` from now on. None where no ``path`` is given, and where
    there are no kernels. Raises ConfigError for what is no directory.
    """
    if not path or device.type != "cuda":
        return None
    if not Path(path).is_dir():
        raise ConfigError(f"kernels.cache is {path!r}, which is no directory here")
    if importlib.util.find_spec("triton") is None:
        return None
    # Triton is imported where there is a device for its kernels.
    from penstock_enginecore.kernel_cache.two_layer_cache import use_cache

    return use_cache(Path(path))
