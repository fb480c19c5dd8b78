"""Settings that change the numerics of engines with the same model, and settings that do not."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock_enginecore.config import ModelConfig
from penstock_enginecore.numerics_fingerprint import Loaded, config_of, hash_of
from tests.fakes.models.tiny_models import save_tiny_model

LOADED = Loaded(dtype="float32", task="generate", max_len=512, eos_token_ids=frozenset({4, 9}))


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("variant") / "original"
    save_tiny_model("llama", path)
    return path


@pytest.fixture
def copy(original: Path, tmp_path: Path) -> Path:
    """Copy the checkpoint into another directory, where the test changes it."""
    return shutil.copytree(original, tmp_path / "elsewhere")


def values(path: Path, loaded: Loaded = LOADED, **model: Any) -> dict[str, str]:
    return config_of(ModelConfig(path=str(path), **model), loaded)


def differing(a: dict[str, str], b: dict[str, str]) -> set[str]:
    assert (hash_of(a) == hash_of(b)) == (a == b)
    return {key for key in a | b if a.get(key) != b.get(key)}


def edit(path: Path, **changes: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def retrain(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


def test_the_same_checkpoint_from_another_directory_is_the_same(original: Path, copy: Path) -> None:
    assert differing(values(original), values(copy)) == set()


def test_constraints_in_the_reasoning_make_a_difference(original: Path) -> None:
    constrained = values(original, msgspec.structs.replace(LOADED, enable_in_reasoning=True))
    assert differing(values(original), constrained) == {"enable_in_reasoning"}


def test_rules_for_output_tokens_make_a_difference_for_the_models_that_have_them(original: Path, copy: Path) -> None:
    (copy / "generation_config.json").write_text('{"suppress_tokens": [1]}')
    assert differing(values(original), values(copy)) == set()
    edit(copy, model_type="whisper")
    before = values(copy)
    (copy / "generation_config.json").write_text('{"suppress_tokens": [1, 2]}')
    assert differing(before, values(copy)) == {"token_rules"}


def test_another_kv_cache_is_another_variant(original: Path) -> None:
    exact, rounded = values(original), values(original, msgspec.structs.replace(LOADED, cache_dtype="fp8"))
    assert differing(exact, rounded) == {"cache_dtype"}
    ordered = values(original, msgspec.structs.replace(LOADED, batch_invariant=True))
    assert differing(exact, ordered) == {"batch_invariant"}
    unrounded = values(original, msgspec.structs.replace(LOADED, fp8_activations="off"))
    assert differing(exact, unrounded) == {"fp8_activations"}


def test_parts_of_the_model_make_a_difference(original: Path) -> None:
    parts = values(original, msgspec.structs.replace(LOADED, tensor_parallel_size=2))
    assert differing(values(original), parts) == {"tensor_parallel_size"}


def test_limits_of_the_engine_make_no_difference(original: Path) -> None:
    limited = values(original, max_model_len=64, max_logprobs=3, served_model_name="other", attention_backend="sdpa")
    assert differing(values(original), limited) == set()


def test_descriptive_fields_of_the_checkpoint_make_no_difference(original: Path, copy: Path) -> None:
    edit(copy, transformers_version="1.2.3", use_cache=False, id2label={"0": "x"})
    assert differing(values(original), values(copy)) == set()


def test_weights_cut_into_other_files_make_no_difference(original: Path, copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    names = sorted(tensors)
    (copy / "model.safetensors").unlink()
    parts = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, copy / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    save_file({"unused": torch.ones(1)}, copy / "consolidated.safetensors")
    assert differing(values(original), values(copy)) == set()


def test_another_dtype_is_another_variant(original: Path) -> None:
    other = msgspec.structs.replace(LOADED, dtype="bfloat16")
    assert differing(values(original), values(original, other)) == {"dtype"}


def test_other_end_tokens_are_another_variant(original: Path) -> None:
    other = msgspec.structs.replace(LOADED, eos_token_ids=frozenset({4}))
    assert differing(values(original), values(original, other)) == {"eos_token_ids"}


def test_weights_trained_further_are_another_variant(original: Path, copy: Path) -> None:
    retrain(copy, lambda tensors: tensors["model.layers.1.mlp.up_proj.weight"].mul_(1.001))
    assert differing(values(original), values(copy)) == {"weights"}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope_parameters", {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}),
        ("sliding_window", 8),
        ("rms_norm_eps", 1e-3),
        ("quantization_config", {"quant_method": "fp8"}),
    ],
)
def test_what_the_model_s_configuration_computes_otherwise_is_another_variant(
    original: Path, copy: Path, key: str, value: Any
) -> None:
    edit(copy, **{key: value})
    assert differing(values(original), values(copy)) == {f"config.{key}"}


@pytest.mark.parametrize(
    ("scaling", "short", "same", "long"),
    [
        ({"rope_type": "longrope", "original_max_position_embeddings": 128}, 100, 128, 129),
        ({"rope_type": "dynamic", "factor": 4.0}, 100, 512, 600),
    ],
)
def test_the_length_counts_where_rotary_scaling_depends_on_it(
    copy: Path, scaling: dict[str, Any], short: int, same: int, long: int
) -> None:
    edit(copy, rope_parameters=scaling)
    shorter = values(copy, max_model_len=short)
    assert differing(shorter, values(copy, max_model_len=same)) == set()
    assert differing(shorter, values(copy, max_model_len=long)) == {"rotary_length"}


def test_remote_code_counts_where_it_is_trusted(original: Path, copy: Path) -> None:
    (copy / "modeling.py").write_text("pass")
    assert differing(values(original), values(copy)) == set()
    assert differing(values(original), values(copy, trust_remote_code=True)) == {"code"}


def test_how_vectors_are_pooled_is_another_variant(original: Path, copy: Path) -> None:
    (copy / "1_Pooling").mkdir()
    (copy / "1_Pooling" / "config.json").write_text("{}")
    embeds = msgspec.structs.replace(LOADED, task="embed")
    assert differing(values(original, embeds), values(copy, embeds)) == {"pooling"}


def test_the_revision_is_the_commit_where_the_hubs_cache_says_it(original: Path, tmp_path: Path) -> None:
    commit = shutil.copytree(original, tmp_path / "snapshots" / "0a1b2c")
    assert values(commit, revision="main")["revision"] == "0a1b2c"
    assert values(original, revision="v2")["revision"] == "v2"


def test_long_values_are_given_as_hashes(copy: Path) -> None:
    edit(copy, layer_types=["full_attention"] * 100)
    assert len(values(copy)["config.layer_types"]) == 16


def test_a_checkpoint_that_cannot_be_read_again_is_a_variant_of_its_own(copy: Path) -> None:
    (copy / "model.safetensors").write_bytes(b"\x08")
    assert values(copy)["weights"].startswith("unreadable: ")
