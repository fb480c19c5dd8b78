"""Layers that attend to the keys and values of an earlier layer, as in Gemma 3n and in Gemma 4 E2B and E4B.

Such a layer is called a *reader* here, and the earlier layer its *donor*. A reader has no keys and values of its own:
it writes nothing, needs no KV cache, and reads the donor's cache through the block table of the donor's group.
"""

from collections.abc import Sequence

import torch
from transformers import PretrainedConfig

from penstock_enginecore.models.attention_hook import AttentionCall


def num_readers(config: PretrainedConfig) -> int:
    """Return the number of layers that, by the configuration, attend to the keys and values of an earlier layer."""
    return int(getattr(config, "num_kv_shared_layers", None) or 0)


def donor_calls(calls: Sequence[AttentionCall]) -> dict[torch.nn.Module, AttentionCall]:
    """Return the donor's call for each reader, by the reader's module. ``calls`` are the calls of one forward pass.

    A reader passes the same tensors as its donor to attention. ``calls`` keeps all tensors alive, so two tensors at the
    same address are the same tensor.
    """
    owners: dict[object, AttentionCall] = {}
    found: dict[torch.nn.Module, AttentionCall] = {}
    for call in calls:
        owner = owners.setdefault((_place(call.key), _place(call.value)), call)
        if owner.module is not call.module:
            found[call.module] = owner
    return found


def donor_names(model: torch.nn.Module, calls: Sequence[AttentionCall]) -> dict[str, str]:
    """Return the name of each reader's donor, by the name of the reader's module in ``model``."""
    names = {module: name for name, module in model.named_modules()}
    return {names[reader]: names[donor.module] for reader, donor in donor_calls(calls).items()}


def unsupported_reader(call: AttentionCall, donor: AttentionCall) -> str | None:
    """Return why a reader cannot use its donor's KV cache, or None if it can."""
    own, kept = call.params, donor.params
    if (own.sliding_window, own.attention_chunk) != (kept.sliding_window, kept.attention_chunk):
        return "the layer reads the keys and values of a layer with another attention window or chunk"
    return None


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride()
