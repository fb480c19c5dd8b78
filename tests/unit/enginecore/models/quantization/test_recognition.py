"""Parsing of quantization_config; unsupported values are refused by name."""

from collections.abc import Mapping
from typing import Any

import pytest

from penstock_common.checkpoint import QUANTIZATIONS
from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.models.quantization import recognition
from penstock_enginecore.models.quantization.awq_gptq import Awq, Gptq, Packed
from penstock_enginecore.models.quantization.float8 import Float8
from penstock_enginecore.models.quantization.layers import Scheme
from penstock_enginecore.models.quantization.mxfp4 import Mxfp4
from penstock_enginecore.models.quantization.recognition import recognise

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
KV = {"type": "float", "num_bits": 8, "strategy": "tensor", "dynamic": False, "symmetric": True}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128, "dynamic": False}
FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
TOKENS = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}


def compressed(
    form: str, weights: Mapping[str, Any], group: Mapping[str, Any] | None = None, **config: Any
) -> dict[str, Any]:
    whole = {"targets": ["Linear"], "weights": weights, "input_activations": None, **(group or {})}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": whole}, **config}


@pytest.mark.parametrize(
    ("config", "scheme"),
    [
        (FP8, Float8((128, 128), "_scale_inv")),
        ({**FP8, "weight_block_size": [64, 128], "scale_fmt": "ue8m0"}, Float8((64, 128), "_scale_inv")),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, Float8("tensor", "_scale", rounds_activations=True)),
        (
            {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
            Float8("row", "_scale", rounds_activations=True),
        ),
        (
            compressed("float-quantized", FLOAT8, {"input_activations": TOKENS}),
            Float8("row", "_scale", rounds_activations=True),
        ),
        (
            compressed("float-quantized", FLOAT8, {"input_activations": {**TOKENS, "type": "int"}}),
            Float8("row", "_scale"),
        ),
        (compressed("naive-quantized", {**FLOAT8, "strategy": "tensor"}), Float8("tensor", "_scale")),
        (
            compressed("float-quantized", {**FLOAT8, "strategy": "block", "block_structure": [128, 128]}),
            Float8((128, 128), "_scale"),
        ),
        (compressed("pack-quantized", INT4, ignore=["lm_head"], kv_cache_scheme=None), Packed(4, 128, True)),
        (compressed("pack-quantized", {**INT4, "symmetric": False, "num_bits": 8}), Packed(8, 128, False)),
        (
            compressed("pack-quantized", {**INT4, "strategy": "channel", "group_size": None}),
            Packed(4, -1, True),
        ),
        (compressed("mixed-precision", INT4, {"format": "pack-quantized"}), Packed(4, 128, True)),
        (AWQ, Awq(128)),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "version": "GEMM"}, Awq(64)),
        (GPTQ, Gptq(4, 128, 1)),
        ({**GPTQ, "checkpoint_format": "gptq"}, Gptq(4, 128, 1)),
        ({**GPTQ, "checkpoint_format": "gptq_v2", "bits": 8, "group_size": -1}, Gptq(8, -1, 0)),
        ({**GPTQ, "dynamic": {"-:.*down_proj": {}}}, Gptq(4, 128, 1)),
        ({**GPTQ, "desc_act": True}, Gptq(4, 128, 1, act_order=True)),
        (compressed("pack-quantized", {**INT4, "actorder": "group"}), Packed(4, 128, True, act_order=True)),
        (compressed("pack-quantized", {**INT4, "actorder": "weight"}), Packed(4, 128, True)),
        (compressed("pack-quantized", INT4, kv_cache_scheme=KV), Packed(4, 128, True)),
        ({**FP8, "kv_cache_scheme": "static"}, Float8((128, 128), "_scale_inv")),
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, Mxfp4()),
    ],
)
def test_a_configuration_that_is_served(config: dict[str, Any], scheme: Scheme) -> None:
    assert recognise(config) == scheme


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, "quant_method is None; supported: fp8, fbgemm_fp8, compressed-tensors, awq, gptq, mxfp4"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method is 'bitsandbytes'; supported: fp8"),
        ({"quant_method": "hqq"}, "quant_method is 'hqq'"),
        ({"quant_method": ["awq"]}, r"quant_method is \['awq'\]"),
        ({**FP8, "activation_scheme": "per-tensor"}, "activation_scheme is 'per-tensor'; supported: dynamic, static"),
        ({**FP8, "fmt": "e5m2"}, "fmt is 'e5m2'; supported: e4m3"),
        ({**FP8, "weight_block_size": [128]}, r"weight_block_size is \[128\]; supported: two numbers above 0"),
        ({**FP8, "weight_block_size": [0, 128]}, r"weight_block_size is \[0, 128\]"),
        ({**FP8, "expert_dtype": "fp4"}, "expert_dtype is 'fp4'; supported: fp8"),
        ({**FP8, "kv_cache_scheme": "dynamic"}, "kv_cache_scheme is 'dynamic'; supported: an object"),
        ({**AWQ, "bits": 8}, "bits is 8; supported: 4"),
        ({**AWQ, "bits": True}, "bits is True; supported: 4"),
        ({**AWQ, "version": "gemv"}, "version is 'gemv'; supported: gemm"),
        ({**AWQ, "backend": "llm-awq"}, "backend is 'llm-awq'; supported: autoawq"),
        ({**AWQ, "zero_point": False}, "zero_point is False; supported: True"),
        ({**AWQ, "group_size": 0}, "group_size is 0; supported: -1 and numbers above 0"),
        ({**GPTQ, "bits": 3}, "bits is 3; supported: 4, 8"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'; supported: gptq, gptq_v2"),
        ({**GPTQ, "is_marlin_format": True}, "is_marlin_format is True; supported: checkpoints without this field"),
        ({**GPTQ, "dynamic": {"+:.*down": {"bits": 8}}}, "dynamic is .* supported: patterns that exclude layers"),
        (compressed("nvfp4-pack-quantized", FLOAT8), "format is 'nvfp4-pack-quantized'; supported: float-quant"),
        (compressed("int-quantized", INT4), "format is 'int-quantized'"),
        (compressed("pack-quantized", {**INT4, "num_bits": 3}), "weights.num_bits is 3; supported: 4, 8"),
        (
            compressed("pack-quantized", {**INT4, "strategy": "block"}),
            "weights.strategy is 'block'; supported: group, ch",
        ),
        (compressed("float-quantized", INT4), "weights.type is 'int'; supported: float"),
        (
            compressed("float-quantized", FLOAT8, {"input_activations": {**TOKENS, "dynamic": "local"}}),
            "input_activations.dynamic is 'local'; supported: True, False",
        ),
        (
            compressed("float-quantized", FLOAT8, {"output_activations": TOKENS}),
            "output_activations is .* supported: checkpoints without this field",
        ),
        (
            compressed("pack-quantized", INT4, kv_cache_scheme=TOKENS),
            "kv_cache_scheme.strategy is 'token'; supported: tensor",
        ),
        (compressed("pack-quantized", INT4, kv_cache_scheme={**KV, "num_bits": 4}), "kv_cache_scheme.num_bits is 4"),
        (compressed("pack-quantized", INT4, kv_cache_scheme={**KV, "type": "int"}), "kv_cache_scheme.type is 'int'"),
        (
            compressed("pack-quantized", INT4, kv_cache_scheme={**KV, "dynamic": True}),
            "kv_cache_scheme.dynamic is True",
        ),
        (compressed("pack-quantized", INT4, transform_config={"config_groups": {"u": {}}}), "transform_config is"),
        (compressed("pack-quantized", INT4, sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config.format"),
        ({"quant_method": "compressed-tensors", "config_groups": None}, "config_groups is None; supported: an object"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "config_groups describes no weights"),
    ],
)
def test_unsupported_values_are_refused_by_field_and_value(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelLoadError, match=r"^quantization_config\.(config_groups\.)?(group_0\.)?" + said):
        recognise(config)


def test_groups_of_several_kinds_are_refused() -> None:
    config = compressed("pack-quantized", INT4)
    config["config_groups"]["group_1"] = {"weights": {**INT4, "num_bits": 8}}
    with pytest.raises(ModelLoadError, match=r"several kinds \(group_0: compressed-tensors, 4 bits, .* 8 bits"):
        recognise(config)


def test_a_configuration_that_is_no_object_is_refused() -> None:
    with pytest.raises(ModelLoadError, match="quantization_config is 'awq'; it must be an object"):
        recognise("awq")


def test_the_first_look_at_the_files_knows_the_same_methods() -> None:
    assert tuple(recognition._METHODS) == QUANTIZATIONS
