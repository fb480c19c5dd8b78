"""Defects in the files of a checkpoint are reported before loading."""

import json
from pathlib import Path

import pytest
import torch

from penstock_enginecore.config import ModelConfig
from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.models.loader import load_model
from penstock_enginecore.pooling.embedder import load_pooling_model
from tests.fakes.models.tiny_models import save_tiny_model
from tests.fakes.multimodal_models import save_multimodal_model

CPU = torch.device("cpu")


def problem(path: Path) -> str:
    with pytest.raises(ModelLoadError) as refused:
        load_model(ModelConfig(path=str(path)), CPU, lambda line: None)
    return str(refused.value)


def edit_config(path: Path, **changes: object) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.fixture(params=["llama", "qwen3_moe"])
def checkpoint(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    save_tiny_model(request.param, tmp_path)
    return tmp_path


def test_a_tensor_of_another_shape_is_named_with_both(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    size, width = config["vocab_size"], config["hidden_size"]
    edit_config(checkpoint, vocab_size=size + 8)
    assert f"tensor model.embed_tokens.weight has shape [{size}, {width}] in the files" in problem(checkpoint)
    assert f"but config.json requires [{size + 8}, {width}]" in problem(checkpoint)


def test_nothing_is_read_where_a_shape_is_wrong(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit_config(checkpoint, vocab_size=7)
    monkeypatch.setattr("penstock_enginecore.models.loader.AutoModelForCausalLM.from_pretrained", None)
    assert "tensor model.embed_tokens.weight has shape" in problem(checkpoint)


def test_experts_that_are_stacked_when_loaded_are_named_too(tmp_path: Path) -> None:
    save_tiny_model("qwen3_moe", tmp_path)
    size = json.loads((tmp_path / "config.json").read_text())["moe_intermediate_size"]
    edit_config(tmp_path, moe_intermediate_size=2 * size)
    assert "has shape" in problem(tmp_path)
    assert ".experts." in problem(tmp_path)


def test_towers_and_pooling_models_are_compared_too(tmp_path: Path) -> None:
    save_multimodal_model("llava", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    edit_config(tmp_path, vision_config={**config["vision_config"], "intermediate_size": 40})
    with pytest.raises(ModelLoadError, match=r"tensor model.vision_tower.* has shape"):
        load_model(ModelConfig(path=str(tmp_path)), CPU, lambda line: None, with_towers=True)
    load_model(ModelConfig(path=str(tmp_path)), CPU, lambda line: None)  # reads only the text model
    save_tiny_model("llama", tmp_path / "pooled")
    edit_config(tmp_path / "pooled", intermediate_size=8)
    with pytest.raises(ModelLoadError, match="has shape"):
        load_pooling_model(ModelConfig(path=str(tmp_path / "pooled"), task="embed"), "embed", CPU, lambda line: None)
