"""Adapters whose files were read before are hashed once, and again after any change of the files."""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from penstock_enginecore.lora import peft_adapter
from penstock_enginecore.lora.adapter import LoraAdapter
from penstock_enginecore.lora.adapter_files import DIGEST_SIZE, FileState, ReadBefore, StoredUpdate
from penstock_enginecore.lora.errors import LoraError
from penstock_enginecore.lora.peft_adapter import LoraLimits, adapter_bytes, read_adapter
from penstock_enginecore.lora.target import AdapterTarget
from tests.fakes.models.adapters import CONFIG, TENSORS, edit_config, edit_tensors, save_adapter
from tests.fakes.models.tiny_models import tiny_config

LIMITS = LoraLimits(64)


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Return the list of computed digests."""
    found: list[bytes] = []
    compute = peft_adapter.adapter_digest

    def counted(updates: Iterable[StoredUpdate]) -> bytes:
        found.append(compute(updates))
        return found[-1]

    monkeypatch.setattr(peft_adapter, "adapter_digest", counted)
    return found


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(tiny_config("llama"), dtype=torch.float32).eval()


def read(folder: Path, model: PreTrainedModel, before: ReadBefore) -> LoraAdapter:
    return read_adapter(folder, AdapterTarget.of(model), LIMITS, before)


def scale(tensors: dict[str, torch.Tensor], by: float) -> None:
    for tensor in tensors.values():
        tensor.mul_(by)


def later() -> ReadBefore:
    """Return a reader whose clock is one hour later than the files."""
    return ReadBefore(clock=lambda: time.time() + 3600)


def test_unchanged_files_are_hashed_once(model: PreTrainedModel, hashed: list[bytes], tmp_path: Path) -> None:
    save_adapter(model, tmp_path, r=4, lora_alpha=7)
    before = later()
    first, second = read(tmp_path, model, before), read(tmp_path, model, before)
    assert first.digest == second.digest == hashed[0]
    assert len(hashed) == 1
    for name, update in first.updates.items():
        assert torch.equal(update.a, second.updates[name].a)
        assert torch.equal(update.b, second.updates[name].b)


def test_files_that_were_written_just_now_are_hashed_each_time(
    model: PreTrainedModel, hashed: list[bytes], tmp_path: Path
) -> None:
    save_adapter(model, tmp_path, r=4)
    before = ReadBefore()
    assert read(tmp_path, model, before).digest == read(tmp_path, model, before).digest
    assert len(hashed) == 2


def test_other_settings_or_tensors_are_other_content(
    model: PreTrainedModel, hashed: list[bytes], tmp_path: Path
) -> None:
    save_adapter(model, tmp_path, r=4, lora_alpha=4)
    before = later()
    found = [read(tmp_path, model, before).digest]
    edit_config(tmp_path, lora_alpha=8)
    found.append(read(tmp_path, model, before).digest)
    state = (tmp_path / TENSORS).stat()
    edit_tensors(tmp_path, lambda tensors: scale(tensors, 2.0))
    os.utime(tmp_path / TENSORS, ns=(state.st_atime_ns, state.st_mtime_ns))  # same size and same modification time
    found.append(read(tmp_path, model, before).digest)
    assert len(set(found)) == 3
    assert found == hashed


def test_bad_files_are_read_again(model: PreTrainedModel, hashed: list[bytes], tmp_path: Path) -> None:
    save_adapter(model, tmp_path, r=4)
    edit_tensors(tmp_path, lambda tensors: scale(tensors, float("nan")))
    before = later()
    for _ in range(2):
        with pytest.raises(LoraError, match="not finite"):
            read(tmp_path, model, before)


def test_it_remembers_so_many_and_the_last_ones() -> None:
    files = [(FileState(1, number, 10, 0, 0),) for number in range(3)]
    before = ReadBefore(2)
    for number in (0, 1, 0, 2):
        before.remember(files[number], bytes([number]))
    assert [before.digest(each) for each in files] == [b"\0", None, b"\2"]


def test_a_size_is_known_without_reading_tensors(model: PreTrainedModel, tmp_path: Path) -> None:
    save_adapter(model, tmp_path, r=4)
    assert adapter_bytes(tmp_path, LIMITS) == read(tmp_path, model, ReadBefore()).num_bytes
    (tmp_path / CONFIG).write_text("{}")
    with pytest.raises(LoraError, match="adapter_config"):
        adapter_bytes(tmp_path, LIMITS)


# An adapter is identified by its content, in any file format.

NAME = "base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"


@pytest.fixture
def folder(model: PreTrainedModel, tmp_path: Path) -> Path:
    save_adapter(model, tmp_path / "adapter", r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"])
    return tmp_path / "adapter"


def digest(folder: Path, model: PreTrainedModel) -> bytes:
    return read_adapter(folder, AdapterTarget.of(model), LoraLimits(16)).digest


def rewrite(folder: Path, order: Callable[[list[str]], list[str]]) -> None:
    """Write the file of tensors in another order, with other spaces and metadata."""
    tensors = load_file(folder / TENSORS)
    entries: dict[str, Any] = {"__metadata__": {"format": "pt", "made_by": "hand"}}
    data = b""
    for name in order(sorted(tensors)):
        values = tensors[name].numpy().tobytes()
        end = len(data) + len(values)
        entries[name] = {"dtype": "F32", "shape": list(tensors[name].shape), "data_offsets": [len(data), end]}
        data += values
    header = json.dumps(entries, indent=3).encode()
    (folder / TENSORS).write_bytes(len(header).to_bytes(8, "little") + header + data)


SAME: dict[str, Callable[[Path], object]] = {
    "order in the file": lambda folder: rewrite(folder, lambda names: names[::-1]),
    "order of settings": lambda folder: edit_config(
        folder, **dict(reversed(list(json.loads((folder / CONFIG).read_text()).items())))
    ),
    "PEFT's version": lambda folder: edit_config(folder, peft_version="0.4.0"),
    "training": lambda folder: edit_config(
        folder, lora_dropout=0.3, base_model_name_or_path="elsewhere", inference_mode=False, revision="main"
    ),
    "settings of later versions": lambda folder: edit_config(folder, use_something=False, something_config=None),
    "other words for the same layers": lambda folder: edit_config(folder, target_modules=r".*\.(q|down)_proj"),
    "other words for the same scale": lambda folder: edit_config(folder, lora_alpha=4, use_rslora=True),
    "other words for the same ranks": lambda folder: edit_config(
        folder, r=9, lora_alpha=8.0, rank_pattern={".*_proj": 4}
    ),
    "the adapter's name in names": lambda folder: edit_tensors(
        folder,
        lambda held: held.update({name.replace(".weight", ".default.weight"): held.pop(name) for name in list(held)}),
    ),
}

OTHER: dict[str, Callable[[Path], object]] = {
    "a number": lambda folder: edit_tensors(folder, lambda held: held[NAME][0, 0].add_(1e-3)),
    "a sign of zero": lambda folder: edit_tensors(folder, lambda held: held[NAME][0, 0].fill_(-0.0)),
    "a scale": lambda folder: edit_config(folder, lora_alpha=9),
    "a scale of one layer": lambda folder: edit_config(folder, alpha_pattern={"0.self_attn.q_proj": 1}),
    "the type": lambda folder: edit_tensors(
        folder, lambda held: held.update({name: each.bfloat16() for name, each in held.items()})
    ),
    "layers in each other's place": lambda folder: edit_tensors(
        folder,
        lambda held: held.update({name.translate(str.maketrans("01", "10")): each for name, each in held.items()}),
    ),
}


@pytest.mark.parametrize("what", SAME)
def test_the_digest_does_not_depend_on(what: str, folder: Path, model: PreTrainedModel) -> None:
    before = digest(folder, model)
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    SAME[what](folder)
    assert files != {file.name: file.read_bytes() for file in folder.iterdir()}
    assert digest(folder, model) == before
    assert len(before) == DIGEST_SIZE


def test_all_other_contents_have_other_digests(folder: Path, model: PreTrainedModel, tmp_path: Path) -> None:
    edit_tensors(folder, lambda held: held[NAME][0, 0].fill_(0.0))
    found = {"as it was": digest(folder, model)}
    for what, change in OTHER.items():
        shutil.copytree(folder, tmp_path / what)
        change(tmp_path / what)
        found[what] = digest(tmp_path / what, model)
    assert len(set(found.values())) == len(OTHER) + 1, found


def test_the_digest_of_a_content_is_the_same_in_all_releases(tmp_path: Path) -> None:
    layer = "base_model.model.lm_head"
    held = {f"{layer}.lora_A.weight": torch.arange(6.0).view(2, 3), f"{layer}.lora_B.weight": torch.ones(4, 2).half()}
    save_file(held, tmp_path / TENSORS)
    settings = {"peft_type": "LORA", "target_modules": ["lm_head"], "r": 2, "lora_alpha": 1}
    (tmp_path / CONFIG).write_text(json.dumps(settings))
    adapter = read_adapter(tmp_path, AdapterTarget("", {"lm_head": (4, 3)}), LoraLimits(2))
    assert adapter.digest.hex() == "a2122b5cd4cc9131cec24b0c337e49ea"
    assert torch.equal(adapter.updates["lm_head"].b, torch.full((4, 2), 0.5))
