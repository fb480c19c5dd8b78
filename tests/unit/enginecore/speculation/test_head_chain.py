"""Drafts of EAGLE heads as one chained kernel call, compared with one pass for each draft and with the modules."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.attention.base import IntArray
from penstock_enginecore.config import KernelsConfig, ModelConfig
from penstock_enginecore.core.kv_cache.spec import KVCacheConfig, KVCacheGroup
from penstock_enginecore.core.scheduler.output import NewRequestData
from penstock_enginecore.forward import native_inputs
from penstock_enginecore.forward.build import ForwardConfig
from penstock_enginecore.models.loader import LoadedModel, load_model
from penstock_enginecore.models.rope import freeze_rotary
from penstock_enginecore.speculation import eagle
from penstock_enginecore.speculation.eagle import Eagle
from penstock_enginecore.speculation.head import EagleHead, HeadConfig, Kind
from penstock_enginecore.speculation.head_forward import HeadForward, NativeHead, build_head
from tests.emulation.build import pretend
from tests.fakes.models.tiny_models import VOCAB_SIZE, save_tiny_model
from tests.unit.enginecore.speculation.test_draft_chain import BLOCK_SIZE, CPU, KERNELS, LENGTHS, MAX_LEN, WANTED, Step

HIDDEN = 64
HEADS: dict[str, dict[str, Any]] = {
    "eagle": {"kind": "eagle"},
    "eagle, two layers of Qwen3's": {"kind": "eagle", "model_type": "qwen3", "num_layers": 2, "embeds": True},
    "eagle3": {"kind": "eagle3", "states": 3, "reduced": True},
    "eagle3, normed": {"kind": "eagle3", "states": 1, "normed": True, "narrow": True},
    "eagle3, two layers of Qwen3's": {"kind": "eagle3", "states": 2, "model_type": "qwen3", "num_layers": 2},
    "eagle3, narrow": {"kind": "eagle3", "states": 3, "reduced": True, "embeds": True, "narrow": True},
}


def random_head(
    kind: Kind,
    states: int = 1,
    model_type: str = "llama",
    num_layers: int = 1,
    *,
    reduced: bool = False,
    normed: bool = False,
    embeds: bool = False,
    narrow: bool = False,
    **changes: Any,
) -> tuple[EagleHead, torch.Tensor | None]:
    """A head, and the tokens that it guesses. ``states``: layers of the target. ``reduced``: it guesses some of the
    tokens.
    ``narrow``: bfloat16 holds its weights.
    """
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"head_dim": 16, "num_hidden_layers": num_layers, "vocab_size": VOCAB_SIZE, **changes}
    config = HeadConfig(
        kind,
        AutoConfig.for_model(model_type, **sizes, max_position_embeddings=16),  # less than the target model's length
        VOCAB_SIZE // 2 if reduced else VOCAB_SIZE,
        tuple(range(states)),
        normed,
    )
    generator = torch.Generator().manual_seed(3)
    head = EagleHead(config, states * HIDDEN, has_bias=kind == "eagle", embeds=embeds, has_head=True)
    for name, parameter in head.named_parameters():
        with torch.no_grad():
            spread = 0.1 if parameter.dim() == 1 else parameter.shape[1] ** -0.5
            parameter.normal_(1.0 if name.endswith("norm.weight") else 0.0, spread, generator=generator)
            if narrow:
                parameter.copy_(parameter.bfloat16())
    freeze_rotary(head, MAX_LEN)
    return head.eval(), torch.arange(1, VOCAB_SIZE, 2)[: VOCAB_SIZE // 2] if reduced else None


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    torch.set_num_threads(1)
    path: Path = tmp_path_factory.mktemp("model")
    save_tiny_model("llama", path, hidden_size=HIDDEN, max_position_embeddings=MAX_LEN)
    return load_model(ModelConfig(path=str(path)), CPU, lambda line: None, widen=True)


class Counted:
    """A head's ``chain`` that counts its calls."""

    def __init__(self, of: Eagle) -> None:
        self.calls = 0
        self._chain = cast("NativeHead", of._chained).chain
        cast("Any", of._chained).chain = self

    def __call__(self, *arguments: Any) -> IntArray:
        self.calls += 1
        return self._chain(*arguments)


