"""Brings a model to its device, or says why it does not fit."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import modeling_utils

from penstock_common.memory import in_units
from penstock_enginecore.models.errors import ModelLoadError


def place(module: torch.nn.Module, path: str, device: torch.device) -> None:
    """Move ``module``, the model of ``path``, to ``device``, in evaluation mode and without gradients. Raises ModelLoadError,
    with the numbers, when the device has too little memory.
    """
    if device.type == "cuda":
        _check_module_fits(module, path, device)
    module.to(device).eval().requires_grad_(False)


@contextmanager
def read_to(device: torch.device) -> Iterator[None]:
    """Have ``from_pretrained`` read weights to ``device``, each as it comes from its file, within the ``with`` block.

    transformers does that with accelerate installed, of which a single device needs nothing, and whose import every start would
    wait for.
    """
    if device.type == "cpu":
        yield
        return
    loading: Any = modeling_utils
    checks = loading.check_and_set_device_map
    loading.check_and_set_device_map = lambda _: {"": device}
    try:
        yield
    finally:
        loading.check_and_set_device_map = checks


def check_weights_fit(num_bytes: int, path: str, dtype: torch.dtype, device: torch.device) -> None:
    """Raise ModelLoadError, with the numbers, for weights of ``num_bytes`` as ``dtype`` that ``device`` has no room for."""
    free, total = torch.cuda.mem_get_info(device)
    if num_bytes > free:
        raise ModelLoadError(
            f"model.path {path!r}: its weights take {in_units(num_bytes)} as {str(dtype).removeprefix('torch.')}; "
            f"{torch.cuda.get_device_name(device)} has {in_units(free)} of {in_units(total)} left; use a device with more "
            "memory, a smaller or a quantized model, or model.dtype bfloat16 where it is float32"
        )


def _check_module_fits(module: torch.nn.Module, path: str, device: torch.device) -> None:
    """What is on the device already needs no more room."""
    tensors = {tensor.data_ptr(): tensor for tensor in (*module.parameters(), *module.buffers())}
    needed = sum(each.numel() * each.element_size() for each in tensors.values() if each.device.type != "cuda")
    check_weights_fit(needed, path, next(module.parameters()).dtype, device)
