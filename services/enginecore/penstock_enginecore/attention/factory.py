"""The attention backends by their names in the configuration."""

from collections.abc import Callable

import torch

from penstock_common.errors import ConfigError, nearest
from penstock_enginecore.attention.base import AttentionBackend
from penstock_enginecore.attention.cpu import CPUAttention
from penstock_enginecore.attention.reference import ReferenceAttention

_FACTORIES: dict[str, Callable[[], AttentionBackend]] = {"reference": ReferenceAttention, "cpu": CPUAttention}


def register_backend(name: str, factory: Callable[[], AttentionBackend]) -> None:
    """Make ``model.attention_backend: name`` mean what ``factory`` returns."""
    _FACTORIES[name] = factory


def create_backend(
    name: str, device: torch.device, kernels: Callable[[AttentionBackend], AttentionBackend] | None = None
) -> AttentionBackend:
    """The backend called ``name``; ``auto`` picks the fastest one for ``device``. ``kernels``: makes the one that ``auto`` means
    then, of the backend for what its kernels do not take. Raises ConfigError.
    """
    if name == "auto" and kernels is not None:
        return kernels(CPUAttention())
    if name == "auto":
        name = "cpu" if device.type == "cpu" else "reference"
    if name not in _FACTORIES:
        known = ("auto", *_FACTORIES)
        raise ConfigError(f"model.attention_backend is {name!r}; known: {', '.join(known)}{nearest(name, known)}")
    if name == "cpu" and device.type != "cpu":
        raise ConfigError(
            f"model.attention_backend is 'cpu' but the device is {device.type}; use 'auto' or 'reference'"
        )
    return _FACTORIES[name]()
