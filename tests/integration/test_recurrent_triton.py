"""Models with recurrent layers on the GPU's kernels for states, in Triton's interpreter: transformers' greedy tokens."""

import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from penstock_common.types.outputs import FinishReason
from penstock_common.types.request import EngineCoreRequest
from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.core.engine_core import EngineCore
from penstock_enginecore.executor.generation.drafting import Drafting
from penstock_enginecore.forward.cuda import attention
from penstock_enginecore.forward.cuda.graphs import StepGraphs
from tests.fakes.engines.in_process import Run, answer, build_engine, generate
from tests.fakes.engines.known_drafter import KINDS as DRAFT_KINDS
from tests.fakes.engines.known_drafter import KnownDrafter
from tests.fakes.engines.late_device import LastMoment, choose_on_device
from tests.fakes.models.interpreted_kernels import interpreted
from tests.fakes.models.quick_architectures import RECURRENT_KINDS
from tests.fakes.models.recorded_launches import RecordedGraph, RecordedKernels
from tests.fakes.models.recorded_states import RecordedStates
from tests.fakes.models.tiny_models import RECURRENT_ARCHITECTURES, VOCAB_SIZE, WITHOUT_ATTENTION, save_tiny_model
from tests.fakes.models.torch_kernels import TorchKernels
from tests.fakes.models.transformers_greedy import distinct_greedy_tokens

states = interpreted("triton_kernels", "penstock_enginecore.states.cuda")

QUICK = ("granitemoehybrid", "lfm2", "qwen3_5")
FULL = os.environ.get("PENSTOCK_RECURRENT") == "full"
ALL = RECURRENT_ARCHITECTURES if FULL else RECURRENT_KINDS
FAMILIES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in ALL]
"""One model type of each kind of recurrent layer; ``PENSTOCK_RECURRENT=full`` adds the other types."""
SMALL = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
"""Two layers of Qwen3.5 instead of four, because the interpreter is slow."""
PROMPT_LENGTHS = (2, 15, 34)
NEW_TOKENS = 6
"""With these lengths, outputs and prompts cross ends of spans of 16 tokens."""


class Case(NamedTuple):
    path: Path
    prompts: list[list[int]]
    expected: list[list[int]]


def case(path: Path, family: str) -> Case:
    torch.set_num_threads(1)
    model = save_tiny_model(family, path, **(SMALL if family == "qwen3_5" else {}))
    generator = torch.Generator().manual_seed(1)
    prompts, expected = [], []
    for length in PROMPT_LENGTHS:
        tokens: list[int] | None = None
        while tokens is None:
            prompt = torch.randint(1, VOCAB_SIZE, (length,), generator=generator).tolist()
            tokens = distinct_greedy_tokens(model, prompt, NEW_TOKENS)
        prompts.append(prompt)
        expected.append(tokens)
    return Case(path, prompts, expected)


