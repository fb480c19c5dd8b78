"""Checkpoints with encoders are loaded once, as a text model of its own class; unsupported ones are refused by name."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from penstock_enginecore.config import ModelConfig
from penstock_enginecore.models.dtypes import NarrowWeight
from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.models.loader import LoadedModel, load_model
from penstock_enginecore.models.multimodal.composite import _FAMILIES, Composite, family_of
from penstock_enginecore.models.quantization.loading import dequantize_kept
from tests.fakes.models.quantized_models import FORMATS, is_quantized
from tests.fakes.multimodal_items import features, image_tensors, item
from tests.fakes.multimodal_models import save_multimodal_model

CPU = torch.device("cpu")


def load(path: Path, *, with_towers: bool = True, widen: bool = False, **model: Any) -> LoadedModel:
    return load_model(
        ModelConfig(path=str(path), **model), CPU, lambda line: None, with_towers=with_towers, widen=widen
    )


def edit_config(path: Path, **changes: object) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def rows(model: LoadedModel, tensors: dict[str, torch.Tensor], count: int) -> torch.Tensor:
    assert model.encoder is not None
    model.encoder.start(item(tensors, count))
    (done,) = model.encoder.advance(10**9)
    assert done.rows is not None, done.failure
    return done.rows


@pytest.mark.parametrize("with_towers", [False, True])
def test_the_text_model_has_its_own_class_limits_and_end_tokens(tmp_path: Path, with_towers: bool) -> None:
    oracle = save_multimodal_model("llava", tmp_path)
    model = load(tmp_path, with_towers=with_towers)
    assert type(model.module).__name__ == "LlamaForCausalLM"
    assert (model.max_len, model.vocab_size, model.hidden_size) == (2048, 512, 64)
    assert model.eos_token_ids == {oracle.config.text_config.eos_token_id}
    assert model.module.config._attn_implementation == "penstock"
    assert (model.encoder is not None) is with_towers


def test_the_tower_keeps_an_attention_of_torchs(tmp_path: Path) -> None:
    save_multimodal_model("llava", tmp_path)
    encoder = load(tmp_path).encoder
    assert encoder is not None
    (towers,) = encoder.modules
    tower: Any = towers.vision_tower
    assert tower.config._attn_implementation == "sdpa"


def test_without_towers_their_weights_are_not_read(tmp_path: Path) -> None:
    save_multimodal_model("llava", tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(
        {name: each for name, each in load_file(file).items() if "vision_tower" not in name}, file, {"format": "pt"}
    )
    assert load(tmp_path, with_towers=False).vocab_size == 512
    with pytest.raises(ModelLoadError, match="weights are missing"):
        load(tmp_path)


@pytest.mark.parametrize("family", ["llava", "qwen2_vl"])
@pytest.mark.parametrize("with_towers", [False, True])
def test_embeddings_that_are_tied_to_the_head_stay_so(tmp_path: Path, family: str, with_towers: bool) -> None:
    save_multimodal_model(family, tmp_path, text={"tie_word_embeddings": True})
    module: Any = load(tmp_path, with_towers=with_towers).module
    assert module.lm_head.weight is module.model.embed_tokens.weight


def test_embeddings_that_are_not_tied_are_two(tmp_path: Path) -> None:
    save_multimodal_model("llava", tmp_path)
    module: Any = load(tmp_path).module
    assert module.lm_head.weight.data_ptr() != module.model.embed_tokens.weight.data_ptr()


_FORMS = {
    "language_model.model.": "model.language_model.",
    "language_model.lm_head.": "lm_head.",
    "vision_tower.": "model.vision_tower.",
    "multi_modal_projector.": "model.multi_modal_projector.",
}
"""Prefixes of weight names in older checkpoints, and in newer ones."""


@pytest.mark.parametrize("older", [False, True])
def test_names_of_older_and_newer_checkpoints_are_known(tmp_path: Path, older: bool) -> None:
    oracle = save_multimodal_model("llava", tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    for old, new in _FORMS.items():
        begins, wanted = (new, old) if older else (old, new)
        weights = {
            wanted + name.removeprefix(begins) if name.startswith(begins) else name: each
            for name, each in weights.items()
        }
    assert {f"{name.split('.')[0]}." for name in weights} == (
        {"language_model.", "vision_tower.", "multi_modal_projector."} if older else {"model.", "lm_head."}
    )
    save_file(weights, file, {"format": "pt"})
    expected = features(oracle, "image", image_tensors("llava", tmp_path, raw=False))
    assert torch.equal(rows(load(tmp_path), image_tensors("llava", tmp_path), len(expected)), expected)
    assert load(tmp_path, with_towers=False).vocab_size == 512


def test_weights_of_16_bits_stay_narrow_in_the_text_model_alone(tmp_path: Path) -> None:
    oracle: Any = save_multimodal_model("llava", tmp_path)
    oracle.to(torch.bfloat16).save_pretrained(tmp_path)
    model = load(tmp_path, widen=True)
    assert model.dtype == torch.float32
    module: Any = model.module
    assert isinstance(module.model.layers[0].mlp.up_proj.weight, NarrowWeight)
    assert model.encoder is not None
    (towers,) = model.encoder.modules
    assert {each.dtype for each in towers.parameters()} == {torch.float32}
    assert not any(isinstance(each, NarrowWeight) for each in towers.parameters())
    expected = features(oracle.float(), "image", image_tensors("llava", tmp_path, raw=False))
    assert torch.equal(rows(model, image_tensors("llava", tmp_path), len(expected)), expected)


def test_random_weights_need_no_files(tmp_path: Path) -> None:
    save_multimodal_model("llava", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    model = load(tmp_path, load_format="dummy")
    assert rows(model, image_tensors("llava", tmp_path), 16).shape == (16, 64)


def test_a_length_that_is_set_limits_items_too(tmp_path: Path) -> None:
    save_multimodal_model("qwen2_vl", tmp_path)
    encoder = load(tmp_path, max_model_len=10).encoder
    assert encoder is not None
    assert {info.max_embeds for info in encoder.media} == {10}


def test_a_tower_that_is_not_known_is_refused_by_name(tmp_path: Path) -> None:
    save_multimodal_model("llava", tmp_path)
    vision = {"model_type": "dinov2", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    edit_config(tmp_path, vision_config=vision)
    with pytest.raises(
        ModelLoadError, match="LlavaForConditionalGeneration is not supported: its vision encoder is dinov2"
    ):
        load(tmp_path)


@pytest.mark.parametrize("with_towers", [False, True])
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("mllama", "mllama is not supported: its layers read images by cross-attention"),
        ("paligemma", "paligemma is not supported: tokens of its prompts attend to later tokens"),
    ],
)
def test_text_that_media_layers_belong_to_is_refused_with_the_reason(kind: str, said: str, with_towers: bool) -> None:
    with pytest.raises(ModelLoadError, match=said) as raised:
        Composite.of(AutoConfig.for_model(kind), with_towers=with_towers)
    assert "--no-media" not in str(raised.value)


_UNKNOWN = "its media encoders are not supported; supported model types are aya_vision, "


@pytest.mark.parametrize("kind", ["cohere2_vision", "kimi_k25", "step3p7"])
def test_unknown_encoders_are_refused_with_the_settings_that_serve_text(kind: str) -> None:
    config = AutoConfig.for_model(kind)
    with pytest.raises(ModelLoadError, match=rf"{kind} is not supported: {_UNKNOWN}.* use --no-media .*enabled: false"):
        Composite.of(config, with_towers=True)
    assert Composite.of(config, with_towers=False) is not None


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("unlimited_ocr", "type reference_sliding_attention"), ("dots3_note", "type indexed_attention")],
)
def test_unknown_encoders_of_unsupported_text_are_refused_with_both_reasons(kind: str, reason: str) -> None:
    said = rf"{kind} is not supported: {_UNKNOWN}.*; its text model alone is not supported either: .*{reason}"
    with pytest.raises(ModelLoadError, match=said) as raised:
        Composite.of(AutoConfig.for_model(kind), with_towers=True)
    assert "--no-media" not in str(raised.value)


@pytest.mark.parametrize("kind", sorted(_FAMILIES))
def test_every_family_that_is_named_is_found(kind: str) -> None:
    config = AutoConfig.for_model(kind)
    if kind.startswith("gemma4"):  # whose encoders are optional
        with pytest.raises(ModelLoadError, match="it has neither vision_config nor audio_config"):
            family_of(config)
        config = AutoConfig.for_model(kind, vision_config={})
    family_of(config)


QUANTIZED = [("fp8-blocks", ""), ("fp8-tensor", ""), ("compressed-int4", "language_model"), ("awq", "language_model")]
"""Quantization form, and the part of a name that marks quantized weights.

