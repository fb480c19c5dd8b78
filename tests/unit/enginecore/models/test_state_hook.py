"""Replaced functions of recurrent layers compute the recurrence of transformers, and layers that are never called stay dense."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock_enginecore.config import ModelConfig
from penstock_enginecore.models.loader import load_model
from penstock_enginecore.models.quantization.layers import QuantizedLinear
from penstock_enginecore.models.state_hook import ReadLinear, find_mixers, install, weights_read_directly
from penstock_enginecore.states.base import StateMetadata, use_states
from penstock_enginecore.states.reference import ReferenceStates
from tests.fakes.models.quantized_models import save_quantized_model
from tests.fakes.models.tiny_models import RECURRENT_ARCHITECTURES, VOCAB_SIZE, save_tiny_model

WITH_READ_WEIGHTS = ("falcon_mamba", "jamba", "mamba")
LENGTH = 50


@pytest.mark.parametrize("architecture", RECURRENT_ARCHITECTURES)
def test_a_prompt_has_the_logits_of_the_original_functions(architecture: str, tmp_path: Path) -> None:
    model: Any = save_tiny_model(architecture, tmp_path)
    tokens = torch.randint(1, VOCAB_SIZE, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    install(model)
    step = StateMetadata.alone(np.array([0, LENGTH]), np.array([LENGTH]))
    with torch.inference_mode():
        expected = model(tokens, use_cache=False).logits  # without a context, the original functions run
        with use_states(ReferenceStates(step)):
            found = model(tokens, use_cache=False).logits
    torch.testing.assert_close(found, expected, rtol=0.0, atol=2e-4)


@pytest.mark.parametrize("architecture", RECURRENT_ARCHITECTURES)
def test_layers_whose_weights_are_read_are_marked(architecture: str, tmp_path: Path) -> None:
    model = save_tiny_model(architecture, tmp_path)
    mixers = find_mixers(model)
    expected = {f"{name}.dt_proj" for name in mixers} if architecture in WITH_READ_WEIGHTS else set()
    for _ in range(2):  # before and after the functions are replaced
        assert weights_read_directly(model).keys() == expected
        install(model)
    marked = {name for name, module in model.named_modules() if isinstance(module, ReadLinear)}
    assert marked == expected
    called: list[str] = []
    for name in expected:
        model.get_submodule(name).register_forward_hook(lambda *_, name=name: called.append(name))
    model(torch.ones(1, 3, dtype=torch.int64), use_cache=False)
    assert not called


@pytest.mark.parametrize("form", ["fp8-blocks", "gptq"])
def test_quantized_weights_that_are_read_are_dequantized_at_load(form: str, tmp_path: Path) -> None:
    save_quantized_model("jamba", form, tmp_path, mamba_dt_rank=8)
    loaded = load_model(
        ModelConfig(path=str(tmp_path)), torch.device("cpu"), lambda line: None, keep=lambda scheme: True
    )
    mixer: Any = loaded.module.get_submodule("model.layers.0.mamba")
    assert isinstance(mixer.in_proj, QuantizedLinear)
    assert type(mixer.dt_proj) is ReadLinear
    assert mixer.dt_proj.weight.dtype == torch.float32


def test_functions_of_a_file_are_replaced_once(tmp_path: Path) -> None:
    model = save_tiny_model("jamba", tmp_path)
    functions = vars(sys.modules[type(model).__module__])
    install(model)
    replaced = functions["mamba_selective_scan"]
    install(model)
    assert functions["mamba_selective_scan"] is replaced
    assert not hasattr(functions["mamba_selective_state_update"], "_penstock_original")
