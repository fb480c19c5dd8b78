"""Native objects are freed before the objects that they use, in any order of garbage collection."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock_enginecore.config import KernelsConfig, ModelConfig
from penstock_enginecore.forward.build import ForwardConfig, build_forward
from penstock_enginecore.forward.native import NativeForward
from penstock_enginecore.models.loader import load_model
from penstock_enginecore.native.library import open_library
from tests.fakes.models.tiny_models import save_tiny_model


@pytest.fixture
def freed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the names of freed objects in order. Nothing is really freed: a wrong order would crash the tests'
    process.
    """
    names: list[str] = []
    functions = open_library("baseline", 1)._functions
    gc.collect()
    for name in ("decoder", "context"):
        monkeypatch.setattr(functions, f"penstock_{name}_free", lambda handle, name=name: names.append(name))
    return names


def make_decoder(path: Path) -> NativeForward:
    save_tiny_model("llama", path, hidden_size=64)
    cpu = torch.device("cpu")
    model = load_model(ModelConfig(path=str(path)), cpu, lambda line: None)
    forward = build_forward(model, ForwardConfig(cpu, "auto", KernelsConfig(isa="baseline"), 1, 16)).forward
    assert isinstance(forward, NativeForward)
    return forward


@pytest.mark.parametrize("first", ["library", "decoder"])
def test_a_decoder_that_dies_with_its_library_in_one_collection_is_freed_first(
    first: str, tmp_path: Path, freed: list[str]
) -> None:
    decoder = make_decoder(tmp_path)
    cycle: list[Any] = [decoder._library, decoder]
    if first == "decoder":
        cycle.reverse()
    cycle.append(cycle)
    del decoder, cycle
    gc.collect()
    assert freed == ["decoder", "context"]


def test_a_decoder_keeps_its_library_until_it_is_gone(tmp_path: Path, freed: list[str]) -> None:
    decoder = make_decoder(tmp_path)
    gc.collect()
    assert freed == []
    del decoder
    gc.collect()
    assert freed == ["decoder", "context"]
