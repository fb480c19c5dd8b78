"""Random weights for a configuration alone."""

import shutil
from pathlib import Path

import pytest
import torch

from penstock_common.errors import ConfigError
from penstock_enginecore.config import ModelConfig
from penstock_enginecore.models.dtypes import NarrowWeight
from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.models.loader import LoadedModel, load_model
from penstock_enginecore.numerics_fingerprint import Loaded, config_of
from penstock_local.serving.plan import check_model

CPU = torch.device("cpu")
DEMO = Path("examples/demo_model/penstock-tiny")


@pytest.fixture
def without_weights(tmp_path: Path) -> Path:
    """Return a checkpoint without its weights, as it is before the weights are downloaded."""
    return shutil.copytree(DEMO, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))


def load(path: Path, lines: list[str] | None = None, **options: str) -> LoadedModel:
    report = (lambda line: None) if lines is None else lines.append
    return load_model(ModelConfig(path=str(path), load_format="dummy", **options), CPU, report)


def test_a_configuration_is_enough(without_weights: Path):
    lines: list[str] = []
    model = load(without_weights, lines)
    weight = model.module.get_input_embeddings().weight
    assert 0 < weight.std() < 1
    assert weight.isfinite().all()
    assert lines[-1] == "the weights are random: model.load_format is 'dummy'"


def test_they_are_the_same_each_time_and_leave_the_seed_alone(without_weights: Path):
    torch.manual_seed(7)
    before = torch.get_rng_state()
    first, second = load(without_weights), load(without_weights)
    assert torch.equal(torch.get_rng_state(), before)
    for one, other in zip(first.module.parameters(), second.module.parameters(), strict=True):
        assert torch.equal(one, other)


def test_they_have_the_dtype_that_is_asked_for(without_weights: Path):
    assert {p.dtype for p in load(without_weights, dtype="bfloat16").module.parameters()} == {torch.bfloat16}


def test_those_of_16_bits_are_computed_with_in_float32(without_weights: Path):
    config = ModelConfig(path=str(without_weights), load_format="dummy", dtype="bfloat16")
    model = load_model(config, CPU, lambda line: None, widen=True)
    assert (model.dtype, model.precision) == (torch.float32, torch.bfloat16)
    assert isinstance(model.module.get_input_embeddings().weight, NarrowWeight)
    assert model.module.model.norm.weight.dtype == torch.float32


def test_weights_that_are_there_are_not_read():
    stored = load_model(ModelConfig(path=str(DEMO)), CPU, lambda line: None)
    drawn = load(DEMO)
    assert not torch.equal(next(stored.module.parameters()), next(drawn.module.parameters()))


def test_engines_with_them_are_a_variant_of_their_own(without_weights: Path):
    config = ModelConfig(path=str(without_weights), load_format="dummy")
    values = config_of(config, Loaded(dtype="float32", task="generate", max_len=64, eos_token_ids=frozenset()))
    assert values["weights"] == "random"


def test_without_it_the_weights_are_missed(without_weights: Path):
    with pytest.raises(ModelLoadError, match="has no weights"):
        load_model(ModelConfig(path=str(without_weights)), CPU, lambda line: None)
    with pytest.raises(ConfigError, match="has no weights"):
        check_model(str(without_weights))
    check_model(str(without_weights), weights=False)
