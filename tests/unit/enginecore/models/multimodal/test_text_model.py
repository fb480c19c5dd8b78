"""The text model of a composite is found among its modules, and served alone only if it computes the same."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, LlavaConfig, LlavaForConditionalGeneration, PreTrainedModel
from transformers.models.muse_glimmer.modeling_muse_glimmer import MuseGlimmerTextModel

from penstock_enginecore.config import ModelConfig
from penstock_enginecore.models import attention_hook
from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.models.loader import LoadedModel, load_model
from penstock_enginecore.models.multimodal.composite import Composite
from penstock_enginecore.models.multimodal.text_model import (
    check_same_text,
    for_causal_lm,
    probe_text,
    remove_others,
    text_part,
)
from penstock_enginecore.models.support import Probed, probe
from tests.fakes.composite_text_models import save_composite
from tests.fakes.multimodal_models import save_multimodal_model

NAMES = {
    "cohere2_vision": ("model.language_model", "lm_head", "Cohere2ForCausalLM"),
    "glm4v": ("model.language_model", "lm_head", "Glm4vForCausalLM"),
    "llama4": ("language_model", "language_model.lm_head", "Llama4ForCausalLM"),
    "qwen2_5_omni": ("model.language_model", "lm_head", "Qwen2_5OmniThinkerForCausalLM"),
    "qwen3_asr": ("model.language_model", "lm_head", "Qwen3ForCausalLM"),
}


def load(path: Path, *, with_towers: bool = False) -> LoadedModel:
    return load_model(ModelConfig(path=str(path)), torch.device("cpu"), lambda line: None, with_towers=with_towers)


def inner(model: Any) -> PreTrainedModel:
    """The model with a text section: of an omni model its thinker."""
    found: PreTrainedModel = getattr(model, "thinker", model)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_the_text_model_is_found_and_nothing_else_is_kept(name: str, tmp_path: Path) -> None:
    whole = inner(save_composite(name, tmp_path))
    part = text_part(whole)
    assert (part.name, part.head) == NAMES[name][:2]
    count = sum(parameter.numel() for parameter in part.module.parameters())
    count += 0 if part.has_head else whole.get_output_embeddings().weight.numel()  # type: ignore[union-attr]
    removed = remove_others(whole, part)
    assert removed
    assert not [module for module, _ in whole.named_modules() if module.startswith(tuple(removed))]
    assert sum(parameter.numel() for parameter in whole.parameters()) == count
    module = load(tmp_path).module
    assert type(module).__name__ == NAMES[name][2]
    assert sum(parameter.numel() for parameter in module.parameters()) == count


def test_a_model_without_a_text_model_of_its_own_is_refused() -> None:
    text = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = LlavaConfig(text_config={"model_type": "llama", "vocab_size": 64, **text})
    with torch.device("meta"):
        whole = LlavaForConditionalGeneration(config)
    language_model = whole.model.language_model
    whole.model.second = language_model.__class__(language_model.config)
    with pytest.raises(
        ModelLoadError,
        match=r"cannot be identified, because modules model.language_model and model.second have a LlamaConfig",
    ):
        text_part(whole)
    del whole.model.second, whole.model.language_model
    with pytest.raises(ModelLoadError, match="because no module has a LlamaConfig"):
        text_part(whole)


def test_a_head_that_is_no_module_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = save_composite("exaone4_5", tmp_path)
    monkeypatch.setattr(whole, "get_output_embeddings", lambda: None)
    with pytest.raises(ModelLoadError, match="the output head of its text model cannot be identified"):
        text_part(whole)


def whole_and_composite(name: str, path: Path) -> tuple[Any, Composite]:
    """Return a composite with only its text model, as the loader makes it."""
    save_composite(name, path)
    attention_hook.register()
    composite = Composite.of(AutoConfig.from_pretrained(path), with_towers=False)
    assert composite is not None
    options: dict[str, Any] = {"pretrained_model_name_or_path": path, "attn_implementation": "penstock"}
    return composite.from_pretrained(**options), composite


@pytest.fixture
def made(tmp_path: Path) -> tuple[Any, Composite]:
    return whole_and_composite("exaone4_5", tmp_path)


def test_other_inputs_of_the_text_model_in_the_whole_are_found(made: tuple[Any, Composite]) -> None:
    whole, composite = made

    def reverse(module: object, arguments: object, given: dict[str, Any]) -> Any:
        return arguments, {**given, "input_ids": given["input_ids"].flip(1)}

    whole.model.register_forward_pre_hook(reverse, with_kwargs=True)
    with pytest.raises(
        ModelLoadError, match="Exaone4_5_.* served alone, because the query of attention call 0 differs"
    ):
        composite.separate(whole)


def test_other_logits_of_the_whole_are_found(made: tuple[Any, Composite]) -> None:
    whole, composite = made

    def bend(module: object, arguments: object, output: Any) -> None:
        output.logits = output.logits.sin()

    whole.register_forward_hook(bend)
    with pytest.raises(
        ModelLoadError, match="cannot be served alone, because its logits differ from those of the whole model"
    ):
        composite.separate(whole)


def test_a_scale_of_logits_that_only_the_text_model_has_is_accepted(tmp_path: Path) -> None:
    """transformers' Cohere2-Vision leaves out the scale that Cohere2 has."""
    whole, composite = whole_and_composite("cohere2_vision", tmp_path)
    expected = probe_text(whole)
    text: Any = composite.separate(whole).text
    with torch.inference_mode():
        found = probe(text, torch.arange(1, 9), torch.arange(8))
    assert text.config.logit_scale != 1.0
    torch.testing.assert_close(found.output.logits, expected.output.logits * text.config.logit_scale)


