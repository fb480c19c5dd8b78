"""Architectures that would be served wrongly are refused by name."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PretrainedConfig

from penstock_enginecore.attention.base import AttentionParams
from penstock_enginecore.models.attention_hook import AttentionCall, penstock_attention
from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.models.rope import freeze_rotary, install_query_scales
from penstock_enginecore.models.sharing import donor_names
from penstock_enginecore.models.support import check_positions, check_supported, layer_specs
from tests.fakes.models.tiny_models import tiny_config


def load_class(name: str) -> Any:
    return getattr(transformers, name)


@pytest.mark.parametrize(
    ("config_class", "model_class", "reason"),
    [
        ("RwkvConfig", "RwkvForCausalLM", "a state of a kind that is not supported"),
        ("BloomConfig", "BloomForCausalLM", "attention interface"),
        ("GPTJConfig", "GPTJForCausalLM", "attention interface"),
        ("MiniMaxConfig", "MiniMaxForCausalLM", "do not call transformers' causal convolution"),
        ("CodeGenConfig", "CodeGenForCausalLM", "attention interface"),
        ("StableLmConfig", "StableLmForCausalLM", "attention interface"),
        ("GPTNeoConfig", "GPTNeoForCausalLM", "attention interface"),
        ("MptConfig", "MptForCausalLM", "attention interface"),
        ("FalconConfig", "FalconForCausalLM", "attention interface"),
        ("DeepseekV32Config", "DeepseekV32ForCausalLM", "layers of type indexed_attention"),
        ("T5Config", "T5ForConditionalGeneration", "encoder-decoder"),
        ("Gemma3Config", "Gemma3ForConditionalGeneration", "multimodal"),
    ],
)
def test_an_architecture_that_cannot_be_served_is_refused_by_its_class(
    config_class: str, model_class: str, reason: str
) -> None:
    with pytest.raises(ModelLoadError, match=f"^{model_class} is not supported: .*{reason}"):
        check_supported(load_class(config_class)(), load_class(model_class))


def test_a_single_layer_of_another_kind_is_enough_to_refuse() -> None:
    config = tiny_config("llama", num_hidden_layers=3)
    config.layer_types = ["full_attention", "indexed_attention", "full_attention"]
    with pytest.raises(
        ModelLoadError, match="LlamaForCausalLM is not supported: it has layers of type indexed_attention"
    ):
        check_supported(config, load_class("LlamaForCausalLM"))


@pytest.mark.parametrize(
    "family", ["BailingHybrid", "FalconMamba", "Jamba", "KimiLinear", "Lfm2", "Mamba", "Qwen3Next"]
)
def test_a_model_with_recurrent_layers_of_a_known_kind_is_supported(family: str) -> None:
    check_supported(load_class(f"{family}Config")(), load_class(f"{family}ForCausalLM"))


def test_states_that_are_not_float32_are_refused_with_the_setting() -> None:
    config = load_class("Qwen3_5TextConfig")(mamba_ssm_dtype="bfloat16")
    with pytest.raises(ModelLoadError, match="mamba_ssm_dtype is 'bfloat16', and only float32 states are supported"):
        check_supported(config, load_class("Qwen3_5ForCausalLM"))


def test_a_checkpoint_quantized_in_a_way_that_is_not_served_is_refused() -> None:
    config = tiny_config("llama")
    config.quantization_config = {"quant_method": "bitsandbytes"}
    with pytest.raises(ModelLoadError, match=r"LlamaForCausalLM is not supported: .*\.quant_method is 'bitsandbytes'"):
        check_supported(config, load_class("LlamaForCausalLM"))


class _Layer(torch.nn.Module):
    is_causal = True


class _Model(torch.nn.Module):
    """The parts of a model that ``layer_specs`` reads."""

    def __init__(self, num_layers: int = 2, **config: Any) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(_Layer() for _ in range(num_layers))
        self.config = PretrainedConfig(**config)
        self.config.num_hidden_layers = num_layers


def _call(
    module: torch.nn.Module, *, window: int | None = None, chunk: int | None = None, mask: object = None, **extra: Any
) -> AttentionCall:
    tensor = torch.zeros(1, 2, 8)
    params = AttentionParams(0.1, window, attention_chunk=chunk)
    return AttentionCall(module, torch.zeros(1, 4, 8), tensor, tensor, params, mask, extra)


def test_specs_come_from_the_calls_by_module_name_in_order() -> None:
    model = _Model()
    specs = layer_specs(model, [_call(model.layers[0]), _call(model.layers[1], window=8)], block_size=16)
    assert list(specs) == ["layers.0", "layers.1"]
    assert specs["layers.0"].num_kv_heads == 2
    assert specs["layers.0"].head_size == 8
    assert specs["layers.0"].block_size == 16
    assert specs["layers.1"].sliding_window == 8
    assert specs["layers.0"].page_size_bytes == 16 * 2 * (8 + 8) * 4


def test_layers_that_bypass_the_attention_interface_are_noticed() -> None:
    model = _Model()
    with pytest.raises(ModelLoadError, match="1 of its 2 attention layers use transformers' attention interface"):
        layer_specs(model, [_call(model.layers[0])], block_size=16)


def _shared(model: _Model, window: int | None) -> list[AttentionCall]:
    """Return the calls of two layers. The second layer has the keys and values of the first, and an own window."""
    first, second = _call(model.layers[0]), _call(model.layers[1], window=window)
    return [first, replace(second, key=first.key, value=first.value)]


def test_a_layer_that_reads_the_keys_of_another_layer_has_no_spec() -> None:
    model = _Model(num_kv_shared_layers=1)
    calls = _shared(model, window=None)
    assert list(layer_specs(model, calls, block_size=16)) == ["layers.0"]
    assert donor_names(model, calls) == {"layers.1": "layers.0"}


def test_a_layer_cannot_read_keys_that_another_window_lets_go() -> None:
    model = _Model(num_kv_shared_layers=1)
    with pytest.raises(ModelLoadError, match=r"in layer 'layers.1', .* a layer with another attention window or chunk"):
        layer_specs(model, _shared(model, window=8), block_size=16)


@pytest.mark.parametrize(("declared", "found"), [(0, 1), (1, 0), (2, 1)])
def test_other_numbers_of_layers_that_share_keys_than_the_configuration_has_are_refused(
    declared: int, found: int
) -> None:
    model = _Model(num_kv_shared_layers=declared)
    calls = _shared(model, None) if found else [_call(layer) for layer in model.layers]
    with pytest.raises(ModelLoadError, match=f"{declared} layers share the keys .*, but {found} attention calls do"):
        layer_specs(model, calls, block_size=16)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ({"mask": torch.zeros(1)}, "builds its own attention mask"),
        ({"is_causal": False}, "attention is not causal"),
        ({"position_bias": torch.zeros(1)}, "the argument 'position_bias', which is not supported"),
    ],
)
def test_calls_that_ask_for_something_else_are_refused_with_the_layer(call: dict[str, Any], reason: str) -> None:
    model = _Model(1)
    with pytest.raises(ModelLoadError, match=f"_Model is not supported: in layer 'layers.0', .*{reason}"):
        layer_specs(model, [_call(model.layers[0], **call)], block_size=16)


def test_a_bidirectional_layer_is_refused() -> None:
    model = _Model(1)
    model.layers[0].is_causal = False
    with pytest.raises(ModelLoadError, match="attention is not causal"):
        layer_specs(model, [_call(model.layers[0])], block_size=16)


@pytest.mark.parametrize("layer_types", [None, ["sliding_attention"]])
def test_a_sliding_window_that_is_not_passed_on_is_noticed(layer_types: list[str] | None) -> None:
    model = _Model(1)
    model.config.layer_types = layer_types
    model.config.sliding_window = 8
    with pytest.raises(ModelLoadError, match="the sliding window is 8 by the configuration but None"):
        layer_specs(model, [_call(model.layers[0])], block_size=16)


def test_a_sliding_window_that_no_sequence_leaves_need_not_be_passed_on() -> None:
    model = _Model(1)
    model.config.sliding_window = model.config.max_position_embeddings = 512
    assert layer_specs(model, [_call(model.layers[0])], block_size=16)["layers.0"].sliding_window is None


def test_specs_name_the_chunk_of_each_layer() -> None:
    model = _Model(attention_chunk_size=8, layer_types=["chunked_attention", "full_attention"])
    calls = [_call(model.layers[0], chunk=8), _call(model.layers[1])]
    specs = layer_specs(model, calls, block_size=16)
    assert [spec.attention_chunk for spec in specs.values()] == [8, None]


@pytest.mark.parametrize("layer_types", [None, ["chunked_attention"]])
def test_a_chunk_that_is_not_kept_to_is_noticed(layer_types: list[str] | None) -> None:
    model = _Model(1, attention_chunk_size=8)
    model.config.layer_types = layer_types
    with pytest.raises(ModelLoadError, match="the attention chunk is 8 by the configuration but None"):
        layer_specs(model, [_call(model.layers[0])], block_size=16)


class _Projecting(torch.nn.Module):
    """One attention layer. ``mix`` computes its queries, keys and values from the embedded tokens and their positions."""

    def __init__(self, mix: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(16, 8)
        self.layer = _Layer()
        self.mix = mix

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, use_cache: bool) -> None:
        assert not use_cache
        hidden = self.mix(self.embedding(input_ids), position_ids)[:, None]
        penstock_attention(self.layer, hidden, hidden, hidden, None)


def test_tokens_that_depend_on_themselves_and_their_position_pass() -> None:
    torch.manual_seed(0)
    check_positions(_Projecting(lambda x, positions: x * (positions + 1)[..., None]), torch.device("cpu"))


@pytest.mark.parametrize(
    "mix",
    [
        lambda x, positions: x * torch.arange(1, x.shape[1] + 1)[:, None],
        lambda x, positions: x + x.roll(1, dims=1),
        lambda x, positions: x.cumsum(dim=1),
        lambda x, positions: torch.nn.functional.pad(x, (0, 0, 2, 0))[:, :-2],
    ],
    ids=["positions of its own", "token shift", "recurrence", "delay"],
)
def test_tokens_that_depend_on_their_place_in_the_batch_are_noticed(mix: Callable[..., torch.Tensor]) -> None:
    torch.manual_seed(0)
    with pytest.raises(ModelLoadError, match="_Projecting is not supported: in layer 'layer', .*index in the batch"):
        check_positions(_Projecting(mix), torch.device("cpu"))


def test_a_model_that_takes_no_positions_is_refused() -> None:
    model = _Projecting(lambda x, positions: x)
    model.forward = lambda input_ids, use_cache: None
    with pytest.raises(
        ModelLoadError, match="_Projecting is not supported: a forward pass over 8 tokens fails with TypeError"
    ):
        check_positions(model, torch.device("cpu"))


def test_queries_scaled_in_an_unknown_way_are_refused() -> None:
    model = _Model(1)
    model.layers[0].attn_temperature_tuning = True
    with pytest.raises(ModelLoadError, match="'layers.0' scales its queries by position in a way that is not known"):
        install_query_scales(model)


def test_rotary_scaling_in_a_module_of_another_kind_is_refused() -> None:
    model = _Model(1)
    model.layers[0].rope_type = "dynamic"
    with pytest.raises(ModelLoadError, match="'dynamic' is not supported in module 'layers.0'"):
        freeze_rotary(model, 128)


def test_a_layer_that_attends_twice_is_refused() -> None:
    model = _Model(1)
    with pytest.raises(ModelLoadError, match="attends more than once"):
        layer_specs(model, [_call(model.layers[0]), _call(model.layers[0])], block_size=16)


def test_a_checkpoint_of_a_refused_architecture_fails_before_its_weights_are_read(tmp_path: Path) -> None:
    from penstock_enginecore.config import ModelConfig
    from penstock_enginecore.models.loader import load_model

    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bloom", "architectures": ["BloomForCausalLM"]}))
    (tmp_path / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")  # no tensors
    with pytest.raises(ModelLoadError, match="BloomForCausalLM is not supported"):
        load_model(ModelConfig(path=str(tmp_path)), torch.device("cpu"), lambda line: None)
