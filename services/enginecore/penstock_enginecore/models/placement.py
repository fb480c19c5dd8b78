"""Placement of a model on its device, with an error for models that do not fit."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import modeling_utils

from penstock_common.memory import in_units
from penstock_enginecore.models.errors import ModelLoadError


def place(module: torch.nn.Module, path: str, device: torch.device) -> None:
    """Move ``module``, the model of ``path``, to ``device``, in evaluation mode and without gradients.

    Raises ModelLoadError, with the sizes, if the device has too little memory.
    """
    if device.type == "cuda":
        _check_module_fits(module, path, device)
    module.to(device).eval().requires_grad_(False)


@contextmanager
def read_to(device: torch.device) -> Iterator[None]:
    """Return a context in which ``from_pretrained`` reads weights to ``device``, each weight as soon as it is read from
    its file.

    transformers requires accelerate for such loading. For a single device, transformers uses nothing else of
    accelerate, and importing accelerate would slow down every start.

    transformers also allocates one segment of the size of the model in advance. Weights that are merged or quantized
    later leave holes in this segment, and torch cannot return the holes to the device. In this context, each large
    weight therefore has its own segment.
    """
    if device.type == "cpu":
        yield
        return
    loading: Any = modeling_utils
    checks, warmup = loading.check_and_set_device_map, loading.caching_allocator_warmup
    loading.check_and_set_device_map = lambda _: {"": device}
    loading.caching_allocator_warmup = lambda *_: None
    try:
        yield
    finally:
        loading.check_and_set_device_map, loading.caching_allocator_warmup = checks, warmup


def check_weights_fit(num_bytes: int, path: str, dtype: torch.dtype, device: torch.device) -> None:
    """Raise ModelLoadError, with the sizes, if ``num_bytes`` of weights in ``dtype`` do not fit ``device``."""
    free, total = torch.cuda.mem_get_info(device)
    if num_bytes > free:
        raise ModelLoadError(
            f"model.path {path!r}: its weights take {in_units(num_bytes)} as {str(dtype).removeprefix('torch.')}; "
            f"{torch.cuda.get_device_name(device)} has {in_units(free)} of {in_units(total)} left; use a device with more "
            "memory, a smaller or a quantized model, or set model.dtype to bfloat16 if it is float32"
        )


def _check_module_fits(module: torch.nn.Module, path: str, device: torch.device) -> None:
    """Check that the module fits into the free memory of the device. Tensors that are already on the device need no
    additional memory.
    """
    tensors = {tensor.data_ptr(): tensor for tensor in (*module.parameters(), *module.buffers())}
    needed = sum(each.numel() * each.element_size() for each in tensors.values() if each.device.type != "cuda")
    check_weights_fit(needed, path, next(module.parameters()).dtype, device)
