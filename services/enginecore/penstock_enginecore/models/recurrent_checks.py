"""Checks of checkpoints with recurrent layers: sizes in the configuration, and values of the weights.

Loading compares the shapes of tensors with the configuration, but its errors name tensors. The checks of sizes run first,
and name the field of ``config.json``.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from transformers import PretrainedConfig

from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.models.state_hook import MAX_KERNEL, MIN_KERNEL, find_mixers


class _Fields(NamedTuple):
    """Names of the fields of ``config.json`` that describe recurrent layers.

    Attributes:
        heads: Field with the number of state heads. "" for short convolutions and selective scans, which have no heads.
        key_heads: Field with the number of heads or groups of keys. The number of state heads must be a multiple of
            this number. "" if both numbers are equal.
        sizes: Fields with the sizes of a head and of other parts of the layer.
        kernel: Field with the number of taps of the convolution.
    """

    heads: str
    key_heads: str
    sizes: tuple[str, ...]
    kernel: str


_FIELDS = (
    _Fields(
        "linear_num_value_heads",
        "linear_num_key_heads",
        ("linear_key_head_dim", "linear_value_head_dim"),
        "linear_conv_kernel_dim",
    ),
    _Fields("mamba_n_heads", "mamba_n_groups", ("mamba_d_head", "mamba_d_state"), "mamba_d_conv"),
    _Fields("mamba_num_heads", "n_groups", ("mamba_head_dim", "ssm_state_size"), "conv_kernel"),
    _Fields("n_mamba_heads", "mamba_ngroups", ("mamba_headdim", "mamba_d_state"), "mamba_d_conv"),
    _Fields("num_heads", "n_groups", ("head_dim", "state_size"), "conv_kernel"),
    _Fields("num_attention_heads", "", ("linear_head_dim",), "short_conv_kernel_size"),
    _Fields("linear_num_heads", "", ("linear_head_dim",), "linear_conv_kernel_dim"),
    _Fields("", "", ("expand", "intermediate_size", "state_size", "time_step_rank"), "conv_kernel"),
    _Fields("", "", ("mamba_d_state", "mamba_expand", "mamba_dt_rank"), "mamba_d_conv"),
    _Fields("", "", (), "conv_L_cache"),
)
"""Fields of each model family. The first entry whose fields all exist in a configuration is used to check this
configuration.
"""
_NESTED = {
    "linear_num_heads": "num_heads",
    "linear_head_dim": "head_dim",
    "linear_conv_kernel_dim": "short_conv_kernel_size",
}
"""Names of these fields inside ``linear_attn_config`` of config.json, where some checkpoints have them."""

_LARGEST_A_LOG = math.log(torch.finfo(torch.float32).max)
"""Largest ``A_log`` whose exponential is finite in float32."""


def check_sizes(config: PretrainedConfig) -> None:
    """Raise ModelLoadError, with the field and its value, if ``config.json`` has an impossible size of recurrent layers."""
    fields = fields_of(config)
    if fields is None:
        return
    of: dict[str, Any] = {name: getattr(config, name) for name in (*_counts(fields), fields.kernel)}
    for name, value in of.items():
        if not isinstance(value, int):
            raise ModelLoadError(f"config.json: {_in_file(config, name)} is {value!r}; it must be an integer")
        if value < 1 and name != fields.kernel:
            raise ModelLoadError(f"config.json: {_in_file(config, name)} is {value}; it must be at least 1")
    if fields.key_heads and of[fields.heads] % of[fields.key_heads]:
        raise ModelLoadError(
            f"config.json: {fields.heads} is {of[fields.heads]}; it must be a multiple of {fields.key_heads}, "
            f"{of[fields.key_heads]}"
        )
    if not MIN_KERNEL <= of[fields.kernel] <= MAX_KERNEL:
        raise ModelLoadError(
            f"config.json: {_in_file(config, fields.kernel)} is {of[fields.kernel]}; convolutions of {MIN_KERNEL} to "
            f"{MAX_KERNEL} taps are supported"
        )


def fields_of(config: PretrainedConfig) -> _Fields | None:
    """Return the names of the fields in a configuration that describe its recurrent layers, or None if no known family
    matches.
    """
    return next(
        (fields for fields in _FIELDS if all(hasattr(config, name) for name in (*_counts(fields), fields.kernel))), None
    )


def _in_file(config: PretrainedConfig, name: str) -> str:
    """Return the path of a field in config.json, for error messages."""
    nested = getattr(config, "linear_attn_config", None) or {}
    return f"linear_attn_config.{_NESTED[name]}" if _NESTED.get(name) in nested else name


def _counts(fields: _Fields) -> tuple[str, ...]:
    return tuple(name for name in (fields.heads, fields.key_heads, *fields.sizes) if name)


def check_numbers(model: torch.nn.Module) -> None:
    """Raise ModelLoadError, with the name of the tensor and the number, if a parameter of a recurrent layer is not
    finite. A recurrence would carry such a number into the states of all later tokens, and from there into the prefix
    cache. The weights of linear layers are not checked, because a number that is not finite in them already shows in
    the logits of the first token.
    """
    for name, parameter in _own_parameters(model):
        values = parameter.detach().float()
        limit = math.inf
        if name.endswith(".A_log"):
            limit = _LARGEST_A_LOG
        wrong = ~values.isfinite() | (values > limit)
        if bool(wrong.any()):
            place = wrong.nonzero()[0].tolist()
            most = "" if limit == math.inf else f", at most {limit:.4g}"
            raise ModelLoadError(
                f"tensor {name} has the number {float(values[tuple(place)])} at {place}; it must be finite{most}: the "
                "checkpoint is damaged, download it again"
            )


def _own_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters of recurrent layers and of their convolutions, by name."""
    for mixer_name, mixer in find_mixers(model).items():
        for name, module in mixer.named_modules(prefix=mixer_name):
            if isinstance(module, torch.nn.Linear):
                continue
            for own, parameter in module.named_parameters(recurse=False):
                if parameter.is_floating_point():
                    yield f"{name}.{own}", parameter
