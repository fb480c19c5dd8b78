"""A checkpoint with tensors that its model does not use is refused, by whichever way it is loaded; known extras are
not.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForMaskedLM, PretrainedConfig

from penstock_enginecore.config import ModelConfig
from penstock_enginecore.models import loader
from penstock_enginecore.models.checkpoint import left_over
from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.models.loader import load_model
from penstock_enginecore.models.quantization.layers import Scheme
from penstock_enginecore.pooling.embedder import load_pooling_model
from tests.fakes.models.quantized_models import save_quantized_model
from tests.fakes.models.tiny_models import save_tiny_model, tiny_config
from tests.fakes.multimodal_models import save_multimodal_model

CPU = torch.device("cpu")


def load(path: Path, keep: Callable[[Scheme], bool] = loader.keep_none, **model: Any) -> Any:
    options = {name: model.pop(name) for name in ("widen", "with_towers") if name in model}
    return load_model(ModelConfig(path=str(path), **model), CPU, lambda line: None, keep, **options)


def pool(path: Path, **model: Any) -> Any:
    return load_pooling_model(ModelConfig(path=str(path), task="embed", **model), "embed", CPU, lambda line: None)


def edit_config(path: Path, *without: str, **changes: object) -> None:
    file = path / "config.json"
    kept = {name: value for name, value in json.loads(file.read_text()).items() if name not in without}
    file.write_text(json.dumps(kept | changes))


def add(path: Path, *names: str) -> None:
    """Add tensors to the checkpoint."""
    file = path / "model.safetensors"
    more = {name: torch.ones(2, 2) for name in names}
    save_file({**load_file(file), **more}, file, {"format": "pt"})


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save_tiny_model("llama", tmp_path)
    return tmp_path


# Tests of refused checkpoints.


def test_layers_behind_the_last_one_of_the_configuration(checkpoint: Path) -> None:
    edit_config(checkpoint, num_hidden_layers=1)
    with pytest.raises(ModelLoadError) as refused:
        load(checkpoint)
    said = str(refused.value)
    assert (
        "the files have 9 tensors that LlamaForCausalLM does not use: model.layers.1.input_layernorm.weight, " in said
    )
    assert "num_hidden_layers is 1 in config.json, but the tensors are of layers up to 1 (the first is 0)" in said
    assert "take config.json from the checkpoint's author" in said


@pytest.mark.parametrize("form", ["fp8-blocks", "fp8-tensor"])
def test_scales_of_quantized_weights_that_the_configuration_does_not_describe(tmp_path: Path, form: str) -> None:
    save_quantized_model("llama", form, tmp_path)
    load(tmp_path)
    edit_config(tmp_path, "quantization_config")
    with pytest.raises(
        ModelLoadError, match=r"_scale.*parts of quantized weights, which config\.json does not describe"
    ):
        load(tmp_path)


WAYS: dict[str, Callable[..., Any]] = {
    "dense": load,
    "narrow": lambda path, **model: load(path, dtype="bfloat16", widen=True, **model),
    "pooled": pool,
}


@pytest.mark.parametrize("way", WAYS)
def test_a_tensor_that_no_layer_has_unless_it_is_named(checkpoint: Path, way: str) -> None:
    add(checkpoint, "model.layers.1.self_attn.gate.weight")
    message = r"1 tensor that \w+ does not use: model\.layers\.1\.self_attn\.gate\.weight; .* model\.unused_weights"
    with pytest.raises(ModelLoadError, match=message):
        WAYS[way](checkpoint)
    WAYS[way](checkpoint, unused_weights=("model.layers.1.self_attn.gate.",))


@pytest.mark.parametrize("keep", [False, True])
def test_a_tensor_of_a_quantized_checkpoint_that_its_format_does_not_know(tmp_path: Path, keep: bool) -> None:
    save_quantized_model("llama", "fp8-blocks", tmp_path)
    add(tmp_path, "model.layers.0.mlp.up_proj.weight_rotation")
    with pytest.raises(ModelLoadError, match=r"1 tensor .* model\.layers\.0\.mlp\.up_proj\.weight_rotation"):
        load(tmp_path, keep=lambda scheme: keep)


@pytest.mark.parametrize(
    "name", ["model.vision_tower.rotation.weight", "model.language_model.layers.7.mlp.up_proj.weight"]
)
def test_a_tensor_of_a_checkpoint_with_towers(tmp_path: Path, name: str) -> None:
    save_multimodal_model("llava", tmp_path)
    add(tmp_path, name)
    with pytest.raises(ModelLoadError, match=name):
        load(tmp_path, with_towers=True)
    if "vision" in name:
        load(tmp_path, with_towers=False)
    else:
        with pytest.raises(ModelLoadError, match=name):
            load(tmp_path, with_towers=False)


def test_a_bias_of_the_head_that_the_model_would_not_add(checkpoint: Path) -> None:
    add(checkpoint, "lm_head.bias")
    with pytest.raises(ModelLoadError, match=r"1 tensor .* lm_head\.bias"):
        load(checkpoint)


# Tests of accepted checkpoints.


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.rotary_emb.cos_cached",
        "model.layers.0.self_attn.masked_bias",
        "model.layers.0.attn.bias",
        "model.position_ids",
        "model.layers.0.mlp.up_proj._extra_state",
        "mtp.layers.0.self_attn.q_proj.weight",
        "model.mtp_layers.0.mlp.up_proj.weight",
    ],
)
def test_tables_that_models_compute_and_modules_for_further_tokens(checkpoint: Path, name: str) -> None:
    add(checkpoint, name)
    load(checkpoint)
    pool(checkpoint)


def test_names_that_the_class_of_the_model_declares(tmp_path: Path) -> None:
    save_tiny_model("ernie4_5_moe", tmp_path)
    add(tmp_path, "model.some_mtp_emb.weight")
    load(tmp_path)


def test_a_head_that_is_tied_to_the_embeddings_and_stored_all_the_same(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path, tie_word_embeddings=True)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    save_file({**weights, "lm_head.weight": weights["model.embed_tokens.weight"].clone()}, file, {"format": "pt"})
    load(tmp_path)
    pool(tmp_path)


def test_the_head_of_a_model_that_generates_when_it_is_pooled(checkpoint: Path) -> None:
    assert "lm_head.weight" in load_file(checkpoint / "model.safetensors")
    pool(checkpoint)


def test_heads_that_an_encoder_was_trained_with(tmp_path: Path) -> None:
    config = BertConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    BertForMaskedLM(config).save_pretrained(tmp_path)
    add(tmp_path, "cls.seq_relationship.weight")
    pool(tmp_path)
    edit_config(tmp_path, num_hidden_layers=1)
    with pytest.raises(ModelLoadError, match=r"16 tensors that BertModel does not use: bert\.encoder\.layer\.1\."):
        pool(tmp_path)


def test_scales_of_activations_and_of_attention(tmp_path: Path) -> None:
    save_quantized_model("llama", "fp8-tensor", tmp_path)
    attention = "model.layers.0.self_attn"
    add(tmp_path, f"{attention}.q_proj.input_scale", f"{attention}.q_scale", f"{attention}.o_proj.output_scale")
    load(tmp_path)


LAYER = ["model.layers.2.eh_proj.weight", "model.layers.2.enorm.weight", "model.layers.2.self_attn.q_proj.weight"]


def test_layers_for_further_tokens_that_the_configuration_counts(checkpoint: Path) -> None:
    add(checkpoint, *LAYER)
    edit_config(checkpoint, num_nextn_predict_layers=1)
    load(checkpoint)


@pytest.mark.parametrize(
    ("count", "names"),
    [
        (0, LAYER),
        (1, LAYER[1:]),  # an ordinary layer
        (1, [name.replace(".2.", ".3.") for name in LAYER]),
    ],
)
def test_layers_that_do_not_guess_further_tokens(count: int, names: list[str]) -> None:
    config: PretrainedConfig = tiny_config("llama")
    config.num_nextn_predict_layers = count
    assert left_over(names, config, pools=False) == names
    assert left_over(names, config, pools=True) == names
