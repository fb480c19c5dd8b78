"""Code in a checkpoint runs only if the user allowed it."""

import json
from pathlib import Path

import pytest

from penstock_enginecore.config import EngineCoreConfig, ModelConfig
from penstock_enginecore.models.loader import ModelLoadError, read_config

NO_TENSORS = b"\x02\0\0\0\0\0\0\0{}"


def checkpoint_with_code(folder: Path) -> Path:
    """Write a checkpoint whose configuration class creates a file when it is imported."""
    folder.mkdir()
    ran = folder / "ran"
    config = {"model_type": "stranger", "auto_map": {"AutoConfig": "configuration_stranger.StrangerConfig"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(NO_TENSORS)
    (folder / "configuration_stranger.py").write_text(
        "from pathlib import Path\n"
        "from transformers import PretrainedConfig\n"
        f"Path({str(ran)!r}).touch()\n"
        "class StrangerConfig(PretrainedConfig):\n"
        "    model_type = 'stranger'\n"
    )
    return ran


def test_a_checkpoints_code_does_not_run_by_default(tmp_path: Path) -> None:
    ran = checkpoint_with_code(tmp_path / "model")
    assert EngineCoreConfig(model=ModelConfig(path=str(tmp_path))).model.trust_remote_code is False
    with pytest.raises(ModelLoadError, match="model.path"):
        read_config(ModelConfig(path=str(tmp_path / "model")))
    assert not ran.exists()


def test_a_checkpoints_code_runs_when_it_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    ran = checkpoint_with_code(tmp_path / "model")
    read_config(ModelConfig(path=str(tmp_path / "model"), trust_remote_code=True))
    assert ran.exists()  # otherwise the test above would prove nothing
