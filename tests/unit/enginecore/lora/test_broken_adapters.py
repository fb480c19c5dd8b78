"""Adapters that would not be served as they were trained are refused. The error names the defect and its place."""

import contextlib
import io
import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load
from transformers import AutoModelForCausalLM, PreTrainedModel

from penstock_enginecore.lora.adapter_files import AdapterFolder, TensorFile
from penstock_enginecore.lora.errors import LoraError, LoraReason
from penstock_enginecore.lora.peft_adapter import LoraLimits, read_adapter
from penstock_enginecore.lora.peft_format import parse_peft_config
from penstock_enginecore.lora.target import AdapterTarget
from tests.fakes.models.adapters import CONFIG, TENSORS, edit_config, save_adapter
from tests.fakes.models.broken_adapters import BROKEN, CHANGES, FAMILY, HEAD_COPY, MAX_RANK, save_good_adapter
from tests.fakes.models.pooling_models import save_pooling_model
from tests.fakes.models.tiny_models import tiny_config

R = LoraReason


LIMITS = LoraLimits(max_rank=MAX_RANK)


def tiny(family: str, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(tiny_config(family, **changes), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny(FAMILY, **CHANGES)


@pytest.fixture(scope="module")
def target(model: PreTrainedModel) -> AdapterTarget:
    return AdapterTarget.of(model)


@pytest.fixture(scope="module")
def good(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    save_good_adapter(model, folder)
    return folder


def refused(folder: Path, target: AdapterTarget) -> LoraError:
    with pytest.raises(LoraError) as caught:
        read_adapter(folder, target, LIMITS)
    return caught.value


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_adapter_is_refused_by_what_is_broken(
    name: str, good: Path, target: AdapterTarget, tmp_path: Path
) -> None:
    broken = BROKEN[name]
    folder = tmp_path / "adapter"
    shutil.copytree(good, folder)
    read_adapter(folder, target, LIMITS)
    broken.do(folder)
    error = refused(folder, target)
    assert error.reason == broken.reason
    for word in broken.words:
        assert word in str(error)


def test_a_path_without_anything_is_told_with_the_nearest_name(
    good: Path, target: AdapterTarget, tmp_path: Path
) -> None:
    shutil.copytree(good, tmp_path / "customer-7")
    error = refused(tmp_path / "customer7", target)
    assert error.reason == R.NOT_FOUND
    assert str(tmp_path / "customer7") in str(error)
    assert "customer-7" in str(error)


def test_a_path_of_a_file_is_told(good: Path, target: AdapterTarget) -> None:
    error = refused(good / TENSORS, target)
    assert error.reason == R.NOT_FOUND
    assert "is not a directory" in str(error)


def test_a_path_that_cannot_be_one_is_told(target: AdapterTarget) -> None:
    assert refused(Path("with\0zero"), target).reason == R.UNREADABLE
    assert refused(Path("x" * 5000), target).reason == R.UNREADABLE


def test_a_file_that_cannot_be_opened_is_told(good: Path, target: AdapterTarget, tmp_path: Path) -> None:
    shutil.copytree(good, tmp_path / "adapter")
    (tmp_path / "adapter" / TENSORS).unlink()
    (tmp_path / "adapter" / TENSORS).symlink_to(TENSORS)  # a link to itself
    error = refused(tmp_path / "adapter", target)
    assert error.reason == R.UNREADABLE
    assert "symbolic links" in str(error)


def test_conv1d_takes_no_adapter(tmp_path: Path) -> None:
    model = tiny("gpt2")
    save_adapter(model, tmp_path, target_modules=["c_attn"], fan_in_fan_out=True)
    assert refused(tmp_path, AdapterTarget.of(model)).reason == R.FAN_IN_FAN_OUT
    edit_config(tmp_path, fan_in_fan_out=False)
    error = refused(tmp_path, AdapterTarget.of(model))
    assert error.reason == R.CONV1D
    assert "transformer.h.0.attn.c_attn" in str(error)
    edit_config(tmp_path, target_modules="all-linear")
    assert refused(tmp_path, AdapterTarget.of(model)).reason == R.CONV1D


def test_experts_that_all_tokens_share_take_no_adapter(tmp_path: Path) -> None:
    model = tiny("qwen2_moe")
    target = AdapterTarget.of(model)
    save_adapter(model, tmp_path / "attention", target_modules=["q_proj", "o_proj"])
    assert len(read_adapter(tmp_path / "attention", target, LIMITS).updates) == 4
    save_adapter(model, tmp_path / "shared", target_modules=["q_proj", "down_proj"])
    error = refused(tmp_path / "shared", target)
    assert error.reason == R.EXPERTS
    assert "shared_expert.down_proj" in str(error)


@pytest.mark.filterwarnings("ignore")
def test_an_adapter_of_experts_weights_is_refused(tmp_path: Path) -> None:
    model = tiny("mixtral")
    save_adapter(model, tmp_path, target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"])
    target = AdapterTarget.of(model)
    assert refused(tmp_path, target).reason == R.TARGET_PARAMETERS
    edit_config(tmp_path, target_parameters=None)
    assert refused(tmp_path, target).reason == R.EXPERTS


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"use_dora": True}, R.DORA),
        ({"init_lora_weights": "pissa"}, R.CHANGED_BASE),
        ({"init_lora_weights": "olora"}, R.CHANGED_BASE),
        ({"bias": "all"}, R.BIAS),
        ({"lora_bias": True}, R.LORA_BIAS),
        ({"modules_to_save": ["lm_head"]}, R.MODULES_TO_SAVE),
        ({"target_modules": ["embed_tokens"]}, R.EMBEDDING),
        ({"trainable_token_indices": [3, 4]}, R.TRAINABLE_TOKENS),
        ({"layer_replication": [[0, 2], [0, 2]]}, R.LAYER_REPLICATION),
    ],
    ids=str,
)
def test_what_peft_itself_writes_is_refused(settings: dict[str, Any], reason: LoraReason, tmp_path: Path) -> None:
    model = tiny("qwen2")  # its projections have biases
    save_adapter(model, tmp_path, **{"target_modules": ["q_proj"], **settings})
    assert refused(tmp_path, AdapterTarget.of(model)).reason == reason


