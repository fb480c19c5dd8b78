"""Adapters in the native decoder: the modules' numbers, and the same bits in every batch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock_enginecore.attention.factory import create_backend
from penstock_enginecore.config import KernelsConfig, ModelConfig
from penstock_enginecore.forward.build import ForwardConfig, build_forward
from penstock_enginecore.forward.modules import ModulesForward, probe_model
from penstock_enginecore.forward.native import NativeForward
from penstock_enginecore.lora.adapter import AdaptedForward, LoraAdapter
from penstock_enginecore.lora.device_slots import SlotLimits
from penstock_enginecore.models.loader import LoadedModel, load_model
from penstock_enginecore.native.weights import round_to_int8
from tests.emulation.build import pretend
from tests.fakes.engines.instruction_sets import runnable
from tests.fakes.models.adapted_steps import (
    BLOCK_SIZE,
    BLOCKS_OF_A_REQUEST,
    Prompt,
    adapted_step,
    random_adapter,
    random_prompts,
    step_logits,
)
from tests.fakes.models.tiny_models import save_narrow_model, save_tiny_model
from tests.integration.test_lora_parity import SHALLOW
from tests.integration.test_native_parity import DECODERS, HELIUM, LATENT_DECODERS

CPU = torch.device("cpu")
RANKS = (1, 5, 16, 64)
LENGTHS = (1, 5, 17, 40, 90, 3, 22, 33, 1, 2)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


def load(path: Path) -> LoadedModel:
    return load_model(ModelConfig(path=str(path)), CPU, lambda line: None, widen=True)


def native(path: Path, isa: Any = "auto", *, threads: int = 3, rounded: bool = False) -> NativeForward:
    lora = SlotLimits(max_loras=8, max_rank=64)
    config = ForwardConfig(CPU, "auto", KernelsConfig(isa=isa), threads, BLOCK_SIZE, rounded=rounded, lora=lora)
    forward = build_forward(load(path), config).forward
    assert isinstance(forward, NativeForward)
    return forward


def adapters_for(module: torch.nn.Module) -> list[LoraAdapter]:
    """Return adapters with several ranks: in all layers, in some, with a rank for each, in float32 and in bfloat16."""

    def ranks(name: str) -> int:
        return 1 + sum(name.encode()) % 23

    whole = [random_adapter(module, rank, seed) for seed, rank in enumerate(RANKS)]
    some = [name for name, layer in module.named_modules() if name.endswith(("v_proj", "up_proj", "lm_head"))]
    of_attention = ("qkv_proj", "q_proj", "o_proj", "query_key_value")
    attention = [name for name, layer in module.named_modules() if name.endswith(of_attention)]
    return [
        *whole,
        random_adapter(module, ranks, 10, layers=some or attention),
        random_adapter(module, 8, 11, layers=attention, dtype=torch.bfloat16),
        random_adapter(module, ranks, 12, dtype=torch.bfloat16),
    ]


def reference_logits(path: Path, prompts: list[Prompt], adapters: list[LoraAdapter]) -> list[torch.Tensor]:
    forward = ModulesForward(probe_model(load(path), CPU, BLOCK_SIZE), create_backend("reference", CPU))
    for adapter in adapters:
        forward.add_adapter(adapter)
    return step_logits(forward, prompts)


def mixed(path: Path) -> tuple[list[LoraAdapter], list[Prompt], int]:
    model = load(path)
    adapters = adapters_for(model.module)
    digests = [None, *(adapter.digest for adapter in adapters)]
    return adapters, random_prompts(model.vocab_size, digests, LENGTHS), model.vocab_size


@pytest.mark.parametrize("architecture", [name for name in DECODERS if name not in LATENT_DECODERS])
def test_logits_of_every_family_are_those_of_the_modules(architecture: str, tmp_path: Path) -> None:
    changes = HELIUM.get(architecture, {}) | SHALLOW.get(architecture, {})
    save_tiny_model(architecture, tmp_path, hidden_size=64, initializer_range=0.2, **changes)
    adapters, prompts, _ = mixed(tmp_path)
    forward = native(tmp_path)
    assert isinstance(forward, AdaptedForward)
    for adapter in adapters:
        forward.add_adapter(adapter)
    expected = reference_logits(tmp_path, prompts, adapters)
    for wanted, got in zip(expected, step_logits(forward, prompts), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def save_int8_model(architecture: str, path: Path, **changes: Any) -> None:
    model = save_tiny_model(architecture, path, **changes)
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, torch.nn.Linear):
                layer.weight.copy_(round_to_int8(layer.weight))
    model.save_pretrained(path)


SAVE: dict[str, Callable[..., Any]] = {
    "float32": save_tiny_model,
    "bfloat16": save_narrow_model,
    "int8": save_int8_model,
}


@pytest.fixture(
    scope="module", params=[("llama", "float32"), ("gemma2", "bfloat16"), ("qwen3", "int8"), ("phi3", "float32")]
)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    architecture, kind = request.param
    directory = tmp_path_factory.mktemp(f"{architecture}-{kind}")
    SAVE[kind](architecture, directory, hidden_size=80 if architecture == "gemma2" else 64, vocab_size=333)
    return directory


def check_bits(path: Path, isa: str, *, rounded: bool = False) -> list[torch.Tensor]:
    adapters, prompts, _ = mixed(path)
    forward = native(path, isa, rounded=rounded)
    plain = step_logits(forward, [prompt.plain for prompt in prompts])
    for adapter in adapters:
        forward.add_adapter(adapter)
    whole = step_logits(forward, prompts)
    for prompt, without, got in zip(prompts, plain, whole, strict=True):
        assert torch.equal(got, without) == (prompt.digest is None)
    assert all(map(torch.equal, step_logits(forward, [prompt.plain for prompt in prompts]), plain))
    for cuts in ((1, 2, 3, 20, 21, 64), (16, 48)):
        assert all(map(torch.equal, step_logits(forward, prompts, cuts), whole))
    assert all(map(torch.equal, step_logits(forward, prompts, (33,), together=False), whole))
    assert all(map(torch.equal, step_logits(forward, prompts[::-1], (5,)), whole[::-1]))
    alone = native(path, isa, threads=1, rounded=rounded)
    for adapter in adapters[::-1]:
        alone.add_adapter(adapter)
    assert all(map(torch.equal, step_logits(alone, prompts, (7,)), whole))
    return whole


@pytest.mark.each_value
@pytest.mark.parametrize("isa", runnable())
def test_rows_are_the_same_bits_alone_in_a_crowd_and_however_steps_are_cut(path: Path, isa: str) -> None:
    whole = check_bits(path, isa)
    adapters, prompts, _ = mixed(path)
    for wanted, got in zip(reference_logits(path, prompts, adapters), whole, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.each_value
@pytest.mark.parametrize("isa", ["amx", "avx512_bf16"])
@pytest.mark.parametrize("rounded", [False, True])
def test_rows_are_the_same_bits_on_matrix_units(
    path: Path, isa: str, rounded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, isa)
    whole = check_bits(path, isa, rounded=rounded)
    adapters, prompts, _ = mixed(path)
    expected = reference_logits(path, prompts, adapters)
    assert float((torch.cat(whole) - torch.cat(expected)).norm() / torch.cat(expected).norm()) < 0.1


def test_rows_whose_logits_are_wanted_are_the_same_bits_as_with_all_states_kept(path: Path) -> None:
    adapters, prompts, _ = mixed(path)
    forward = native(path)
    for adapter in adapters:
        forward.add_adapter(adapter)
    lengths = [len(prompt.ids) for prompt in prompts]
    batch = adapted_step(prompts, [0] * len(prompts), lengths)
    forward.bind(forward.memory.throwaway(BLOCK_SIZE, 1 + len(prompts) * BLOCKS_OF_A_REQUEST))
    with torch.inference_mode():
        all_rows = forward.run(batch, np.arange(len(batch.token_ids))).logits
        for rows in (np.cumsum(lengths) - 1, np.array([150, 3, 3, 90, 41, 40, 0]), np.array([], dtype=np.int64)):
            kept = forward.run(batch, rows, keep_states=True)
            assert torch.equal(kept.logits, all_rows[rows])
            assert torch.equal(forward.run(batch, rows).logits, all_rows[rows])
            assert torch.equal(forward.head(kept.states, torch.from_numpy(rows)), all_rows[rows])


def test_an_adapter_that_was_removed_is_not_there(path: Path) -> None:
    adapters, prompts, _ = mixed(path)
    forward = native(path)
    plain = step_logits(forward, [prompt.plain for prompt in prompts])
    for adapter in adapters:
        forward.add_adapter(adapter)
    for adapter in adapters:
        forward.remove_adapter(adapter.digest)
    with pytest.raises(LookupError, match="there is no adapter"):
        step_logits(forward, prompts)
    with pytest.raises(KeyError):
        forward.remove_adapter(adapters[0].digest)
    assert all(map(torch.equal, step_logits(forward, [prompt.plain for prompt in prompts]), plain))
