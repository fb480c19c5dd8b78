"""Adapters on a model's modules: PEFT's results, in a batch with several adapters."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock_enginecore.attention.factory import create_backend
from penstock_enginecore.config import ModelConfig
from penstock_enginecore.forward.base import ForwardPass
from penstock_enginecore.forward.modules import ModulesForward, probe_model
from penstock_enginecore.lora.adapter import AdaptedForward, LoraAdapter, LoraSegment, LowRankUpdate, segments_of_rows
from penstock_enginecore.models.loader import load_model
from tests.fakes.models.adapted_steps import (
    BLOCK_SIZE,
    BLOCKS_OF_A_REQUEST,
    Prompt,
    adapted_step,
    random_adapter,
    random_prompts,
    step_logits,
    with_peft,
)
from tests.fakes.models.tiny_models import VOCAB_SIZE, save_tiny_model

CPU = torch.device("cpu")
FAMILIES = (
    "cohere",
    "gemma2",
    "gpt_neox",
    "llama",
    "mistral",
    "olmo2",
    "opt",
    "phi",
    "phi3",
    "qwen2",
    "qwen3",
    "starcoder2",
)
RANKS = (1, 5, 16, 64)
LENGTHS = (1, 5, 17, 40, 3, 22)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def modules_forward(path: Path) -> ModulesForward:
    model = load_model(ModelConfig(path=str(path)), CPU, lambda line: None)
    return ModulesForward(probe_model(model, CPU, BLOCK_SIZE), create_backend("reference", CPU))


def peft_logits(model: Any, prompts: list[Prompt], adapters: list[LoraAdapter]) -> list[torch.Tensor]:
    """Return PEFT's logits of each prompt, computed alone."""
    models = {None: model} | {adapter.digest: with_peft(model, adapter) for adapter in adapters}
    with torch.no_grad():
        return [models[prompt.digest](torch.from_numpy(prompt.ids)[None]).logits[0] for prompt in prompts]


