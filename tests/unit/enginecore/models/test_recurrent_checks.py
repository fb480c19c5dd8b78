"""Checkpoints with recurrent layers that cannot be right are refused with the field or tensor, and its value."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock_enginecore.config import ModelConfig
from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.models.loader import load_model
from penstock_enginecore.models.recurrent_checks import check_sizes, fields_of
from tests.fakes.engines.in_process import build_engine
from tests.fakes.models.tiny_models import RECURRENT_ARCHITECTURES, save_tiny_model, tiny_config

CPU = torch.device("cpu")
FIELDS = {
    "bailing_hybrid": ("num_attention_heads", "", "short_conv_kernel_size"),
    "bamba": ("mamba_n_heads", "mamba_n_groups", "mamba_d_conv"),
    "falcon_h1": ("mamba_n_heads", "mamba_n_groups", "mamba_d_conv"),
    "falcon_mamba": ("", "", "conv_kernel"),
    "granitemoehybrid": ("mamba_n_heads", "mamba_n_groups", "mamba_d_conv"),
    "granitemoehybrid_dense": ("mamba_n_heads", "mamba_n_groups", "mamba_d_conv"),
    "jamba": ("", "", "mamba_d_conv"),
    "kimi_linear": ("linear_num_heads", "", "linear_conv_kernel_dim"),
    "lfm2": ("", "", "conv_L_cache"),
    "lfm2_moe": ("", "", "conv_L_cache"),
    "lfm3": ("", "", "conv_L_cache"),
    "mamba": ("", "", "conv_kernel"),
    "mamba2": ("num_heads", "n_groups", "conv_kernel"),
    "nemotron_h": ("mamba_num_heads", "n_groups", "conv_kernel"),
    "olmo_hybrid": ("linear_num_value_heads", "linear_num_key_heads", "linear_conv_kernel_dim"),
    "qwen3_5": ("linear_num_value_heads", "linear_num_key_heads", "linear_conv_kernel_dim"),
    "qwen3_5_moe": ("linear_num_value_heads", "linear_num_key_heads", "linear_conv_kernel_dim"),
    "qwen3_next": ("linear_num_value_heads", "linear_num_key_heads", "linear_conv_kernel_dim"),
    "zamba2": ("n_mamba_heads", "mamba_ngroups", "mamba_d_conv"),
}
"""Fields of heads, key heads and taps by model type."""
MIXERS = {
    "jamba": "model.layers.0.mamba",
    "qwen3_5": "model.layers.0.linear_attn",
    "granitemoehybrid": "model.layers.0.mamba",
    "mamba2": "backbone.layers.0.mixer",
    "lfm2": "model.layers.0.conv",
}


def load(path: Path, **model: Any) -> None:
    load_model(ModelConfig(path=str(path), **model), CPU, lambda line: None)


def edit_config(path: Path, **changes: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_tensors(path: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    file = path / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file, {"format": "pt"})


# Sizes in config.json.


@pytest.mark.parametrize("architecture", RECURRENT_ARCHITECTURES)
def test_the_fields_of_each_family_are_known_and_its_sizes_pass(architecture: str) -> None:
    config = tiny_config(architecture)
    fields = fields_of(config)
    assert fields is not None
    assert (fields.heads, fields.key_heads, fields.kernel) == FIELDS[architecture]
    check_sizes(config)


@pytest.mark.parametrize("architecture", RECURRENT_ARCHITECTURES)
def test_impossible_sizes_are_refused_with_the_field_and_its_value(architecture: str) -> None:
    heads, key_heads, kernel = FIELDS[architecture]
    cases: list[tuple[str, float, str]] = [
        (kernel, taps, rf"{kernel} is {taps}; convolutions of 2 to 8 taps are supported") for taps in (-1, 0, 1, 9)
    ]
    for name in filter(None, (heads, key_heads)):
        cases += [(name, count, rf"{name} is {count}; it must be at least 1") for count in (0, -1)]
        cases.append((name, 2.5, rf"{name} is 2.5; it must be an integer"))
    if key_heads:
        cases.append((key_heads, 3, rf"{heads} is \d+; it must be a multiple of {key_heads}, 3"))
    for name, value, message in cases:
        config = tiny_config(architecture)
        vars(config)[name] = value
        with pytest.raises(ModelLoadError, match=rf"^config\.json: {message}$"):
            check_sizes(config)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("qwen3_5", {"linear_num_value_heads": 0}, r"linear_num_value_heads is 0; it must be at least 1"),
        (
            "qwen3_5",
            {"linear_num_value_heads": 3},
            r"linear_num_value_heads is 3; it must be a multiple of .*heads, 16$",
        ),
        ("qwen3_5", {"linear_key_head_dim": -1}, r"linear_key_head_dim is -1; it must be at least 1"),
        ("qwen3_5", {"linear_conv_kernel_dim": 9}, r"linear_conv_kernel_dim is 9; convolutions of 2 to 8 taps"),
        ("granitemoehybrid", {"mamba_n_groups": 3}, r"mamba_n_heads is 8; it must be a multiple of mamba_n_groups, 3$"),
        ("granitemoehybrid", {"mamba_d_conv": 0}, r"mamba_d_conv is 0; convolutions of 2 to 8 taps"),
        ("mamba2", {"n_groups": 0}, r"n_groups is 0; it must be at least 1"),
        ("lfm2", {"conv_L_cache": 1}, r"conv_L_cache is 1; convolutions of 2 to 8 taps"),
        ("kimi_linear", {"linear_head_dim": -1}, r"config\.json: linear_head_dim is -1; it must be at least 1"),
        ("kimi_linear", {"linear_attn_config": {"num_heads": 0}}, r"linear_attn_config\.num_heads is 0; it must be at"),
        (
            "kimi_linear",
            {"linear_attn_config": {"short_conv_kernel_size": 9}},
            r"linear_attn_config\.short_conv_kernel_size is 9; convolutions of 2 to 8 taps",
        ),
        ("kimi_linear", {"linear_attn_config": None}, r"the configuration cannot be read: 'NoneType' object has no"),
        (
            "kimi_linear",
            {"layer_types": None, "linear_attn_config": {"full_attn_layers": [9], "kda_layers": [1]}},
            r"the configuration cannot be read: list assignment index out of range",
        ),
        ("bailing_hybrid", {"short_conv_kernel_size": 0}, r"short_conv_kernel_size is 0; convolutions of 2 to 8 taps"),
        ("mamba", {"state_size": 0}, r"config\.json: state_size is 0; it must be at least 1"),
        ("mamba", {"conv_kernel": 9}, r"conv_kernel is 9; convolutions of 2 to 8 taps"),
        ("falcon_mamba", {"time_step_rank": 0}, r"time_step_rank is 0; it must be at least 1"),
        ("falcon_mamba", {"intermediate_size": 0}, r"intermediate_size is 0; it must be at least 1"),
        ("jamba", {"mamba_d_state": 0}, r"mamba_d_state is 0; it must be at least 1"),
        ("jamba", {"mamba_expand": 0}, r"mamba_expand is 0; it must be at least 1"),
        ("jamba", {"mamba_dt_rank": "half"}, r"mamba_dt_rank is 'half'; it must be an integer"),
    ],
)
def test_checkpoints_with_impossible_sizes_are_refused(
    architecture: str, changes: dict[str, Any], message: str, load_format: str, tmp_path: Path
) -> None:
    save_tiny_model(architecture, tmp_path)
    edit_config(tmp_path, **changes)
    with pytest.raises(ModelLoadError, match=message):
        load(tmp_path, load_format=load_format)


@pytest.mark.parametrize(
    ("layer_types", "message"),
    [
        (["linear_attention", "full_attention"], r"config.json is invalid: `num_hidden_layers` \(4\) .* \(2\)"),
        (["linear_attention"] * 5, r"config.json is invalid: `num_hidden_layers` \(4\) .* \(5\)"),
        (["linear_attention"] * 3 + ["spiral"], r"config.json is invalid: The `layer_types` .*spiral"),
        ("linear_attention", r"config.json is invalid: .*'layer_types' with value 'linear_attention'"),
        ([1, 2, 3, 4], r"config.json is invalid: .*'layer_types' with value \[1, 2, 3, 4\]"),
        (
            ["linear_attention"] * 3 + ["sliding_attention"],
            r"weights are missing, for example model.layers.1.linear_attn",
        ),
        (["linear_attention"] * 4, r"weights are missing, for example model.layers.1.linear_attn"),
    ],
    ids=str,
)
def test_wrong_layer_types_are_refused(layer_types: Any, message: str, tmp_path: Path) -> None:
    save_tiny_model("qwen3_5", tmp_path)
    edit_config(tmp_path, layer_types=layer_types)
    with pytest.raises(ModelLoadError, match=message):
        load(tmp_path)


# Tensors.


@pytest.mark.parametrize("architecture", MIXERS)
def test_tensors_that_are_missing_unexpected_or_of_another_shape_are_refused_by_name(
    architecture: str, tmp_path: Path
) -> None:
    own = "conv.weight" if architecture == "lfm2" else "conv1d.weight"
    name = f"{MIXERS[architecture]}.{own}"
    save_tiny_model(architecture, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")

    def message_of(changed: dict[str, torch.Tensor]) -> str:
        save_file(changed, tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(ModelLoadError) as error:
            load(tmp_path)
        return str(error.value)

    without = {key: tensor for key, tensor in tensors.items() if key != name}
    assert f"1 weights are missing, for example {name}" in message_of(without)
    assert f"does not use: {MIXERS[architecture]}.gate" in message_of(
        tensors | {f"{MIXERS[architecture]}.gate": torch.ones(4)}
    )
    shape = [len(tensors[name]), 1, 5]
    message = message_of(tensors | {name: torch.ones(shape)})
    assert (
        f"tensor {name} has shape {shape} in the files, but config.json requires {list(tensors[name].shape)}" in message
    )


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("architecture", "own"),
    [
        *(("qwen3_5", own) for own in ("A_log", "dt_bias", "conv1d.weight", "norm.weight")),
        *(("mamba2", own) for own in ("A_log", "dt_bias", "D", "conv1d.bias")),
        ("granitemoehybrid", "A_log"),
        *(("jamba", own) for own in ("A_log", "D", "conv1d.bias", "b_layernorm.weight")),
        ("lfm2", "conv.weight"),
    ],
)
def test_numbers_that_are_not_finite_are_refused_with_tensor_and_place(
    architecture: str, own: str, number: float, tmp_path: Path
) -> None:
    save_tiny_model(architecture, tmp_path)
    name = f"{MIXERS[architecture]}.{own}"
    edit_tensors(tmp_path, lambda tensors: tensors[name].view(-1)[1:2].fill_(number))
    message = (
        rf"tensor {re.escape(name)} has the number {number} at \[.*\]; it must be finite.*the checkpoint is damaged"
    )
    with pytest.raises(ModelLoadError, match=message):
        load(tmp_path)


@pytest.mark.parametrize(
    ("stored", "own"),
    [
        ("A_log", "forget_gate.A_log"),
        ("dt_bias", "forget_gate.dt_bias"),
        ("k_conv1d.weight", "conv1d.weight"),
        ("o_norm.weight", "o_norm.weight"),
    ],
)
def test_numbers_that_are_not_finite_are_refused_by_the_name_in_the_model(
    stored: str, own: str, tmp_path: Path
) -> None:
    save_tiny_model("kimi_linear", tmp_path)
    mixer = "model.layers.0.self_attn"
    edit_tensors(tmp_path, lambda tensors: tensors[f"{mixer}.{stored}"].view(-1)[1:2].fill_(math.nan))
    message = rf"tensor {re.escape(f'{mixer}.{own}')} has the number nan at \[.*\]; it must be finite"
    with pytest.raises(ModelLoadError, match=message):
        load(tmp_path)


def test_decays_that_overflow_are_refused(tmp_path: Path) -> None:
    save_tiny_model("qwen3_5", tmp_path)
    name = "model.layers.2.linear_attn.A_log"
    edit_tensors(tmp_path, lambda tensors: tensors[name][3:4].fill_(89.0))
    message = rf"tensor {re.escape(name)} has the number 89.0 at \[3\]; it must be finite, at most 88.72"
    with pytest.raises(ModelLoadError, match=message):
        load(tmp_path)


def test_an_engine_refuses_them_at_its_start(tmp_path: Path) -> None:
    save_tiny_model("mamba2", tmp_path)
    edit_tensors(tmp_path, lambda tensors: tensors["backbone.layers.0.mixer.A_log"].fill_(math.nan))
    with pytest.raises(ModelLoadError, match=r"A_log has the number nan at \[0\]"):
        build_engine(tmp_path, cache={"block_size": 16})