@pytest.mark.filterwarnings("ignore")
def test_a_classifiers_new_head_is_refused(tmp_path: Path) -> None:
    model = save_pooling_model("llama", tmp_path / "model", head="ForSequenceClassification")
    save_adapter(model, tmp_path / "adapter", task_type="SEQ_CLS")
    error = refused(tmp_path / "adapter", AdapterTarget.of(model))
    assert error.reason == R.MODULES_TO_SAVE
    assert "score" in str(error)


def test_weights_that_are_not_there_to_compare_are_not_taken_for_the_same(good: Path, model: PreTrainedModel) -> None:
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(model.config)
    error = refused(good, AdapterTarget.of(skeleton))
    assert error.reason == R.SURPLUS_TENSOR
    assert HEAD_COPY in str(error)


def test_an_error_survives_its_way_between_processes(good: Path, target: AdapterTarget, tmp_path: Path) -> None:
    shutil.copytree(good, tmp_path / "adapter")
    edit_config(tmp_path / "adapter", r=32)
    error = refused(tmp_path / "adapter", target)
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, LoraError)
    assert (str(again), again.reason, again.tensor) == (str(error), error.reason, error.tensor)


def test_a_file_that_changes_while_it_is_read_is_refused(good: Path, target: AdapterTarget, tmp_path: Path) -> None:
    shutil.copytree(good, tmp_path / "adapter")
    file = tmp_path / "adapter" / TENSORS

    class Touching(AdapterTarget):
        """Looked at while the file is open."""

        @property
        def all_linear(self) -> frozenset[str]:
            os.utime(file, ns=(1, 1))
            return super().all_linear

    touching = Touching(target.model, target.linears, target.unserved, target.heads, target.prefix, target.samples)
    error = refused(tmp_path / "adapter", touching)
    assert error.reason == R.UNREADABLE
    assert "changed" in str(error)


def test_a_directory_that_is_replaced_meanwhile_is_read_as_one(
    good: Path, target: AdapterTarget, tmp_path: Path
) -> None:
    shutil.copytree(good, tmp_path / "adapter")
    wanted = read_adapter(good, target, LIMITS).digest
    with AdapterFolder.at(tmp_path / "adapter") as folder:
        (tmp_path / "adapter").rename(tmp_path / "before")
        (tmp_path / "adapter").mkdir()
        with folder.file(CONFIG) as (opened, size):
            assert opened.read(size) == (good / CONFIG).read_bytes()
    assert refused(tmp_path / "adapter", target).reason == R.NOT_FOUND
    assert read_adapter(tmp_path / "before", target, LIMITS).digest == wanted


# For any bytes in an adapter's files, reading returns an adapter or raises LoraError.

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
    if entries and data.draw(st.booleans()):  # random entries are almost never valid
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
