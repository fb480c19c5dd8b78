"""Adapters trained on multimodal models have PEFT's effect on the text models inside."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock_enginecore.config import ModelConfig
from penstock_enginecore.lora.errors import LoraError, LoraReason
from penstock_enginecore.lora.peft_adapter import LoraLimits, read_adapter
from penstock_enginecore.lora.target import AdapterTarget
from penstock_enginecore.models.loader import load_model
from tests.fakes.models.adapters import CONFIG, OF_TEXT, TENSORS, edit_config, merged, save_adapter
from tests.fakes.multimodal_models import FAMILIES, save_multimodal_model

CPU = torch.device("cpu")
LIMITS = LoraLimits(max_rank=64)
TEXT = r".*(language_model|text_model).*\.(q_proj|v_proj|o_proj|(?<!shared_expert\.)(?<!experts\.)down_proj)"


def target_of(folder: Path) -> AdapterTarget:
    """Return the target for the text model that the engine loads from a checkpoint."""
    return AdapterTarget.of(load_model(ModelConfig(path=str(folder)), CPU, lambda line: None).module)


def adapted(folder: Path, **settings: Any) -> tuple[Path, Any]:
    """Return an adapter of a LLaVA model, and PEFT's model with the adapter."""
    whole = save_multimodal_model("llava", folder / "model")
    return folder / "adapter", save_adapter(whole, folder / "adapter", **{"target_modules": TEXT, "r": 4} | settings)


def rename(adapter: Path, change: Callable[[str], str]) -> None:
    tensors = load_file(adapter / TENSORS)
    save_file({change(name): tensor for name, tensor in tensors.items()}, adapter / TENSORS)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_text_model_takes_what_was_trained_in_the_whole(family: str, tmp_path: Path) -> None:
    whole = save_multimodal_model(family, tmp_path / "model")
    before = {name: weight.clone() for name, weight in whole.state_dict().items()}
    trained = save_adapter(whole, tmp_path / "adapter", target_modules=TEXT, r=4, **OF_TEXT.get(family, {}))
    adapter = read_adapter(tmp_path / "adapter", target_of(tmp_path / "model"), LIMITS)
    after = merged(trained).state_dict()
    changed = {
        name.removesuffix(".weight"): after[name] - old for name, old in before.items() if not after[name].equal(old)
    }
    assert len(changed) == len(adapter.updates) > 0
    for layer, update in adapter.updates.items():
        (there,) = [name for name in changed if name.endswith(layer.removeprefix("model."))]
        torch.testing.assert_close(update.b @ update.a, changed[there], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("was", "is_now", "expression"),
    [
        ("model.language_model.", "model.", r"model\.layers.*\.(q_proj|v_proj|o_proj|down_proj)"),
        ("model.model.language_model.", "model.language_model.model.", TEXT),
        ("base_model.model.", "base_model.model._orig_mod.", TEXT),
        ("base_model.model.", "_orig_mod.base_model.model.", TEXT),
        (".self_attn.", "._checkpoint_wrapped_module.self_attn.", TEXT),
        (".layers.", "._fsdp_wrapped_module.layers.", TEXT),
    ],
    ids=["text model alone", "older transformers", "compiled", "compiled outside", "checkpoints", "FSDP"],
)
def test_layers_are_known_by_their_other_spellings(was: str, is_now: str, expression: str, tmp_path: Path) -> None:
    folder, _ = adapted(tmp_path)
    target = target_of(tmp_path / "model")
    wanted = read_adapter(folder, target, LIMITS)
    names = [*load_file(folder / TENSORS)]
    rename(folder, lambda name: name.replace(was, is_now))
    assert [*load_file(folder / TENSORS)] != names
    edit_config(folder, target_modules=expression)
    assert read_adapter(folder, target, LIMITS).digest == wanted.digest


def test_an_lm_head_of_the_whole_is_that_of_the_text_model(tmp_path: Path) -> None:
    folder, _ = adapted(tmp_path, target_modules=["q_proj", "lm_head"], exclude_modules=".*vision.*")
    adapter = read_adapter(folder, target_of(tmp_path / "model"), LIMITS)
    assert "lm_head" in adapter.updates


@pytest.mark.parametrize("targets", [["q_proj"], "all-linear"])
def test_updates_of_a_tower_or_a_projector_are_refused_by_name(targets: Any, tmp_path: Path) -> None:
    folder, _ = adapted(tmp_path, target_modules=targets)
    with pytest.raises(
        LoraError, match=r"(vision_tower|projector).*reads media, which does not support adapters; train"
    ) as e:
        read_adapter(folder, target_of(tmp_path / "model"), LIMITS)
    assert e.value.reason == LoraReason.MODULE


def test_notes_and_settings_of_training_are_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, _ = adapted(tmp_path)
    edit_config(folder, unsloth_fixed=True, _commit_hash="abc", megatron_config={"a": 1}, velora_config={"b": 2})
    with caplog.at_level("INFO"):
        assert read_adapter(folder, target_of(tmp_path / "model"), LIMITS).updates
    assert "ignoring 'unsloth_fixed'" in caplog.text
    assert "ignoring '_commit_hash'" in caplog.text
    edit_config(folder, use_something=True)
    with pytest.raises(LoraError, match="use_something has an unsupported value"):
        read_adapter(folder, target_of(tmp_path / "model"), LIMITS)


def test_an_adapter_that_was_saved_under_a_name_is_pointed_to(tmp_path: Path) -> None:
    folder, _ = adapted(tmp_path)
    (tmp_path / "saved").mkdir()
    folder.rename(tmp_path / "saved" / "sql")
    (tmp_path / "saved" / "notes").mkdir()
    (tmp_path / "saved" / "README.md").write_text("hello", encoding="utf-8")
    with pytest.raises(
        LoraError, match=r"adapter_config.json: the file is missing; adapters that were saved .*: /.*/sql$"
    ):
        read_adapter(tmp_path / "saved", target_of(tmp_path / "model"), LIMITS)
    assert json.loads((tmp_path / "saved" / "sql" / CONFIG).read_text())["peft_type"] == "LORA"