@pytest.fixture(autouse=True)
def torch_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute attention with torch versions of the kernels, which are about a hundred times faster."""
    monkeypatch.setattr(attention, "_kernels", TorchKernels)


def engine_of(path: Path, computing: str, **sections: Any) -> EngineCore:
    engine = build_engine(
        path,
        model={"attention_backend": "triton"},
        cache={"block_size": 16, "state_interval": 16},
        kernels={"isa": "off"},
        **sections,
    )
    assert engine.executor.collective_rpc("worker_info")[0]["computing"].startswith(computing)
    return engine


def greedy(engine: EngineCore, prompts: list[list[int]], prefix: str = "r") -> tuple[list[list[int]], Run]:
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
    run = generate(engine, [(f"{prefix}{i}", prompt, params) for i, prompt in enumerate(prompts)])
    assert set(run.finish_reasons.values()) == {FinishReason.LENGTH}
    return [run.tokens[f"{prefix}{i}"] for i in range(len(prompts))], run


def replaying(monkeypatch: pytest.MonkeyPatch) -> StepGraphs:
    """Make engines capture steps, and sample on a device whose tokens reach the host late. Returns the graphs."""
    kernels = RecordedKernels()
    monkeypatch.setattr(attention, "_kernels", lambda: kernels)
    monkeypatch.setattr(attention, "can_capture", lambda device: True)
    monkeypatch.setattr(attention, "open_kernels", lambda specs: RecordedStates(kernels, states.TritonStateKernels()))
    graphs = StepGraphs(lambda: RecordedGraph(kernels, of_modules=True))
    monkeypatch.setattr(attention, "make_graphs", lambda: graphs)
    choose_on_device(monkeypatch, LastMoment)
    return graphs


@pytest.mark.parametrize("family", FAMILIES)
def test_a_ragged_batch_in_chunks_and_prefix_hits_give_the_same_tokens(family: str, tmp_path: Path) -> None:
    given = case(tmp_path, family)
    has_attention = family not in WITHOUT_ATTENTION
    name = "Triton attention and states" if has_attention else "Triton states"
    engine = engine_of(tmp_path, name, scheduler={"max_num_batched_tokens": 21})
    assert greedy(engine, given.prompts)[0] == given.expected
    tokens, run = greedy(engine, given.prompts[2:], "again")
    assert tokens == given.expected[2:]
    assert run.stats.prefix_cache_hits == 32


@pytest.mark.parametrize("family", ["qwen3_5", "granitemoehybrid"] if FULL else ["qwen3_5"])
def test_replayed_steps_give_the_same_tokens(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = case(tmp_path, family)
    graphs = replaying(monkeypatch)
    engine = engine_of(tmp_path, "Triton attention and states in graphs", scheduler={"max_num_batched_tokens": 21})
    assert greedy(engine, given.prompts)[0] == given.expected
    before = graphs.stats
    assert greedy(engine, given.prompts, "again")[0] == given.expected
    assert graphs.stats.replays - before.replays > 2
    assert graphs.stats.padding_tokens > before.padding_tokens


@pytest.mark.parametrize("kind", ["wrong", pytest.param("right up to 3", marks=pytest.mark.slow)])
def test_drafts_give_the_same_tokens(kind: str, tmp_path: Path) -> None:
    given = case(tmp_path, "qwen3_5")
    speculative = {"method": "ngram", "num_speculative_tokens": 5, "adaptive": False}
    engine = engine_of(tmp_path, "Triton attention and states", speculative=speculative)
    outputs = {tuple(prompt): tokens for prompt, tokens in zip(given.prompts, given.expected, strict=True)}
    executor: Any = engine.executor
    executor._worker.runner._drafting = Drafting(KnownDrafter(outputs, DRAFT_KINDS[kind], VOCAB_SIZE))
    tokens, run = greedy(engine, given.prompts)
    assert tokens == given.expected
    counts: Any = run.stats.spec_decoding_stats
    assert counts.num_draft_tokens > counts.num_accepted_tokens


@pytest.mark.parametrize("replays", [False, True], ids=["launched", "replayed"])
def test_states_that_are_not_finite_end_only_their_request(
    replays: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = case(tmp_path, "lfm2")
    name = "Triton attention and states"
    if replays:
        replaying(monkeypatch)
        name += " in graphs"
    engine = engine_of(tmp_path, name, scheduler={"max_num_batched_tokens": 21})
    bad = next(token for token in range(VOCAB_SIZE - 1, 0, -1) if all(token not in each for each in given.prompts))
    assert all(bad not in tokens for tokens in given.expected)
    executor: Any = engine.executor
    module = executor._worker.runner._model.module
    with torch.no_grad():
        module.get_input_embeddings().weight[bad] = torch.nan
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
    # The bad token is the last one before a state, in a step that chooses no token of the request.
    prompt = [*given.prompts[2][:31], bad, *given.prompts[2], 5]
    requests = [
        EngineCoreRequest(request_id=name, prompt_token_ids=tokens, sampling_params=params)
        for name, tokens in (("good", given.prompts[0]), ("broken", prompt))
    ]
    run = answer(engine, requests, refused={"broken"})
    assert run.finish_reasons == {"good": FinishReason.LENGTH, "broken": FinishReason.ERROR}
    assert run.tokens == {"good": given.expected[0], "broken": []}
    kept = engine.scheduler.kv_cache.states
    assert kept is not None
    probe = engine.preprocess("probe", requests[1])
    assert kept.longest(probe.block_hashes, len(probe.block_hashes)) == 1, "a state that is not finite is kept"
