"""Whatever bytes lie in an adapter's files, reading them ends in an adapter or in a LoraError."""

import contextlib
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load
from transformers import AutoModelForCausalLM

from penstock_enginecore.lora.adapter_files import TensorFile
from penstock_enginecore.lora.errors import LoraError
from penstock_enginecore.lora.peft_adapter import LoraLimits, read_adapter
from penstock_enginecore.lora.peft_format import parse_peft_config
from penstock_enginecore.lora.target import AdapterTarget
from tests.fakes.models.adapters import CONFIG, TENSORS, save_adapter
from tests.fakes.models.tiny_models import tiny_config

JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, AdapterTarget]:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(tiny_config("llama"), dtype=torch.float32).eval()
    folder = tmp_path_factory.mktemp("made")
    save_adapter(model, folder, r=1, target_modules=["q_proj"])
    return folder, AdapterTarget.of(model)


@pytest.mark.slow
@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
def test_any_change_of_bytes(made: tuple[Path, AdapterTarget], tmp_path: Path, data: st.DataObject) -> None:
    folder, target = made
    shutil.copytree(folder, tmp_path / "adapter", dirs_exist_ok=True)
    name = data.draw(st.sampled_from([CONFIG, TENSORS]))
    content = bytearray((folder / name).read_bytes())
    header = 8 + int.from_bytes(content[:8], "little") if name == TENSORS else len(content)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, min(header, len(content)) - 1))
        content[place] = data.draw(st.integers(0, 255))
    end = data.draw(st.one_of(st.just(len(content)), st.integers(0, len(content))))
    (tmp_path / "adapter" / name).write_bytes(content[:end])
    with contextlib.suppress(LoraError):
        read_adapter(tmp_path / "adapter", target, LoraLimits(8))


@pytest.mark.slow
@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
def test_any_values_of_settings(made: tuple[Path, AdapterTarget], tmp_path: Path, data: st.DataObject) -> None:
    folder, target = made
    shutil.copytree(folder, tmp_path / "adapter", dirs_exist_ok=True)
    given = json.loads((folder / CONFIG).read_text())
    keys = data.draw(st.lists(st.sampled_from(sorted(given)), min_size=1, max_size=2))
    given |= {key: data.draw(JSON) for key in keys}
    (tmp_path / "adapter" / CONFIG).write_text(json.dumps(given))
    with contextlib.suppress(LoraError):
        read_adapter(tmp_path / "adapter", target, LoraLimits(8))


@given(st.binary(max_size=60))
def test_any_configuration(content: bytes) -> None:
    with contextlib.suppress(LoraError):
        parse_peft_config(content, 8)


ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "F16", "I8"]),
        "shape": st.lists(st.integers(0, 3), max_size=3),
        "data_offsets": st.tuples(st.integers(0, 12), st.integers(0, 12)),
    }
)


@given(st.dictionaries(st.sampled_from("abc"), ENTRY, max_size=3), st.integers(0, 16), st.data())
def test_headers_are_right_where_the_safetensors_library_says_so(
    entries: dict[str, Any], size: int, data: st.DataObject
) -> None:
    if entries and data.draw(st.booleans()):  # random ones hardly ever fit
        widths, size = {"F32": 4, "F16": 2, "I8": 1}, 0
        for entry in entries.values():
            length = widths[entry["dtype"]]
            for each in entry["shape"]:
                length *= each
            entry["data_offsets"] = (size, size + length)
            size += length
    header = json.dumps(entries).encode()
    content = len(header).to_bytes(8, "little") + header + bytes(range(size % 256)).ljust(size, b"\1")
    try:
        wanted = load(content)
    except SafetensorError:
        with pytest.raises(LoraError):
            opened(content)
        return
    found = opened(content).read()
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        assert tensor.shape == tuple(wanted[name].shape)
        assert bytes(tensor.bytes()) == wanted[name].numpy().tobytes()


def opened(content: bytes) -> TensorFile:
    return TensorFile(io.BytesIO(content), "file", len(content))
