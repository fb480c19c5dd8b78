"""The attention backends by their names in the configuration."""

import os
from collections.abc import Callable

import torch

from penstock_common.errors import ConfigError, nearest
from penstock_enginecore.attention.base import AttentionBackend
from penstock_enginecore.attention.cpu import CPUAttention
from penstock_enginecore.attention.reference import ReferenceAttention

TRITON = "triton"
"""Kernels that are proved for each model before they attend in it (``forward.cuda.attention_candidate``)."""
_FACTORIES: dict[str, Callable[[], AttentionBackend]] = {
    "reference": ReferenceAttention,
    "cpu": CPUAttention,
    TRITON: ReferenceAttention,
}


def register_backend(name: str, factory: Callable[[], AttentionBackend]) -> None:
    """Make ``model.attention_backend: name`` mean what ``factory`` returns."""
    _FACTORIES[name] = factory


def create_backend(
    name: str, device: torch.device, kernels: Callable[[AttentionBackend], AttentionBackend] | None = None
) -> AttentionBackend:
    """The backend called ``name``; ``auto`` picks the fastest one for ``device``. ``kernels``: makes the one that ``auto`` means
    then, of the backend for what its kernels do not take. ``triton`` gives what attends where its kernels do not. Raises
    ConfigError.
    """
    if name == "auto" and kernels is not None:
        return kernels(CPUAttention())
    if name == "auto":
        name = "cpu" if device.type == "cpu" else "reference"
    if name not in _FACTORIES:
        known = ("auto", *_FACTORIES)
        raise ConfigError(f"model.attention_backend is {name!r}; known: {', '.join(known)}{nearest(name, known)}")
    other = "cpu" if device.type == "cpu" else TRITON
    if name == _misplaced(device):
        raise ConfigError(
            f"model.attention_backend is {name!r} but the device is {device.type}; use 'auto', {other!r} or 'reference'"
        )
    return _FACTORIES[name]()


def _misplaced(device: torch.device) -> str | None:
    """The backend that this device does not run. Triton's interpreter runs on any, as slowly as tests can bear."""
    if device.type != "cpu":
        return "cpu"
    return None if os.environ.get("TRITON_INTERPRET") == "1" else TRITON
