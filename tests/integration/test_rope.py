"""RoPE scaling depends on the engine's maximum length, and never on other requests in the batch."""

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.core.engine_core import EngineCore
from penstock_enginecore.models.rope import freeze_rotary
from tests.fakes.engines.in_process import build_engine, generate
from tests.fakes.models.tiny_models import VOCAB_SIZE, save_tiny_model
from tests.fakes.models.transformers_greedy import greedy_tokens

NEW_TOKENS = 12
SHORT, LONG = 15, 90
ORIGINAL = 32
"""Original maximum length of the scaled models in tokens. SHORT is below this length, and LONG is above."""
MAX_LEN = 128

_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0, 1.1, 1.3, 1.7, 2.0, 2.5],
    "long_factor": [2.5, 4.0, 6.0, 8.0, 10.0, 12.0],
    "original_max_position_embeddings": ORIGINAL,
}
_PHIMOE = {**_LONGROPE, "short_mscale": 1.2, "long_mscale": 1.5}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 16.0}
_SCALED: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3-longrope": (
        "phi3",
        {
            "rope_parameters": _LONGROPE,
            "max_position_embeddings": MAX_LEN,
            "original_max_position_embeddings": ORIGINAL,  # Phi3's own default would override the rope parameter
        },
    ),
    "phimoe-longrope": ("phimoe", {"rope_parameters": _PHIMOE, "max_position_embeddings": MAX_LEN}),
    "llama-dynamic": ("llama", {"rope_parameters": _DYNAMIC, "max_position_embeddings": ORIGINAL}),
}
_FIXED = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL},
}


def _save(name: str, path: Path) -> torch.nn.Module:
    torch.set_num_threads(1)
    architecture, changes = _SCALED[name]
    return save_tiny_model(architecture, path, **changes)


def _prompts() -> tuple[list[int], list[int]]:
    generator = torch.Generator().manual_seed(5)
    short, long = (torch.randint(1, VOCAB_SIZE, (n,), generator=generator).tolist() for n in (SHORT, LONG))
    return short, long


def _greedy(engine: EngineCore, *prompts: list[int]) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
    run = generate(engine, [(str(i), prompt, params) for i, prompt in enumerate(prompts)])
    return [run.tokens[str(i)] for i in range(len(prompts))]


def _transformers(model: torch.nn.Module, prompt: list[int]) -> list[int]:
    return greedy_tokens(model, prompt, NEW_TOKENS)


def _recomputed(model: torch.nn.Module, prompt: list[int]) -> list[int]:
    """Return greedy tokens without a KV cache, so that every forward pass uses the same frequencies for all keys."""
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(NEW_TOKENS):
            logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits
            tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("name", _SCALED)
def test_a_long_request_does_not_change_its_neighbour(name: str, tmp_path: Path) -> None:
    _save(name, tmp_path)
    short, long = _prompts()
    together = _greedy(build_engine(tmp_path, model={"max_model_len": MAX_LEN}), short, long)
    alone = [_greedy(build_engine(tmp_path, model={"max_model_len": MAX_LEN}), prompt)[0] for prompt in (short, long)]
    assert together == alone


@pytest.mark.parametrize("name", _SCALED)
def test_an_engine_of_the_original_length_equals_transformers(name: str, tmp_path: Path) -> None:
    model = _save(name, tmp_path)
    short, _ = _prompts()
    assert _greedy(build_engine(tmp_path, model={"max_model_len": ORIGINAL}), short) == [_transformers(model, short)]


def test_long_factors_equal_transformers_on_a_long_request(tmp_path: Path) -> None:
    model = _save("phi3-longrope", tmp_path)
    _, long = _prompts()
    assert _greedy(build_engine(tmp_path), long) == [_recomputed(model, long)]


def test_the_served_length_decides_what_a_short_request_gets(tmp_path: Path) -> None:
    _save("phi3-longrope", tmp_path)
    short, _ = _prompts()
    extended, original = (build_engine(tmp_path, model={"max_model_len": n}) for n in (MAX_LEN, ORIGINAL))
    assert _greedy(extended, short) != _greedy(original, short)


def test_dynamic_scaling_has_the_frequencies_of_the_served_length(tmp_path: Path) -> None:
    model: Any = _save("llama-dynamic", tmp_path)
    _, long = _prompts()
    rotary = model.model.rotary_emb
    # transformers recomputes the frequencies in this forward pass of the maximum length, and then keeps them.
    rotary(torch.zeros(1), torch.arange(MAX_LEN)[None])
    rotary.rope_type = "default"
    engine = build_engine(tmp_path, model={"max_model_len": MAX_LEN})
    assert _greedy(engine, long) == [_transformers(model, long)]


def test_frequencies_of_one_kind_of_layer_are_fixed_too(tmp_path: Path) -> None:
    kinds = {"full_attention": _DYNAMIC, "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0}}
    model: Any = save_tiny_model(
        "gemma3", tmp_path, rope_parameters=kinds, layer_types=list(kinds), max_position_embeddings=ORIGINAL
    )
    freeze_rotary(model, MAX_LEN)
    for kind in kinds:
        positions, x = torch.arange(MAX_LEN)[None], torch.zeros(1)
        long, _ = model.model.rotary_emb(x, positions, kind)
        short, _ = model.model.rotary_emb(x, positions[:, :SHORT], kind)
        assert torch.equal(long[:, :SHORT], short)


def test_dynamic_scaling_keeps_the_original_length_unless_asked(tmp_path: Path) -> None:
    _save("llama-dynamic", tmp_path)
    assert build_engine(tmp_path).max_model_len == ORIGINAL


@pytest.mark.parametrize("kind", _FIXED)
def test_scaling_that_never_looks_at_the_batch_equals_transformers(kind: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    parameters = {"rope_theta": 10_000.0, **_FIXED[kind]}
    model = save_tiny_model("llama", tmp_path, rope_parameters=parameters, max_position_embeddings=MAX_LEN)
    prompts = _prompts()
    assert _greedy(build_engine(tmp_path), *prompts) == [_transformers(model, prompt) for prompt in prompts]
