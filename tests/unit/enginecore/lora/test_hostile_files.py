"""Special files at the place of an adapter's files are named in the refusal, and never block the reader."""

import io
import json
import os
from pathlib import Path

import pytest

from penstock_enginecore.lora.adapter_files import AdapterFolder, TensorFile
from penstock_enginecore.lora.errors import LoraError, LoraReason
from penstock_enginecore.lora.peft_format import CONFIG_FILE, parse_peft_config


@pytest.mark.parametrize(
    "header",
    [
        b"[" * (1 << 20),
        b'{"a":' + b"[" * (1 << 20),
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"more":' + b"[" * (1 << 20),
        b'{"__metadata__":' + b"[" * (1 << 20),
    ],
)
def test_a_header_without_bottom_is_refused(header: bytes) -> None:
    content = len(header).to_bytes(8, "little") + header
    with pytest.raises(LoraError, match="header cannot be read") as caught:
        TensorFile(io.BytesIO(content), "adapter_model.safetensors", len(content))
    assert caught.value.reason == LoraReason.TENSOR_FILE


def test_settings_that_nest_are_refused_before_they_are_written_into_errors() -> None:
    deep = '{"peft_type": "LORA", "use_quantum": ' + "[" * 200 + "]" * 200 + "}"
    with pytest.raises(LoraError, match="nested too deeply.*at most 64 levels"):
        parse_peft_config(deep.encode(), 8)


@pytest.mark.parametrize("kind", ["loop", "pipe", "directory", "device"])
def test_a_configuration_that_is_no_file(tmp_path: Path, kind: str) -> None:
    path = tmp_path / CONFIG_FILE
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to(CONFIG_FILE if kind == "loop" else "/dev/zero")
    with (
        AdapterFolder.at(tmp_path) as folder,
        pytest.raises(LoraError, match="symbolic links" if kind == "loop" else "not a regular file") as caught,
        folder.file(CONFIG_FILE),
    ):
        pass
    assert (caught.value.reason, caught.value.file) == (LoraReason.UNREADABLE, CONFIG_FILE)


def test_a_configuration_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "..data").mkdir()
    (tmp_path / "..data" / CONFIG_FILE).write_text(json.dumps({"a": 1}))
    (tmp_path / CONFIG_FILE).symlink_to(f"..data/{CONFIG_FILE}")
    with AdapterFolder.at(tmp_path) as folder, folder.file(CONFIG_FILE) as (opened, size):
        assert json.loads(opened.read()) == {"a": 1}
        assert size == 8