def test_attention_to_later_tokens_in_the_whole_is_found(made: tuple[Any, Composite]) -> None:
    whole, composite = made
    expected = probe_text(whole)
    text = composite.separate(whole).text
    causal = torch.zeros(1, 1, 8, 8).masked_fill(torch.ones(8, 8).triu(1).bool(), float("-inf"))
    for mask in (causal, causal == 0, None):
        check_same_text(text, _masked(expected, mask), "X")
    for mask in (torch.zeros(1, 1, 8, 8), torch.ones(1, 1, 8, 8, dtype=torch.bool), "another kind of mask"):
        with pytest.raises(ModelLoadError, match="because tokens attend to later tokens in the whole model"):
            check_same_text(text, _masked(expected, mask), "X")


def test_a_layer_that_only_the_whole_calls_is_found(made: tuple[Any, Composite]) -> None:
    whole, composite = made
    expected = probe_text(whole)
    text = composite.separate(whole).text
    more = expected._replace(calls=[*expected.calls, expected.calls[0]])
    with pytest.raises(
        ModelLoadError, match="because it calls attention 2 times, but 3 times as a part of the whole model"
    ):
        check_same_text(text, more, "X")


def _masked(probed: Probed, mask: object) -> Probed:
    return probed._replace(calls=[dataclasses.replace(call, mask=mask) for call in probed.calls])


def test_a_class_for_a_text_model_is_made_once_and_has_its_name() -> None:
    made = for_causal_lm(MuseGlimmerTextModel)
    assert made is for_causal_lm(MuseGlimmerTextModel)
    assert made.__name__ == "MuseGlimmerForCausalLM"
    assert made.config_class is MuseGlimmerTextModel.config_class


def changed(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the tensors of the checkpoint at ``path``."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


def test_only_weights_of_the_text_model_are_read(tmp_path: Path) -> None:
    save_composite("glm4v", tmp_path)
    whole = load(tmp_path).module.state_dict()

    def drop_encoder(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if ".visual." in name]:
            del tensors[name]

    changed(tmp_path, drop_encoder)
    alone = load(tmp_path).module.state_dict()
    assert whole.keys() == alone.keys()
    assert all(torch.equal(whole[name], alone[name]) for name in whole)


@pytest.mark.parametrize("name", ["model.language_model.layers.7.mlp.up_proj.weight", "model.unknown.weight"])
def test_tensors_that_belong_to_no_encoder_are_refused(tmp_path: Path, name: str) -> None:
    save_composite("glm4v", tmp_path)
    changed(tmp_path, lambda tensors: tensors.update({name: torch.ones(2, 2)}))
    with pytest.raises(ModelLoadError, match=rf"1 tensor that Glm4vForConditionalGeneration does not use: {name}"):
        load(tmp_path)


def test_the_speaking_half_of_an_omni_model_is_not_read(tmp_path: Path) -> None:
    save_composite("qwen3_omni_moe", tmp_path)
    more = {"talker.model.norm.weight": torch.ones(4), "code2wav.decoder.weight": torch.ones(2, 2)}
    changed(tmp_path, lambda tensors: tensors.update(more))
    assert type(load(tmp_path).module).__name__ == "Qwen3OmniMoeThinkerForCausalLM"


@pytest.mark.parametrize("with_towers", [False, True])
def test_experts_of_qwen3_vl_moe_may_have_inputs_first(tmp_path: Path, with_towers: bool) -> None:
    """Files on the hub have this layout. transformers' modules have outputs first."""
    save_multimodal_model("qwen3_vl_moe", tmp_path)
    expected = load(tmp_path, with_towers=with_towers).module.state_dict()

    def transpose(tensors: dict[str, torch.Tensor]) -> None:
        experts = [name for name in tensors if ".mlp.experts." in name]
        assert len(experts) == 4
        tensors.update({name: tensors[name].transpose(1, 2).contiguous() for name in experts})

    changed(tmp_path, transpose)
    found = load(tmp_path, with_towers=with_towers).module.state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
