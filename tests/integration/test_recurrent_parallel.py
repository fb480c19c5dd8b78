"""Models with recurrent layers on several workers: greedy tokens equal transformers' own, for any batch, chunks, cache
hits, preemption and drafts.
"""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from penstock_common.errors import ConfigError
from penstock_common.lora_registry import LoraAdapter
from penstock_common.types.request import EngineCoreRequest
from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.core.engine_core import EngineCore
from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.native.states import NativeStates
from tests.fakes.engines.in_process import answer, generate
from tests.fakes.engines.worker_threads import use_threads
from tests.fakes.models.adapters import save_adapter
from tests.fakes.models.quick_architectures import RECURRENT_CASES, RECURRENT_KINDS
from tests.fakes.models.tiny_models import save_narrow_model, save_tiny_model
from tests.fakes.models.transformers_greedy import greedy_tokens
from tests.integration.test_recurrent_parity import (
    NEW_TOKENS,
    PROMPT_LENGTHS,
    Case,
    answers,
    engine_of,
    greedy,
    small_memory,
    speculative,
)

pytestmark = pytest.mark.usefixtures("warm_processes")


@pytest.fixture(scope="module", params=RECURRENT_CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp(request.param)
    prompts, expected = answers(save_tiny_model(request.param, path))
    return Case(path, prompts, expected, request.param)


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    use_threads(monkeypatch)
    yield
    torch.set_num_threads(before)


def tensor(size: int = 2, **more: Any) -> dict[str, Any]:
    return {"kind": "multiproc", "tensor_parallel_size": size, **more}


def check_turns(engine: EngineCore, case: Case, turns: int = 2) -> Any:
    """Check the tokens of all prompts several times. Later turns start after cached prefixes. Returns the statistics."""
    stats: Any = None
    for turn in range(turns):
        order = slice(None, None, -1 if turn % 2 else 1)
        tokens, run = greedy(engine, case.prompts[order], prefix=f"{turn} ")
        assert tokens[order] == case.expected, f"turn {turn}"
        stats = run.stats
    assert stats.prefix_cache_hits > 0
    engine.shutdown()
    return stats


# Tensor parallelism.


def test_ranks_with_a_part_of_the_heads_give_the_same_tokens(case: Case) -> None:
    engine = engine_of(case.path, executor=tensor())
    infos = engine.executor.collective_rpc("worker_info")
    assert infos[0]["kv_cache_bytes"] == infos[1]["kv_cache_bytes"]
    check_turns(engine, case)


@pytest.mark.quick("qwen3_5", "granitemoehybrid")
def test_more_ranks_than_key_heads_give_the_same_tokens(case: Case) -> None:
    engine = engine_of(case.path, executor=tensor(4), scheduler={"max_num_batched_tokens": 33})
    check_turns(engine, case)


@pytest.mark.quick("qwen3_5-17")
@pytest.mark.parametrize("tokens", [1, 17])
def test_chunks_on_several_ranks_give_the_same_tokens(case: Case, tokens: int) -> None:
    check_turns(engine_of(case.path, executor=tensor(), scheduler={"max_num_batched_tokens": tokens}), case)


@pytest.mark.quick("mamba2", "qwen3_5")
def test_drafts_on_several_ranks_give_the_same_tokens(case: Case) -> None:
    scheduler = {"max_num_batched_tokens": 24, "async_scheduling": True}
    engine = engine_of(
        case.path, executor=tensor(), scheduler=scheduler, speculative=speculative(15, prompt_lookup_min=1)
    )
    counts: Any = check_turns(engine, case).spec_decoding_stats
    assert counts.num_draft_tokens > counts.num_accepted_tokens


def preempting(case: Case, executor: dict[str, Any]) -> EngineCore:
    """Return an engine with few blocks, and slots for four running requests and three kept states."""
    longest = max(PROMPT_LENGTHS) + NEW_TOKENS
    return engine_of(
        case.path,
        model={"max_model_len": longest},
        cache={**small_memory(case.path, 4, 3, executor=executor), "num_blocks": -(-longest // 16) + 3},
        scheduler={"max_num_batched_tokens": 24},
        executor=executor,
    )


@pytest.mark.quick("granitemoehybrid")
def test_preempted_requests_on_several_ranks_give_the_same_tokens(case: Case) -> None:
    engine = preempting(case, tensor())
    states = engine.scheduler.kv_cache.states
    assert states is not None
    assert states.config.num_requests == 4
    assert check_turns(engine, case, turns=3).num_preemptions > 0
    assert states.stats().num_used_slots == 0


@pytest.mark.quick("lfm2")
def test_a_bfloat16_checkpoint_on_several_ranks_gives_the_tokens_of_float32(case: Case, tmp_path: Path) -> None:
    prompts, expected = answers(save_narrow_model(case.architecture, tmp_path))
    narrow = Case(tmp_path, prompts, expected, case.architecture)
    check_turns(engine_of(tmp_path, executor=tensor(), scheduler={"max_num_batched_tokens": 40}), narrow)


TARGETS = {
    "jamba": ["in_proj", "x_proj", "out_proj", "q_proj", "o_proj", "lm_head"],
    "kimi_linear": [f"{name}_proj" for name in ("q", "k", "v", "b", "f_a", "f_b", "g_a", "g_b", "kv_b", "o")],
    "mamba2": ["in_proj", "lm_head"],  # PEFT refuses Mamba-2's out_proj
}
"""Layers with updates, for model types of which adapters cannot update all linear layers."""


@pytest.mark.quick("granitemoehybrid-ranks", "qwen3_5-stages")
@pytest.mark.parametrize("ways", ["ranks", "stages"])
@pytest.mark.parametrize("architecture", RECURRENT_KINDS)
def test_adapters_of_all_linear_layers_on_several_workers_give_peft_s_tokens(
    architecture: str, ways: str, tmp_path: Path
) -> None:
    model = save_tiny_model(architecture, tmp_path / "model")
    targets = TARGETS.get(architecture, "all-linear")
    adapted = save_adapter(model, tmp_path / "adapter", r=3, lora_alpha=6, target_modules=targets)
    assert any(name.endswith(".lora_A.default") and ".layers.0." in name for name, _ in adapted.named_modules())
    prompts, expected = answers(adapted)
    assert expected != [greedy_tokens(model, prompt, NEW_TOKENS) for prompt in prompts]
    executor = tensor(2) if ways == "ranks" else {"kind": "multiproc", "pipeline_parallel_size": 2}
    engine = engine_of(tmp_path / "model", executor=executor, lora={"max_loras": 1})
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
    adapter = LoraAdapter("adapter", str(tmp_path / "adapter"), b"")
    requests = [
        EngineCoreRequest(request_id=f"r{i}", prompt_token_ids=prompt, sampling_params=params, lora=adapter)
        for i, prompt in enumerate(prompts)
    ]
    assert list(answer(engine, requests).tokens.values()) == expected
    engine.shutdown()


ONE_GROUP: dict[str, tuple[str, dict[str, Any]]] = {
    "granite": ("granitemoehybrid", {"mamba_n_groups": 1}),
    "mamba2 with biases": ("mamba2", {"n_groups": 1, "use_bias": True}),
    "falcon_h1, norm first": ("falcon_h1", {"mamba_n_groups": 1, "mamba_rms_norm": True}),
    "falcon_h1, gate first": (
        "falcon_h1",
        {"mamba_n_groups": 1, "mamba_rms_norm": True, "mamba_norm_before_gate": False},
    ),
    "two groups on four ranks": ("nemotron_h", {}),
}
"""Models whose groups of B and C, and of the gated norm, lie on several ranks."""


@pytest.mark.quick("granite")
@pytest.mark.parametrize("model", ONE_GROUP)
def test_a_group_of_the_norm_on_several_ranks_gives_the_same_tokens(model: str, tmp_path: Path) -> None:
    architecture, changes = ONE_GROUP[model]
    prompts, expected = answers(save_tiny_model(architecture, tmp_path, **changes))
    engine = engine_of(tmp_path, executor=tensor(2 if changes else 4), scheduler={"max_num_batched_tokens": 33})
    check_turns(engine, Case(tmp_path, prompts, expected, architecture))


# Pipeline stages.


def stages(num_stages: int = 2, **more: Any) -> dict[str, Any]:
    return {"kind": "multiproc", "pipeline_parallel_size": num_stages, **more}


def test_stages_give_the_same_tokens(case: Case) -> None:
    check_turns(engine_of(case.path, executor=stages()), case)


@pytest.mark.quick("qwen3_5-17")
@pytest.mark.parametrize("tokens", [1, 17])
def test_chunks_in_stages_give_the_same_tokens(case: Case, tokens: int) -> None:
    scheduler = {"max_num_batched_tokens": tokens, "async_scheduling": True}
    check_turns(engine_of(case.path, executor=stages(), scheduler=scheduler), case)


@pytest.mark.quick("granitemoehybrid", "lfm2")
def test_stages_without_attention_or_without_recurrence_give_the_same_tokens(case: Case) -> None:
    num_layers = AutoConfig.from_pretrained(case.path).num_hidden_layers
    engine = engine_of(case.path, executor=stages(num_layers, stage_layers=[1] * num_layers))
    check_turns(engine, case)


@pytest.mark.quick("qwen3_5")
def test_preempted_requests_in_stages_give_the_same_tokens(case: Case) -> None:
    engine = preempting(case, stages())
    states = engine.scheduler.kv_cache.states
    assert states is not None
    assert check_turns(engine, case, turns=3).num_preemptions > 0
    assert states.stats().num_used_slots == 0


@pytest.mark.quick("granitemoehybrid")
def test_ranks_in_stages_give_the_same_tokens(case: Case) -> None:
    engine = engine_of(case.path, executor=tensor(2, pipeline_parallel_size=2))
    check_turns(engine, case)


@pytest.mark.parametrize("executor", [tensor(), stages()], ids=["ranks", "stages"])
@pytest.mark.parametrize("worker", [0, 1])
def test_a_state_that_is_not_finite_on_one_worker_ends_its_request(
    executor: dict[str, Any], worker: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny_model("qwen3_5", tmp_path)
    engine = engine_of(tmp_path, executor=executor)
    scan = NativeStates.scan

    def broken(states: NativeStates, call: Any) -> torch.Tensor:
        if threading.current_thread().name == f"worker-{worker}":
            states.step.broken.update(i for i, each in enumerate(states.step.sequences) if each.count == 33)
        return scan(states, call)

    monkeypatch.setattr(NativeStates, "scan", broken)
    params = SamplingParams(temperature=0.0, max_tokens=4)
    requests = [
        EngineCoreRequest(request_id=f"r{length}", prompt_token_ids=list(range(1, length + 1)), sampling_params=params)
        for length in (20, 33, 34)
    ]
    run = answer(engine, requests, refused={"r33"})
    assert [len(run.tokens[f"r{length}"]) for length in (20, 33, 34)] == [4, 0, 4]
    engine.shutdown()


# Ranks of a data-parallel group.


@pytest.mark.parametrize("architecture", RECURRENT_KINDS)
def test_dummy_steps_between_steps_do_not_touch_states(architecture: str, tmp_path: Path) -> None:
    prompts, expected = answers(save_tiny_model(architecture, tmp_path))
    engine = engine_of(tmp_path, executor={"kind": "uniproc"}, scheduler={"max_num_batched_tokens": 33})
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
    for turn in range(2):
        requests = [(f"{turn} {i}", prompt, params) for i, prompt in enumerate(prompts)]
        run = generate(engine, requests, after_step=engine.executor.execute_dummy_batch)
        assert list(run.tokens.values()) == expected
    executor: Any = engine.executor
    layers = executor._worker.runner._state_layers.values()
    assert layers
    for layer in layers:
        assert not layer.tails[0].any()
        assert layer.closed is None or not layer.closed[0].any()
    engine.shutdown()


# Refusals.


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        (
            "qwen3_5",
            r"executor\.tensor_parallel_size is 3; the model's 4 attention heads and 2 key-value heads can be distributed "
            r"to 1, 2, 4 workers",
        ),
        (
            "mamba",
            r"executor\.tensor_parallel_size is 3; backbone\.layers\.0\.mixer has \d+ channels, which can be distributed to 1, 2",
        ),
        (
            "mamba2",
            r"executor\.tensor_parallel_size is 3; config\.json: num_heads is 8 and n_groups is 2, which can be "
            r"distributed to 1, 2, 4, 8 workers; use one of these sizes",
        ),
    ],
)
def test_heads_that_cannot_be_distributed_are_refused_with_the_possible_sizes(
    architecture: str, message: str, tmp_path: Path
) -> None:
    save_tiny_model(architecture, tmp_path)
    with pytest.raises(ModelLoadError, match=message):
        engine_of(tmp_path, executor=tensor(3))


def test_drafts_in_stages_are_refused(tmp_path: Path) -> None:
    save_tiny_model("lfm2", tmp_path)
    with pytest.raises(ConfigError, match="speculative decoding supports only 1 pipeline stage"):
        engine_of(tmp_path, executor=stages(), speculative=speculative(3))