@pytest.mark.parametrize("architecture", FAMILIES)
def test_logits_of_a_mixed_batch_are_those_of_peft(architecture: str, tmp_path: Path) -> None:
    save_tiny_model(architecture, tmp_path, initializer_range=0.2)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    model.eval()
    adapters = [random_adapter(model, rank, seed) for seed, rank in enumerate(RANKS)]
    prompts = random_prompts(VOCAB_SIZE, [None, *(adapter.digest for adapter in adapters)], LENGTHS)
    forward = modules_forward(tmp_path)
    assert isinstance(forward, AdaptedForward)
    base = step_logits(forward, [prompt.plain for prompt in prompts])
    for adapter in adapters:
        forward.add_adapter(adapter)
    expected = peft_logits(model, prompts, adapters)
    whole, chunked = step_logits(forward, prompts), step_logits(forward, prompts, (1, 2, 9, 20))
    for prompt, plain, wanted, got, cut in zip(prompts, base, expected, whole, chunked, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(cut, wanted, rtol=1e-4, atol=1e-4)
        if prompt.digest is not None:
            assert float((got - plain).norm() / plain.norm()) > 0.1


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_tiny_model("llama", tmp_path)
    return tmp_path


def bound(forward: ForwardPass, requests: int) -> None:
    forward.bind(forward.memory.throwaway(BLOCK_SIZE, 1 + requests * BLOCKS_OF_A_REQUEST))


@torch.inference_mode()
def test_rows_without_an_adapter_are_the_same_bits_as_without_any(path: Path) -> None:
    forward = modules_forward(path)
    prompts = random_prompts(VOCAB_SIZE, [None, bytes(15) + b"\1"], (7, 12))
    plain = step_logits(forward, [prompt.plain for prompt in prompts])
    forward.add_adapter(random_adapter(forward._module, 4, 1))
    adapted = step_logits(forward, prompts)
    assert prompts[0].digest is None
    assert torch.equal(adapted[0], plain[0])
    assert not torch.allclose(adapted[1], plain[1], atol=0.1)
    forward.remove_adapter(prompts[1].digest or b"")
    assert not any(module._forward_hooks for module in forward._module.modules())


@torch.inference_mode()
def test_the_head_alone_gives_the_logits_of_the_run_with_adapters(path: Path) -> None:
    forward = modules_forward(path)
    adapters = [random_adapter(forward._module, 3, seed, layers=["lm_head"]) for seed in (1, 2)]
    for adapter in adapters:
        forward.add_adapter(adapter)
    prompts = random_prompts(VOCAB_SIZE, [adapters[0].digest, None, adapters[1].digest], (4, 5, 6))
    batch = adapted_step(prompts, [0, 0, 0], [4, 5, 6])
    bound(forward, 3)
    rows = np.arange(15)
    run = forward.run(batch, rows, keep_states=True)
    for some in (rows, rows[[3, 4, 14]], rows[[14, 0, 6]]):
        torch.testing.assert_close(forward.head(run.states, torch.from_numpy(some)), run.logits[some])
        torch.testing.assert_close(forward.run(batch, some).logits, run.logits[some])
    assert not torch.allclose(run.logits[:4], forward.run(batch_without(batch), rows).logits[:4], atol=0.1)


@torch.inference_mode()
def test_an_adapter_is_prepared_while_the_head_alone_is_computed(path: Path) -> None:
    """A server prepares the adapter on another thread, while the layers are not in the model."""
    forward = modules_forward(path)
    bound(forward, 1)
    adapter = random_adapter(forward._module, 4, 1)
    prompts = random_prompts(VOCAB_SIZE, [None], [6])
    batch, rows = adapted_step(prompts, [0], [6]), np.arange(6)
    kept = forward.run(batch, rows, keep_states=True)
    takes: list[Any] = []
    head = forward._module.lm_head
    head.register_forward_hook(lambda *_: takes.append(forward.prepare_adapter(adapter)))
    forward.head(kept.states, torch.from_numpy(rows))
    takes[-1]()
    forward.remove_adapter(adapter.digest)


def batch_without(batch: Any) -> Any:
    return type(batch)(batch.token_ids, batch.positions, batch.attention)


def test_rows_have_the_segments_of_their_tokens() -> None:
    one, two = b"1" * 16, b"2" * 16
    segments = [LoraSegment(one, 2, 5), LoraSegment(two, 5, 6), LoraSegment(one, 8, 10)]

    def of(rows: list[int]) -> list[tuple[bytes, int, int]]:
        found = segments_of_rows(segments, np.array(rows, dtype=np.int64))
        return [(each.digest, each.first, each.end) for each in found]

    assert of([0, 1, 6, 7, 10, 11]) == []
    assert of(list(range(12))) == [(each.digest, each.first, each.end) for each in segments]
    assert of([4, 4, 0, 5, 9, 3]) == [(one, 0, 2), (two, 3, 4), (one, 4, 5), (one, 5, 6)]
    assert of([]) == []
    assert segments_of_rows([], np.arange(3)) == []


@pytest.mark.parametrize(
    ("name", "a", "b", "words"),
    [
        ("model.layers.7.self_attn.q_proj", (2, 48), (48, 2), " is not a module of LlamaForCausalLM"),
        ("model.norm", (2, 48), (48, 2), " is LlamaRMSNorm, not a linear layer"),
        (
            "lm_head",
            (2, 47),
            (320, 2),
            r": expected shapes \[rank, 48\] and \[320, rank\] for A and B, got \[2, 47\] and \[320, 2\]",
        ),
        (
            "lm_head",
            (2, 48),
            (320, 3),
            r": expected shapes \[rank, 48\] and \[320, rank\] for A and B, got \[2, 48\] and \[320, 3\]",
        ),
    ],
)
def test_an_update_of_other_layers_is_refused(
    path: Path, name: str, a: tuple[int, int], b: tuple[int, int], words: str
) -> None:
    forward = modules_forward(path)
    with pytest.raises(ValueError, match=f"{name}{words}"):
        forward.add_adapter(LoraAdapter(b"x" * 16, {name: LowRankUpdate(torch.zeros(a), torch.zeros(b))}))


@torch.inference_mode()
def test_a_segment_of_an_adapter_that_is_not_there_is_refused(path: Path) -> None:
    forward = modules_forward(path)
    bound(forward, 1)
    batch = adapted_step([Prompt(np.array([1, 2]), b"\7" * 16)], [0], [2])
    with pytest.raises(LookupError, match="there is no adapter 0707"):
        forward.run(batch, np.array([1]))
    with pytest.raises(KeyError):
        forward.remove_adapter(b"\7" * 16)
