"""Adapters whose files were read before: hashed once, and again when anything about the files is another."""

import os
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from penstock_enginecore.lora import peft_adapter
from penstock_enginecore.lora.adapter import LoraAdapter
from penstock_enginecore.lora.adapter_files import FileState, ReadBefore, StoredUpdate
from penstock_enginecore.lora.errors import LoraError
from penstock_enginecore.lora.peft_adapter import LoraLimits, adapter_bytes, read_adapter
from penstock_enginecore.lora.target import AdapterTarget
from tests.fakes.models.adapters import CONFIG, TENSORS, edit_config, edit_tensors, save_adapter
from tests.fakes.models.tiny_models import tiny_config

LIMITS = LoraLimits(64)


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Digests that were computed."""
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
    """One that looks at files an hour after they were written."""
    return ReadBefore(clock=lambda: time.time() + 3600)


def test_what_has_not_changed_is_hashed_once_and_is_the_same(
    model: PreTrainedModel, hashed: list[bytes], tmp_path: Path
) -> None:
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
    os.utime(tmp_path / TENSORS, ns=(state.st_atime_ns, state.st_mtime_ns))  # of the same size, and as old as before
    found.append(read(tmp_path, model, before).digest)
    assert len(set(found)) == 3
    assert found == hashed


def test_what_was_bad_is_looked_at_again(model: PreTrainedModel, hashed: list[bytes], tmp_path: Path) -> None:
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
