"""Creation of attention backends by their names in the configuration."""

import os
from collections.abc import Callable

import torch

from penstock_common.errors import ConfigError, nearest
from penstock_enginecore.attention.base import AttentionBackend
from penstock_enginecore.attention.cpu import CPUAttention
from penstock_enginecore.attention.reference import ReferenceAttention

TRITON = "triton"
"""Name of the backend with Triton kernels. The engine checks the kernels' results for each model before it uses them
(``forward.cuda.attention``).
"""


class _BesideTriton(ReferenceAttention):
    """Backend for the layers without a Triton kernel. The kernels need full keys and values in the KV cache."""

    keeps_latents = False


_FACTORIES: dict[str, Callable[[], AttentionBackend]] = {
    "reference": ReferenceAttention,
    "cpu": CPUAttention,
    TRITON: _BesideTriton,
}


def register_backend(name: str, factory: Callable[[], AttentionBackend]) -> None:
    """Register a backend. If the setting ``model.attention_backend`` is ``name``, the engine uses the backend that
    ``factory`` returns.
    """
    _FACTORIES[name] = factory


def create_backend(
    name: str, device: torch.device, kernels: Callable[[AttentionBackend], AttentionBackend] | None = None
) -> AttentionBackend:
    """Return the attention backend for the setting ``name``.

    Args:
        name: Name of a registered backend, or "auto" for the fastest backend. For "triton", the function returns the
            backend that computes the layers without a Triton kernel. The module ``forward.cuda.attention`` adds the
            Triton kernels.
        device: Device that computes attention.
        kernels: Function that adds native kernels to a backend, or None. If ``name`` is "auto", the function gets the
            CPU backend, and ``create_backend`` returns its result. The CPU backend then computes the layers that the
            native kernels do not support. For other names, ``kernels`` is not used.

    Raises:
        ConfigError: The name is unknown, or the backend does not support ``device``.
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
    """Return the name of the backend that this device cannot run, or None. Triton's interpreter runs kernels on any
    device, but is fast enough only for tests.
    """
    if device.type != "cpu":
        return "cpu"
    return None if os.environ.get("TRITON_INTERPRET") == "1" else TRITON