Encoders of these tiny models stay unquantized, because their sizes are no multiples of a group.
"""


@pytest.mark.parametrize(("form", "part"), QUANTIZED)
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("with_towers", [False, True])
def test_quantized_weights_mean_what_they_say(
    tmp_path: Path, form: str, part: str, keep: bool, with_towers: bool
) -> None:
    save_multimodal_model("llava", tmp_path)
    file, dense = tmp_path / "model.safetensors", tmp_path / "dense"
    shutil.copytree(tmp_path, dense)
    stored, meant = {}, {}
    for name, tensor in load_file(file).items():
        parts, means = {name: tensor}, tensor
        if part in name and is_quantized(name, tensor, form):
            parts, means = FORMATS[form].pack(name, tensor)
        stored.update(parts)
        meant[name] = means
    save_file(meant, dense / "model.safetensors", {"format": "pt"})
    save_file(stored, file, {"format": "pt"})
    edit_config(tmp_path, quantization_config=dict(FORMATS[form].config))
    config = ModelConfig(path=str(tmp_path))
    found = load_model(config, CPU, lambda line: None, lambda scheme: keep, with_towers=with_towers)
    expected = load(dense, with_towers=with_towers)
    dequantize_kept(found.module, torch.float32)
    for name, weight in expected.module.state_dict().items():
        torch.testing.assert_close(found.module.state_dict()[name], weight, rtol=1e-6, atol=1e-6)
    if with_towers:
        tensors = image_tensors("llava", tmp_path)
        torch.testing.assert_close(rows(found, tensors, 16), rows(expected, tensors, 16), rtol=1e-4, atol=1e-4)


def test_scales_of_a_cache_belong_to_the_text_models_layers(tmp_path: Path) -> None:
    save_multimodal_model("llava", tmp_path)
    file = tmp_path / "model.safetensors"
    scales = {
        f"language_model.model.layers.{layer}.self_attn.{part}_scale": torch.tensor(0.5)
        for layer in (0, 1)
        for part in "kv"
    }
    save_file({**load_file(file), **scales}, file, {"format": "pt"})
    edit_config(tmp_path, quantization_config=dict(FORMATS["fp8-tensor"].config))
    assert load(tmp_path).kv_scales.keys() == {"model.layers.0.self_attn", "model.layers.1.self_attn"}


def test_rows_have_the_models_dtype(tmp_path: Path) -> None:
    save_multimodal_model("llava", tmp_path)
    model = load(tmp_path, dtype="bfloat16")
    assert rows(model, image_tensors("llava", tmp_path), 16).dtype == torch.bfloat16
    assert model.encoder is not None
    model.encoder.start(item({"embeds": torch.zeros(3, 64)}, 3))
    (done,) = model.encoder.advance(0)
    assert done.rows is not None
    assert done.rows.dtype == torch.bfloat16