def drafter(
    model: LoadedModel, head: dict[str, Any], sampling: str = "coupled", *, rounded: bool = False, **kernels: Any
) -> Eagle:
    made, tokens = random_head(**head)
    target: Any = SimpleNamespace(embed=lambda ids: model.module.get_input_embeddings()(torch.from_numpy(ids)))
    config = ForwardConfig(CPU, "auto", KernelsConfig(**kernels), 2, BLOCK_SIZE, rounded=rounded)
    built, sampler = build_head(made, model, target, config)
    return Eagle(made.kind, built, sampler, tokens, VOCAB_SIZE, range(made.states_width // HIDDEN), sampling)


def states_of(request: int, first: int, end: int, width: int) -> torch.Tensor:
    """Return possible hidden states of a target for these positions."""
    seeds = [torch.Generator().manual_seed(1000 * request + position) for position in range(first, end)]
    return torch.cat([torch.zeros(0, width), *(torch.randn(1, width, generator=seed) for seed in seeds)])


@torch.inference_mode()
def drafts(of: Eagle, **settings: float) -> list[list[list[int]]]:
    """Return the drafts of each step, for requests that accept some of their drafts."""
    groups = (KVCacheGroup(layer_names=tuple(of.specs)),)
    num_blocks = 1 + len(LENGTHS) * -(-MAX_LEN // BLOCK_SIZE)
    of.allocate(KVCacheConfig(num_blocks=num_blocks, block_size=BLOCK_SIZE, groups=groups, max_model_len=MAX_LEN))
    generator = np.random.default_rng(0)
    tokens = [generator.integers(1, 80, length) for length in LENGTHS]
    for i in range(len(tokens)):
        of.begin(
            NewRequestData(
                request_id=str(i),
                token_ids=tokens[i].tolist(),
                num_prompt_tokens=1,
                num_computed_tokens=0,
                block_ids=([],),
                sampling_params=SamplingParams(),
            )
        )
    found, known, width = list[list[list[int]]](), [0] * len(tokens), len(of.state_layers) * HIDDEN
    for number in range(8):
        wanted = [min(count, MAX_LEN - len(each)) for count, each in zip(np.roll(WANTED, number), tokens, strict=True)]
        step = Step(tokens, wanted, 1, settings)
        # After the states of accepted tokens, there are states of rejected tokens.
        ends = [len(each) - 1 + number % 2 for each in tokens]
        states = [states_of(i, known[i], ends[i], width) for i in range(len(tokens))]
        of.observe(step, np.array(known), states)
        known = [len(each) - 1 for each in tokens]
        found.append(of.propose(step))
        for i, proposed in enumerate(found[-1]):
            held = proposed[: generator.integers(0, 4)]
            if len(tokens[i]) + len(held) < MAX_LEN:
                tokens[i] = np.concatenate([tokens[i], held, generator.integers(1, 80, 1)])
    of.release()
    return found


def by_the_loop(of: Eagle, **settings: float) -> list[list[list[int]]]:
    chained, of._chained = of._chained, None
    try:
        return drafts(of, **settings)
    finally:
        of._chained = chained


@pytest.fixture(autouse=True)
def few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit the tokens in a pass, so that pending tokens take several passes."""
    monkeypatch.setattr(eagle, "_MOST_TOKENS", 60)


def check(of: Eagle, temperature: float) -> list[list[list[int]]]:
    """Check that chained drafts equal the loop's, and return them."""
    counted = Counted(of)
    expected = by_the_loop(of, temperature=temperature)
    assert counted.calls == 0
    assert drafts(of, temperature=temperature) == expected
    assert counted.calls == len(expected)
    assert {0, 1, 2, 4, 5, 7} <= {len(each) for proposed in expected for each in proposed}
    return expected


@pytest.mark.each_value
@pytest.mark.parametrize(("isa", "rounded"), KERNELS)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("head", HEADS)
def test_drafts_are_those_of_the_loop(
    model: LoadedModel, head: str, temperature: float, isa: str, rounded: bool
) -> None:
    check(drafter(model, HEADS[head], isa=isa, rounded=rounded), temperature)


@pytest.mark.each_value
@pytest.mark.parametrize(("isa", "rounded"), [("amx", False), ("amx", True), ("avx512_bf16", True)])
@pytest.mark.parametrize("head", HEADS)
def test_and_on_matrix_units(
    model: LoadedModel, head: str, isa: str, rounded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, isa)
    found = check(drafter(model, HEADS[head], isa=isa, rounded=rounded), 0.9)
    if not rounded:
        assert found == drafts(drafter(model, HEADS[head], decoder=False), temperature=0.9)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("head", HEADS)
def test_drafts_are_those_of_the_modules(model: LoadedModel, head: str, temperature: float) -> None:
    of, modules = drafter(model, HEADS[head]), drafter(model, HEADS[head], decoder=False)
    assert isinstance(modules._forward, HeadForward)
    assert drafts(of, temperature=temperature) == drafts(modules, temperature=temperature)


def test_a_reduced_vocabulary_and_rotaries_of_a_step(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_inputs, "_MAX_TABLE_BYTES", 0)
    found = check(drafter(model, HEADS["eagle3"]), 1.5)
    chosen = {token for proposed in found for each in proposed for token in each}
    assert len(chosen) > 50
    assert all(token % 2 for token in chosen)


def test_requests_with_filters_are_drafted_for_by_the_loop(model: LoadedModel) -> None:
    of = drafter(model, HEADS["eagle3"])
    counted = Counted(of)
    drafts(of, temperature=0.9, top_p=0.8)
    assert counted.calls == 0
    drafts(of, temperature=0.0, top_p=0.8)
    assert counted.calls > 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"hidden_act": "relu"},
            "decoder not used: model.layers.0.mlp uses the activation function relu, which this decoder",
        ),
        ({"head_dim": 12}, "decoder not used: a head size of 12 is not a multiple of"),
    ],
)
def test_heads_that_the_kernels_do_not_know_run_by_their_modules(
    model: LoadedModel, changes: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        of = drafter(model, HEADS["eagle3"] | changes)
    assert isinstance(of._forward, HeadForward)
    assert f"the draft head computes with linear; {reason}" in caplog.text
    assert any(len(each) == 7 for proposed in drafts(of) for each in proposed)


def test_target_tokens_beyond_the_embeddings_are_refused(model: LoadedModel) -> None:
    of = drafter(model, HEADS["eagle3"])
    of._target_tokens = np.append(cast("IntArray", of._target_tokens)[:-1], VOCAB_SIZE)
    with pytest.raises(IndexError, match=f"cannot look up embeddings of {VOCAB_SIZE + 1} tokens"):
        drafts(of)


def test_states_of_another_width_are_refused(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    of = drafter(model, HEADS["eagle3"])
    monkeypatch.setattr(of, "state_layers", range(2))
    with pytest.raises(IndexError, match=r"states have shape \[\d+, 128\]; expected \[\d+, 192\]"):
        drafts(of)
