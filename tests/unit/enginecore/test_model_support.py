"""Architectures that would be served wrongly are refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PretrainedConfig

from penstock_enginecore.attention.base import AttentionParams
from penstock_enginecore.models.attention_hook import AttentionCall
from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.models.support import check_supported, layer_specs
from tests.fakes.tiny_models import tiny_config


def load_class(name: str) -> Any:
    return getattr(transformers, name)


@pytest.mark.parametrize(
    ("config_class", "model_class", "reason"),
    [
        ("Qwen3NextConfig", "Qwen3NextForCausalLM", "linear-attention or state-space"),
        ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", "linear-attention or state-space"),
        ("FalconH1Config", "FalconH1ForCausalLM", "linear-attention or state-space"),
        ("MambaConfig", "MambaForCausalLM", "linear-attention or state-space"),
        ("JambaConfig", "JambaForCausalLM", "linear-attention or state-space"),
        ("BambaConfig", "BambaForCausalLM", "linear-attention or state-space"),
        ("RwkvConfig", "RwkvForCausalLM", "linear-attention or state-space"),
        ("GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM", "linear-attention or state-space"),
        ("BloomConfig", "BloomForCausalLM", "attention interface"),
        ("GPTJConfig", "GPTJForCausalLM", "attention interface"),
        ("MiniMaxConfig", "MiniMaxForCausalLM", "layers of type linear_attention"),
        ("Llama4TextConfig", "Llama4ForCausalLM", "layers of type chunked_attention"),
        ("T5Config", "T5ForConditionalGeneration", "encoder-decoder"),
        ("Gemma3Config", "Gemma3ForConditionalGeneration", "multimodal"),
        ("Gemma3nTextConfig", "Gemma3nForCausalLM", "share the keys and values"),
    ],
)
def test_an_architecture_that_cannot_be_served_is_refused_by_its_class(
    config_class: str, model_class: str, reason: str
) -> None:
    with pytest.raises(ModelLoadError, match=f"^{model_class} is not supported: .*{reason}"):
        check_supported(load_class(config_class)(), load_class(model_class))


def test_a_single_layer_of_another_kind_is_enough_to_refuse() -> None:
    config = load_class("Lfm2Config")(num_hidden_layers=3, layer_types=["full_attention", "conv", "full_attention"])
    with pytest.raises(ModelLoadError, match="Lfm2ForCausalLM is not supported: it has layers of type conv"):
        check_supported(config, load_class("Lfm2ForCausalLM"))


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_scaling_that_depends_on_the_batch_is_refused(kind: str) -> None:
    config = tiny_config("llama")
    config.rope_parameters = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(ModelLoadError, match=f"rotary scaling '{kind}'"):
        check_supported(config, load_class("LlamaForCausalLM"))


def test_rotary_scaling_of_one_kind_of_layer_is_seen_too() -> None:
    config = tiny_config("gemma3")
    config.rope_parameters = {"full_attention": {"rope_type": "dynamic"}, "sliding_attention": {"rope_type": "default"}}
    with pytest.raises(ModelLoadError, match="rotary scaling 'dynamic'"):
        check_supported(config, load_class("Gemma3ForCausalLM"))


def test_a_quantized_checkpoint_is_refused() -> None:
    config = tiny_config("llama")
    config.quantization_config = {"quant_method": "gptq"}
    with pytest.raises(ModelLoadError, match="quantized"):
        check_supported(config, load_class("LlamaForCausalLM"))


class _Layer(torch.nn.Module):
    is_causal = True


class _Model(torch.nn.Module):
    """As much of a model as ``layer_specs`` looks at."""

    def __init__(self, num_layers: int = 2, **config: Any) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(_Layer() for _ in range(num_layers))
        self.config = PretrainedConfig(**config)
        self.config.num_hidden_layers = num_layers


def _call(module: torch.nn.Module, *, window: int | None = None, mask: object = None, **extra: Any) -> AttentionCall:
    tensor = torch.zeros(1, 2, 8)
    return AttentionCall(module, torch.zeros(1, 4, 8), tensor, tensor, AttentionParams(0.1, window), mask, extra)


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
    with pytest.raises(ModelLoadError, match="1 of its 2 layers use the attention interface"):
        layer_specs(model, [_call(model.layers[0])], block_size=16)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ({"mask": torch.zeros(1)}, "builds an attention mask of its own"),
        ({"is_causal": False}, "attention is not causal"),
        ({"position_bias": torch.zeros(1)}, "the argument 'position_bias', which is not honoured"),
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


def test_a_layer_that_attends_twice_is_refused() -> None:
    model = _Model(1)
    with pytest.raises(ModelLoadError, match="attends more than once"):
        layer_specs(model, [_call(model.layers[0]), _call(model.layers[0])], block_size=16)


def test_a_checkpoint_of_a_refused_architecture_fails_before_its_weights_are_read(tmp_path: Path) -> None:
    from penstock_enginecore.config import ModelConfig
    from penstock_enginecore.models.loader import load_model

    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bloom", "architectures": ["BloomForCausalLM"]}))
    (tmp_path / "model.safetensors").write_bytes(b"never read")
    with pytest.raises(ModelLoadError, match="BloomForCausalLM is not supported"):
        load_model(ModelConfig(path=str(tmp_path)), torch.device("cpu"), lambda line: None)
