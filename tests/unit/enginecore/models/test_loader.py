"""Loading checkpoints: errors, and reports of success."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock_common.errors import ConfigError
from penstock_enginecore.config import CacheConfig, ModelConfig
from penstock_enginecore.executor.device import check_kv_cache_memory, cpu_kv_cache_bytes
from penstock_enginecore.models import loader
from penstock_enginecore.models.dtypes import Dtypes, resolve_dtypes
from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.models.loader import load_model
from tests.fakes.models.tiny_models import VOCAB_SIZE, save_tiny_model, tiny_config

CPU = torch.device("cpu")


def load(path: Path | str, **model: object) -> loader.LoadedModel:
    return load_model(ModelConfig(path=str(path), **model), CPU, lambda line: None)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save_tiny_model("llama", tmp_path)
    return tmp_path


def edit_config(path: Path, **changes: object) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_a_checkpoint_is_loaded_with_its_limits(checkpoint: Path) -> None:
    edit_config(checkpoint, eos_token_id=[4, 9])
    model = load(checkpoint)
    assert model.vocab_size == VOCAB_SIZE
    assert model.max_len == 512
    assert {4, 9} <= model.eos_token_ids
    assert model.dtype == torch.float32
    assert not model.module.training


def test_end_tokens_of_the_generation_config_count_too(checkpoint: Path) -> None:
    edit_config(checkpoint, eos_token_id=4)
    (checkpoint / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    assert load(checkpoint).eos_token_ids == {4, 7, 8}


def test_progress_ends_with_all_tensors(checkpoint: Path) -> None:
    lines: list[str] = []
    load_model(ModelConfig(path=str(checkpoint)), CPU, lines.append)
    assert lines[0].startswith("loading LlamaForCausalLM from ")
    done = re.fullmatch(r"loading weights: (\d+)/(\d+) tensors of [\d.]+ MiB in 1 file", lines[-1])
    assert done is not None
    assert done[1] == done[2]


def test_progress_is_reported_along_the_way(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "_PROGRESS_INTERVAL", 0.0)
    lines: list[str] = []
    load_model(ModelConfig(path=str(checkpoint)), CPU, lines.append)
    counts = [int(match[1]) for line in lines if (match := re.match(r"loading weights: (\d+)/", line))]
    assert counts == sorted(counts)
    assert len(counts) > 10


@pytest.mark.parametrize("path", ["/no/such/model", "./nothing-here", "a/b/c"])
def test_a_path_that_does_not_exist(path: str) -> None:
    with pytest.raises(ModelLoadError, match=f"'{re.escape(path)}' does not exist; give a checkpoint directory"):
        load(path)


def test_a_path_that_is_a_file(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(ModelLoadError, match="is a file; give the directory"):
        load(file)


def test_a_directory_without_a_configuration(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"has no config\.json"):
        load(tmp_path)


def test_a_directory_without_weights(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"has no weights; expected \*\.safetensors"):
        load(checkpoint)


def test_an_unreadable_configuration(checkpoint: Path) -> None:
    (checkpoint / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match="configuration cannot be read"):
        load(checkpoint)


def test_an_unknown_model_type(checkpoint: Path) -> None:
    edit_config(checkpoint, model_type="never_heard_of")
    with pytest.raises(ModelLoadError, match="never_heard_of"):
        load(checkpoint)


def test_a_model_that_generates_no_text(checkpoint: Path) -> None:
    edit_config(checkpoint, model_type="vit", architectures=["ViTForImageClassification"])
    with pytest.raises(ModelLoadError, match="ViTForImageClassification is not supported: .* no causal language model"):
        load(checkpoint)


def test_damaged_weights(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(ModelLoadError, match=r"model\.safetensors has 11 bytes, so its header is incomplete"):
        load(checkpoint)


def test_missing_weights_are_never_made_up(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    weights = load_file(file)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(
        ModelLoadError, match=r"1 weights are missing, for example model\.layers\.1\.mlp\.up_proj\.weight"
    ):
        load(checkpoint)


def test_weights_of_another_shape(checkpoint: Path) -> None:
    edit_config(checkpoint, intermediate_size=32)
    with pytest.raises(ModelLoadError, match="weights"):
        load(checkpoint)


def test_a_model_without_a_length_needs_one_from_the_operator(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config("llama")
    config.__dict__["max_position_embeddings"] = None
    monkeypatch.setattr(loader, "read_config", lambda *args: config)
    with pytest.raises(ModelLoadError, match=r"set model\.max_model_len"):
        load(checkpoint)


@pytest.mark.parametrize(
    ("stored", "wanted", "device", "native", "expected"),
    [
        ("float32", "auto", "cpu", False, torch.float32),
        ("bfloat16", "auto", "cpu", False, torch.float32),
        ("bfloat16", "auto", "cpu", True, torch.bfloat16),
        ("float16", "auto", "cpu", False, torch.float32),
        ("float16", "auto", "cpu", True, torch.float32),
        ("float16", "float16", "cpu", True, torch.float32),
        ("bfloat16", "float16", "cpu", False, torch.float32),
        ("float16", "auto", "cuda", False, torch.float16),
        ("float32", "float16", "cuda", False, torch.float16),
        ("bfloat16", "auto", "cuda", False, torch.bfloat16),
        ("bfloat16", "float32", "cuda", True, torch.float32),
        ("float32", "bfloat16", "cpu", False, torch.bfloat16),
        (None, "auto", "cuda", True, torch.float32),
    ],
)
def test_dtype(
    monkeypatch: pytest.MonkeyPatch, stored: str | None, wanted: str, device: str, native: bool, expected: torch.dtype
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": native, "avx512_fp16": native})
    config = tiny_config("llama")
    config.dtype = stored and getattr(torch, stored)
    assert resolve_dtypes(wanted, config, torch.device(device)) == Dtypes.of(expected)


@pytest.mark.parametrize(
    ("stored", "wanted", "weights", "dense", "precision"),
    [
        ("float32", "auto", None, torch.float32, torch.float32),
        ("bfloat16", "auto", None, torch.bfloat16, torch.float32),
        ("bfloat16", "float32", None, torch.float32, torch.float32),
        ("float16", "auto", None, torch.float32, torch.float32),
        ("bfloat16", "float16", None, torch.float32, torch.float32),
        ("float32", "bfloat16", torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (None, "auto", None, torch.float32, torch.float32),
    ],
)
@pytest.mark.parametrize("native", [False, True])
def test_a_cpu_that_widens_weights_computes_in_float32(
    monkeypatch: pytest.MonkeyPatch,
    stored: str | None,
    wanted: str,
    weights: torch.dtype | None,
    dense: torch.dtype,
    precision: torch.dtype,
    native: bool,
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": native})
    config = tiny_config("llama")
    config.dtype = stored and getattr(torch, stored)
    found = resolve_dtypes(wanted, config, torch.device("cpu"), widen=True)
    assert found == Dtypes(torch.float32, weights, dense, precision)
    assert found.widens


def test_a_gpu_widens_nothing() -> None:
    config = tiny_config("llama")
    config.dtype = torch.bfloat16
    found = resolve_dtypes("auto", config, torch.device("cuda"), widen=True)
    assert found.computed == torch.bfloat16
    assert not found.widens


def test_a_pool_larger_than_the_machine_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"cache\.kv_cache_memory is 400000000000000 bytes \(372529\.0 GiB\); this"):
        check_kv_cache_memory(CacheConfig(kv_cache_memory=400_000_000_000_000), CPU)


def test_a_pool_of_a_size_that_is_left_is_taken() -> None:
    check_kv_cache_memory(CacheConfig(kv_cache_memory=2**20), CPU)


def test_the_default_pool_on_a_cpu_is_bounded() -> None:
    assert 0 < cpu_kv_cache_bytes() <= 4 * 2**30
    assert CacheConfig().kv_cache_memory is None
