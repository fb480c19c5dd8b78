"""Greedy tokens of models with recurrent layers equal transformers' own, for any batch, chunks, cache hits and drafts."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoConfig

from penstock_common.types.outputs import FinishReason
from penstock_common.types.request import EngineCoreRequest
from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.core.engine_core import EngineCore
from penstock_enginecore.executor.generation.drafting import Drafting
from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.states.core.spec import StatePoolConfig, rows_per_request
from tests.fakes.engines.in_process import Run, answer, build_engine, generate
from tests.fakes.engines.known_drafter import KINDS as DRAFT_KINDS
from tests.fakes.engines.known_drafter import KnownDrafter
from tests.fakes.models.heads import LAYOUTS, Reference, random_head, save_head
from tests.fakes.models.quick_architectures import QUICK_RECURRENT, RECURRENT_KINDS, skip_most_of_others
from tests.fakes.models.tiny_models import VOCAB_SIZE, save_narrow_model, save_tiny_model
from tests.fakes.models.transformers_greedy import distinct_greedy_tokens
from tests.integration.test_eagle import Seen

NEW_TOKENS = 36
"""Each output crosses the end of a span of 16 tokens at least twice."""
PROMPT_LENGTHS = (1, 3, 7, 15, 16, 17, 34, 90)
REPETITIVE = (3, 5, 11)
"""Lengths of the patterns of prompts from which n-grams draft."""


class Case(NamedTuple):
    path: Path
    prompts: list[list[int]]
    expected: list[list[int]]
    architecture: str


def answers(model: Any) -> tuple[list[list[int]], list[list[int]]]:
    """Return random prompts, and the greedy tokens of ``model`` after them, which do not depend on rounding."""
    generator = torch.Generator().manual_seed(1)
    lengths = [(length, length) for length in PROMPT_LENGTHS] + [(length, 44) for length in REPETITIVE]
    prompts, expected = [], []
    for period, length in lengths:
        tokens: list[int] | None = None
        while tokens is None:
            pattern = torch.randint(1, VOCAB_SIZE, (period,), generator=generator).tolist()
            prompt = (pattern * 15)[:length]
            tokens = distinct_greedy_tokens(model, prompt, NEW_TOKENS)
        prompts.append(prompt)
        expected.append(tokens)
    return prompts, expected


@pytest.fixture(autouse=True)
def some_parameters(request: pytest.FixtureRequest) -> None:
    skip_most_of_others(request, "case")


@pytest.fixture(scope="module", params=QUICK_RECURRENT)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp(request.param)
    model = save_tiny_model(request.param, path)
    prompts, expected = answers(model)
    assert len({token for tokens in expected for token in tokens}) > 30
    assert len({tuple(tokens) for tokens in expected}) == len(expected)
    return Case(path, prompts, expected, request.param)


def engine_of(path: Path, **sections: Any) -> EngineCore:
    return build_engine(path, cache={"block_size": 16, **sections.pop("cache", {})}, **sections)


def greedy(engine: EngineCore, prompts: list[list[int]], prefix: str = "r") -> tuple[list[list[int]], Run]:
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
    run = generate(engine, [(f"{prefix}{i}", prompt, params) for i, prompt in enumerate(prompts)])
    assert set(run.finish_reasons.values()) == {FinishReason.LENGTH}
    return [run.tokens[f"{prefix}{i}"] for i in range(len(prompts))], run


def test_a_ragged_batch_and_prefix_hits_give_the_same_tokens(case: Case) -> None:
    engine = engine_of(case.path)
    assert greedy(engine, case.prompts)[0] == case.expected
    tokens, run = greedy(engine, case.prompts, prefix="again")
    assert tokens == case.expected
    assert run.stats.prefix_cache_hits > 0


@pytest.mark.quick(
    *("qwen3_5-1", "qwen3_5-17", "granitemoehybrid-16", "mamba2-64", "lfm2-7", "jamba-7", "kimi_linear-17")
)
@pytest.mark.parametrize("tokens", [1, 7, 16, 17, 64])
def test_chunks_of_any_size_give_the_same_tokens(case: Case, tokens: int) -> None:
    engine = engine_of(case.path, scheduler={"max_num_batched_tokens": tokens})
    assert greedy(engine, case.prompts)[0] == case.expected
    assert greedy(engine, case.prompts[::-1], prefix="again")[0] == case.expected[::-1]


@pytest.mark.quick("mamba2", "qwen3_5")
def test_prefixes_of_any_length_give_the_same_tokens_with_and_without_kept_states(case: Case) -> None:
    # A state at the end of a prompt must not be used: it contains the last token, which is computed again.
    longest = case.prompts[PROMPT_LENGTHS.index(max(PROMPT_LENGTHS))]
    params = SamplingParams(temperature=0.0, max_tokens=4)
    requests = [(f"r{length}", longest[:length], params) for length in range(1, len(longest) + 1)]
    expected = generate(engine_of(case.path, cache={"enable_prefix_caching": False}), requests).tokens
    engine = engine_of(case.path, cache={"state_interval": 16})
    generate(engine, [("caches all prefixes", longest, params)])
    run = generate(engine, requests)
    assert run.tokens == expected
    # Every prefix is hit up to the last block before its last token.
    assert run.stats.prefix_cache_hits == sum((length - 1) // 16 * 16 for length in range(1, len(longest) + 1))


def small_memory(path: Path, num_requests: int, num_kept: int, num_drafts: int = 0, **sections: Any) -> dict[str, Any]:
    """Return cache settings with slots for ``num_requests`` running requests and ``num_kept`` kept states."""
    engine = engine_of(path, **sections)
    needs = engine.model.states
    engine.shutdown()
    assert needs is not None
    of_request = needs.request_bytes(rows_per_request(num_drafts))
    memory = max(4 * num_requests * of_request, num_requests * of_request + (1 + num_kept) * needs.slot_bytes)
    rest = memory - num_requests * of_request - needs.slot_bytes
    # ``state_share`` must be below 1, so it is chosen for half a slot more.
    return {"kv_cache_memory": memory, "state_share": (num_kept + 0.5) * needs.slot_bytes / rest, "state_interval": 16}


def pool_of(engine: EngineCore) -> StatePoolConfig:
    states = engine.scheduler.kv_cache.states
    assert states is not None
    return states.config


def test_preempted_requests_with_few_state_slots_give_the_same_tokens(case: Case) -> None:
    longest = max(PROMPT_LENGTHS) + NEW_TOKENS
    cache = small_memory(case.path, num_requests=4, num_kept=3)
    engine = engine_of(
        case.path,
        model={"max_model_len": longest},
        cache={**cache, "num_blocks": -(-longest // 16) + 3},
        scheduler={"max_num_batched_tokens": 24},
    )
    assert pool_of(engine).num_requests == 4
    preemptions = 0
    for turn in range(3):
        order = slice(None, None, -1 if turn % 2 else 1)
        tokens, run = greedy(engine, case.prompts[order], prefix=f"{turn} ")
        assert tokens[order] == case.expected, f"turn {turn}"
        preemptions = run.stats.num_preemptions
    assert preemptions > 0
    states = engine.scheduler.kv_cache.states
    assert states is not None
    assert states.stats().num_used_slots == 0
    has_attention = bool(engine.executor.kv_cache_specs())
    assert (states.stats().num_evictions > 0) == has_attention, "without attention, states get all of the memory"


# Speculative decoding.

DRAFTED: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"scheduler": {"max_num_batched_tokens": 24}},
    "asynchronous": {"scheduler": {"async_scheduling": True}},
    "several steps": {"executor": {"max_concurrent_batches": 3}},
    "preempted": {"model": {"max_model_len": 126}, "cache": {"num_blocks": 12}},
}


class FlickeringDrafter(KnownDrafter):
    """A drafter that has no drafts in some steps, and fewer than wanted in others."""

    def _draft(self, request: Any) -> list[int]:
        drafts = super()._draft(request)
        return drafts[: [None, 0, 2, 0, 1][self.proposed % 5]]


def speculative(num_drafts: int, method: str = "ngram", **more: Any) -> dict[str, Any]:
    return {"method": method, "num_speculative_tokens": num_drafts, "adaptive": False, **more}


def known_drafter(case: Case, kind: str) -> Any:
    outputs = {tuple(prompt): tokens for prompt, tokens in zip(case.prompts, case.expected, strict=True)}
    if kind == "flickering":
        return FlickeringDrafter(outputs, DRAFT_KINDS["by chance"], VOCAB_SIZE)
    return KnownDrafter(outputs, DRAFT_KINDS[kind], VOCAB_SIZE)


DRAFTS = (
    "plain, right, 1",
    "plain, wrong, 15",
    "plain, flickering, 15",
    "chunks, by chance, 5",
    "chunks, right, 15",
    "asynchronous, right up to 3, 15",
    "asynchronous, flickering, 5",
    "several steps, by chance, 15",
    "several steps, right, 5",
    "preempted, by chance, 15",
    "preempted, flickering, 1",
)
"""Settings, kinds of drafts, and maximum numbers of drafts."""


@pytest.mark.quick(
    *("qwen3_5-plain, wrong, 15", "qwen3_5-plain, flickering, 15", "qwen3_5-asynchronous, right up to 3, 15"),
    *("granitemoehybrid-preempted, by chance, 15", "granitemoehybrid-chunks, right, 15"),
    *("mamba2-several steps, by chance, 15", "lfm2-asynchronous, flickering, 5"),
    *("jamba-plain, flickering, 15", "kimi_linear-chunks, by chance, 5"),
)
@pytest.mark.parametrize("drafts", DRAFTS)
def test_drafts_that_are_right_or_wrong_give_the_same_tokens(case: Case, drafts: str) -> None:
    setting, kind, num_drafts = drafts.split(", ")
    engine = engine_of(case.path, speculative=speculative(int(num_drafts)), **DRAFTED[setting])
    executor: Any = engine.executor
    executor._worker.runner._drafting = Drafting(known_drafter(case, kind))
    for turn in range(2):  # the second time on prefixes
        tokens, run = greedy(engine, case.prompts, prefix=f"{turn} ")
        assert tokens == case.expected, f"turn {turn}"
    assert not engine.scheduler.drafter_failure
    counts: Any = run.stats.spec_decoding_stats
    assert counts.num_draft_tokens > 0
    if kind in ("right", "wrong"):
        assert (counts.num_accepted_tokens == 0) is (kind == "wrong")
    if setting == "preempted":
        assert run.stats.num_preemptions > 0


@pytest.mark.quick("granitemoehybrid-15", "jamba-5", "kimi_linear-5", "lfm2-5", "mamba2-5", "qwen3_5-1", "qwen3_5-15")
@pytest.mark.parametrize("num_drafts", [1, 5, 15])
def test_ngrams_of_repetitive_prompts_give_the_same_tokens(case: Case, num_drafts: int) -> None:
    engine = engine_of(case.path, speculative=speculative(num_drafts, prompt_lookup_min=1))
    for turn in range(2):
        tokens, run = greedy(engine, case.prompts, prefix=f"{turn} ")
        assert tokens == case.expected, f"turn {turn}"
    counts: Any = run.stats.spec_decoding_stats
    assert counts.num_draft_tokens > counts.num_accepted_tokens


def predicted(case: Case, number: int) -> list[int]:
    """Return a prediction of an output: in turn right, right but for one token, and of something else."""
    tokens = list(case.expected[number])
    if number % 3 == 1:
        tokens[13] = (tokens[13] + 1) % VOCAB_SIZE
    return tokens if number % 3 < 2 else case.expected[number - 1]


@pytest.mark.parametrize("num_drafts", [pytest.param(4, marks=pytest.mark.slow), 15])
def test_predictions_give_the_same_tokens(case: Case, num_drafts: int) -> None:
    engine = engine_of(case.path, speculative=speculative(num_drafts, "prediction"))
    requests = [
        EngineCoreRequest(
            request_id=f"r{i}",
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS),
            prediction_token_ids=predicted(case, i),
        )
        for i, prompt in enumerate(case.prompts)
    ]
    run = answer(engine, requests)
    assert [run.tokens[f"r{i}"] for i in range(len(requests))] == case.expected
    counts: Any = run.stats.spec_decoding_stats
    assert counts.num_draft_tokens > counts.num_accepted_tokens > NEW_TOKENS


@pytest.fixture(scope="module")
def attention_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    save_tiny_model("llama", path)
    return path


def test_drafts_of_a_model_with_attention_give_the_same_tokens(case: Case, attention_model: Path) -> None:
    engine = engine_of(case.path, speculative=speculative(5, "draft_model", model=str(attention_model)))
    for turn in range(2):
        tokens, run = greedy(engine, case.prompts, prefix=f"{turn} ")
        assert tokens == case.expected, f"turn {turn}"
    assert not engine.scheduler.drafter_failure
    counts: Any = run.stats.spec_decoding_stats
    assert counts.num_draft_tokens > counts.num_accepted_tokens  # random drafts; few or none are accepted


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_drafts_of_a_head_are_those_of_plain_torch_and_give_the_same_tokens(
    case: Case, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = AutoConfig.from_pretrained(case.path).hidden_size
    head = random_head(kind, layers=(0, 1, 1) if kind == "eagle3" else (), hidden=hidden, vocab=VOCAB_SIZE)
    save_head(head, tmp_path, LAYOUTS[0], hidden=hidden, vocab=VOCAB_SIZE)
    seen, reference = Seen(monkeypatch), Reference(case.path, head)
    engine = engine_of(
        case.path, cache={"enable_prefix_caching": False}, speculative=speculative(5, kind, model=str(tmp_path))
    )
    assert greedy(engine, case.prompts)[0] == case.expected
    assert not engine.scheduler.drafter_failure
    assert len(seen.drafts) > 100
    for tokens, drafts in list(seen.drafts.items())[::40]:
        assert drafts == reference.drafts(list(tokens), len(drafts)), len(tokens)


@pytest.mark.parametrize("architecture", RECURRENT_KINDS)
def test_a_draft_model_with_recurrent_layers_is_refused(
    architecture: str, attention_model: Path, tmp_path: Path
) -> None:
    save_tiny_model(architecture, tmp_path)
    message = (
        r"speculative\.model '.*' cannot draft for this model: the checkpoint's layers are recurrent "
        r"\(model_type '.*'\), and drafters keep no recurrent states; "
        r"use a model that has only attention layers, or set speculative\.method to 'ngram'"
    )
    with pytest.raises(ModelLoadError, match=message):
        engine_of(attention_model, speculative=speculative(5, "draft_model", model=str(tmp_path)))


# 16-bit checkpoints.


def test_a_bfloat16_checkpoint_gives_the_tokens_of_float32(case: Case, tmp_path: Path) -> None:
    prompts, expected = answers(save_narrow_model(case.architecture, tmp_path))
    engine = engine_of(tmp_path, scheduler={"max_num_batched_tokens": 40})
    for turn in range(2):
        assert greedy(engine, prompts, prefix=f"{turn} ")[0] == expected, f"turn {turn}"


def test_bfloat16_is_as_close_to_float32_as_transformers(case: Case, tmp_path: Path) -> None:
    wide: Any = save_narrow_model(case.architecture, tmp_path)
    narrow = type(wide).from_pretrained(tmp_path, dtype=torch.bfloat16, attn_implementation="eager").eval()
    [longest] = [prompt for prompt in case.prompts if len(prompt) == max(PROMPT_LENGTHS)]
    engine = engine_of(
        tmp_path,
        model={"dtype": "bfloat16", "max_logprobs": -1},
        kernels={"isa": "off"},
        scheduler={"max_num_batched_tokens": 23},
    )
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=VOCAB_SIZE)
    scored = generate(engine, [("r", longest, params)]).prompt_logprobs["r"]
    ours = torch.zeros(len(longest) - 1, VOCAB_SIZE)
    for row in range(len(longest) - 1):
        entries = slice(*scored.offsets[row : row + 2])
        ours[row, scored.token_ids[entries]] = torch.tensor(scored.logprobs[entries])

    def scores(model: torch.nn.Module) -> torch.Tensor:
        with torch.inference_mode():
            logits: torch.Tensor = model(torch.tensor([longest])).logits[0, :-1]
        return logits.float().log_softmax(dim=-1)

    exact = scores(wide)
    assert 1e-4 < (ours - exact).norm() < 1.25 * (scores(narrow) - exact).norm()
