"""Brings a loaded model to its device, or says why it does not fit."""

import torch

from penstock_common.memory import in_units
from penstock_enginecore.models.errors import ModelLoadError


def place(module: torch.nn.Module, path: str, device: torch.device) -> None:
    """Move ``module``, the model of ``path``, to ``device``, in evaluation mode and without gradients. Raises ModelLoadError,
    with the numbers, when the device has too little memory.
    """
    if device.type == "cuda":
        _check_fits(module, path, device)
    module.to(device).eval().requires_grad_(False)


def _check_fits(module: torch.nn.Module, path: str, device: torch.device) -> None:
    """What is on the device already needs no more room."""
    tensors = {tensor.data_ptr(): tensor for tensor in (*module.parameters(), *module.buffers())}
    needed = sum(each.numel() * each.element_size() for each in tensors.values() if each.device.type != "cuda")
    free, total = torch.cuda.mem_get_info(device)
    if needed > free:
        raise ModelLoadError(
            f"model.path {path!r}: its weights take {in_units(needed)} as {_dtype(module)}; {torch.cuda.get_device_name(device)} "
            f"has {in_units(free)} of {in_units(total)} left; use a device with more memory, a smaller model, or model.dtype "
            "bfloat16 where it is float32"
        )


def _dtype(module: torch.nn.Module) -> str:
    return str(next(module.parameters()).dtype).removeprefix("torch.")
