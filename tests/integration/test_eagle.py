"""EAGLE heads: the same tokens as without a head, the same drafts as plain torch in both layouts, and refused heads."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.attention.base import IntArray
from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.speculation.base import DraftStep
from penstock_enginecore.speculation.eagle import Eagle
from penstock_enginecore.speculation.head_forward import NativeHead
from tests.fakes.engines.in_process import generate
from tests.fakes.models.heads import LAYOUTS, Head, Reference, random_head, save_head
from tests.fakes.models.tiny_models import VOCAB_SIZE, save_tiny_model
from tests.integration.test_drafters import (
    CACHE,
    DEMO,
    SETTINGS,
    SIZES,
    engine_of,
    expect_the_same_behind_sleep,
    requests,
)

HIDDEN = 64
TRAINED = Path("examples/demo_model/penstock-tiny-eagle3")
SIZE: dict[str, Any] = {"hidden": HIDDEN, "vocab": VOCAB_SIZE}
HEADS = {
    "eagle": random_head("eagle", **SIZE),
    "eagle3": random_head("eagle3", layers=(0, 1, 1), **SIZE),
    "eagle3, normed": random_head("eagle3", layers=(1,), normed_residual=True, **SIZE),
}
IN_ORDER: Any = HEADS["eagle3"].tokens
SHUFFLED = IN_ORDER[torch.randperm(len(IN_ORDER), generator=torch.Generator().manual_seed(1))]
HEADS["eagle3, shuffled"] = replace(HEADS["eagle3"], tokens=SHUFFLED)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("model")
    save_tiny_model("llama", path, seed=0, **SIZES)
    return path


def speculative(head: Head, folder: Path, layout: str = "SafeAILab", **more: Any) -> dict[str, Any]:
    save_head(head, folder, layout, **SIZE)
    return {"method": head.kind, "model": str(folder), "adaptive": False, "num_speculative_tokens": 4, **more}


@pytest.mark.each_value
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("head", ["eagle", "eagle3"])
def test_tokens_are_those_without(model: Path, head: str, setting: str, temperature: float, tmp_path: Path) -> None:
    sections = SETTINGS[setting]
    expected = generate(engine_of(model, **sections), requests(temperature)).tokens
    engine = engine_of(model, speculative(HEADS[head], tmp_path, draft_sampling="coupled"), **sections)
    for _ in range(2):  # the second run has cached prefixes
        run = generate(engine, requests(temperature))
        assert run.tokens == expected
    assert not engine.scheduler.drafter_failure
    assert run.stats.spec_decoding_stats.num_draft_tokens > 50
    if setting == "few blocks":
        assert run.stats.num_preemptions > 0


class Seen:
    """Records a drafter's proposals by the tokens before each proposal, and the number of chains that the kernels ran."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.drafts: dict[tuple[int, ...], list[int]] = {}
        self.num_chains = 0
        propose, chain = Eagle.propose, NativeHead.chain

        def count(head: NativeHead, *arguments: Any) -> IntArray:
            self.num_chains += 1
            return chain(head, *arguments)

        def spy(drafter: Eagle, step: DraftStep) -> list[list[int]]:
            made = propose(drafter, step)
            self.drafts |= {
                tuple(request.token_ids.tolist()): drafted
                for request, drafted in zip(step.requests, made, strict=True)
                if drafted
            }
            return made

        monkeypatch.setattr(Eagle, "propose", spy)
        monkeypatch.setattr(NativeHead, "chain", count)


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("layout", "kernels"),
    [*((layout, {}) for layout in LAYOUTS), *((LAYOUTS[0], off) for off in ({"decoder": False}, {"isa": "off"}))],
)
@pytest.mark.parametrize("head", HEADS)
def test_drafts_are_those_of_plain_torch(
    model: Path, head: str, layout: str, kernels: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, reference = Seen(monkeypatch), Reference(model, HEADS[head])
    engine = engine_of(
        model,
        speculative(HEADS[head], tmp_path, layout),
        cache={"enable_prefix_caching": False},
        scheduler={"max_num_batched_tokens": 24},  # prompts are computed in chunks
        kernels=kernels,
    )
    generate(engine, requests(0.0))
    assert len(seen.drafts) > 100
    assert (seen.num_chains > 20) == (not kernels)
    for tokens, drafts in list(seen.drafts.items())[::3]:
        assert drafts == reference.drafts(list(tokens), len(drafts)), len(tokens)


def story(tokenizer: Any, thing: str) -> list[int]:
    """Return the tokens of a chat prompt that requests a story about ``thing``."""
    messages = [{"role": "user", "content": f"Tell me a story about a {thing}."}]
    token_ids: list[int] = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return token_ids


def test_the_demo_models_head_drafts_two_and_a_half_tokens_a_step() -> None:
    torch.set_num_threads(1)
    params, tokenizer = SamplingParams(temperature=0.0, max_tokens=100), AutoTokenizer.from_pretrained(DEMO)
    made = [(thing, story(tokenizer, thing), params) for thing in ("dog", "king", "boat", "river")]
    expected = generate(engine_of(DEMO), made).tokens
    engine = engine_of(
        DEMO, {"method": "eagle3", "model": str(TRAINED), "num_speculative_tokens": 4, "adaptive": False}
    )
    run = generate(engine, made)
    counts = run.stats.spec_decoding_stats
    assert run.tokens == expected
    assert 1 + counts.num_accepted_tokens / counts.num_drafts >= 2.5


def test_requests_that_want_no_drafts_are_not_followed(model: Path, tmp_path: Path) -> None:
    engine = engine_of(model, speculative(HEADS["eagle3"], tmp_path))
    params = SamplingParams(temperature=0.0, max_tokens=40, num_speculative_tokens=0)
    assert generate(engine, [("r", list(range(1, 30)), params)]).stats.spec_decoding_stats.num_draft_tokens == 0


def test_a_head_is_slept_on_and_woken(model: Path, tmp_path: Path) -> None:
    engine = engine_of(model, speculative(HEADS["eagle"], tmp_path))
    expect_the_same_behind_sleep(engine)
    assert not engine.scheduler.drafter_failure


@pytest.mark.slow
def test_workers_in_processes_draft_as_one_does(model: Path, tmp_path: Path) -> None:
    expected = generate(engine_of(model), requests(0.8)).tokens
    engine = engine_of(
        model,
        speculative(HEADS["eagle3"], tmp_path),
        executor={"kind": "multiproc", "tensor_parallel_size": 2},
    )
    try:
        run = generate(engine, requests(0.8))
        assert run.tokens == expected
        assert run.stats.spec_decoding_stats.num_draft_tokens > 50
        assert not engine.scheduler.drafter_failure
    finally:
        engine.shutdown()


def changed(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Change tensors in a head's file. None deletes a tensor."""
    found = load_file(folder / "model.safetensors")
    found.update({name: tensor for name, tensor in tensors.items() if tensor is not None})
    save_file(
        {name: each for name, each in found.items() if tensors.get(name, each) is not None},
        folder / "model.safetensors",
    )


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            {"fc.weight": torch.zeros(HIDDEN, 3 * 48)},
            r"the head's fc expects 144 inputs, but .* have 3 of 64 numbers; .* another hidden size",
        ),
        ({"norm.weight": None}, "the head has no tensor norm.weight, which speculative.method 'eagle3' needs"),
        (
            {"midlayer.self_attn.q_norm.weight": torch.ones(16)},
            r"the head has a tensor layers\.0\.self_attn\.q_norm\.weight",
        ),
        ({"norm.weight": torch.ones(65)}, r"the head's norm.weight has shape \[65\], but .* requires shape \[64\]"),
        (
            {"d2t": torch.arange(VOCAB_SIZE // 2) + 2},
            rf"the head's d2t maps token \d+ to token {VOCAB_SIZE}, but the model has only",
        ),
        ({"d2t": None}, "but the head has no tensor d2t that maps the tokens"),
        (
            {"embed_tokens.weight": torch.zeros(99, HIDDEN)},
            f"the head's embed_tokens has 99 tokens, but the model has {VOCAB_SIZE}",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    model: Path, tensors: dict[str, Any], message: str, tmp_path: Path
) -> None:
    asked = speculative(HEADS["eagle3"], tmp_path)
    changed(tmp_path, **tensors)
    with pytest.raises(ModelLoadError, match=rf"speculative.model .* cannot draft for this model: .*{message}"):
        engine_of(model, asked)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}},
            "has 2, but the model has only layers 0 to 1",
        ),
        ({"eagle_config": None}, "the default has layer 2, but the model has only layers 0 to 1"),
        ({"model_type": "mamba"}, "model_type of the head's layers is 'mamba'; supported: llama, qwen3"),
        ({"norm_before_fc": True}, "the head's norm_before_fc is True; heads with this setting are not supported"),
        ({"architectures": ["EagleLlamaForCausalLM"]}, "describes an 'eagle' head, but speculative.method is 'eagle3'"),
        ({"hidden_size": 48}, "the head's hidden_size is 48 and the model's hidden_size is 64"),
    ],
)
def test_configurations_that_do_not_fit_are_refused_by_name(
    model: Path, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    asked = speculative(HEADS["eagle3"], tmp_path)
    save_head(HEADS["eagle3"], tmp_path, "SafeAILab", **SIZE, **changes)
    with pytest.raises(ModelLoadError, match=f"speculative.model .* cannot draft for this model: .*{message}"):
        engine_of(model, asked)


def test_an_eagle_head_whose_states_are_of_another_width_is_refused(model: Path, tmp_path: Path) -> None:
    asked = speculative(HEADS["eagle"], tmp_path)
    save_head(HEADS["eagle"], tmp_path, "SafeAILab", **SIZE, hidden_size=48)
    changed(tmp_path, **{"fc.weight": torch.zeros(48, HIDDEN + 48), "embed_tokens.weight": torch.zeros(VOCAB_SIZE, 48)})
    with pytest.raises(
        ModelLoadError, match="the head's hidden_size is 48, but the model's hidden_size is 64; an EAGLE head needs"
    ):
        engine_of(model, asked)


def test_pickled_weights_are_refused(model: Path, tmp_path: Path) -> None:
    asked = speculative(HEADS["eagle3"], tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match=r"speculative.model .* has no \*\.safetensors"):
        engine_of(model, asked)


def test_the_cache_has_room_for_its_layers(model: Path, tmp_path: Path) -> None:
    plain, drafting = engine_of(model), engine_of(model, speculative(HEADS["eagle3"], tmp_path))
    assert CACHE["num_blocks"] == 256
    stats = [engine.executor.worker_stats()[0] for engine in (plain, drafting)]
    assert stats[1].kv_cache_bytes > stats[0].kv_cache_bytes
    assert stats[1].weight_bytes > stats[0].weight_bytes
