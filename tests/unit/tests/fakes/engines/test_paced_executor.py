"""The oracle service's executor, as far as it differs from the fake executor, in an engine that is driven step by step."""

import json
from pathlib import Path

import msgspec
import pytest

from penstock_enginecore.models.errors import ModelLoadError
from tests.fakes.engines.engine_harness import make_config
from tests.fakes.engines.oracle_service.executor import PacedExecutor
from tests.fakes.engines.oracle_service.pace import Pace

CHECKPOINT = {
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "hidden_size": 32,
}


def executor(folder: Path, *, load_seconds: float = 0.0, **checkpoint: object) -> tuple[PacedExecutor, list[float]]:
    """One of a checkpoint with these values changed, and how long it has slept."""
    (folder / "config.json").write_text(json.dumps(CHECKPOINT | checkpoint))
    slept: list[float] = []
    config = make_config()
    config = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, path=str(folder)))
    return PacedExecutor(config, Pace(load_seconds=load_seconds), sleep=slept.append), slept


def test_it_has_the_sizes_of_the_checkpoint(tmp_path: Path):
    made, _ = executor(tmp_path, num_key_value_heads=2)
    model = made.load_model(lambda line: None)
    assert (model.vocab_size, model.max_len, model.eos_token_ids) == (128, 64, frozenset())
    specs = made.kv_cache_specs()
    assert len(specs) == 3
    assert {(spec.num_kv_heads, spec.head_size, spec.dtype_size) for spec in specs.values()} == {(2, 8, 4)}


def test_it_loads_for_as_long_as_it_was_told(tmp_path: Path):
    made, slept = executor(tmp_path, load_seconds=30.0)
    made.load_model(lambda line: None)
    assert slept == [30.0]


@pytest.mark.parametrize("value", [None, "many"])
def test_a_checkpoint_without_a_size_is_refused_by_its_key(tmp_path: Path, value: object):
    with pytest.raises(ModelLoadError, match=f"config.json: vocab_size is {value!r}"):
        executor(tmp_path, vocab_size=value)


def test_what_is_no_directory_of_a_checkpoint_is_refused(tmp_path: Path):
    (tmp_path / "config.json").write_text("{")
    config = make_config()
    for path in (tmp_path, tmp_path / "none"):
        model = msgspec.structs.replace(config.model, path=str(path))
        with pytest.raises(ModelLoadError, match="the oracle engine reads config.json from a directory"):
            PacedExecutor(msgspec.structs.replace(config, model=model), Pace())
