"""Engines that sample on a device and copy tokens to the host as late as possible.

Their tokens equal the tokens of engines that wait for each step.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from penstock_common.types.sampling import SamplingParams, StructuredOutput
from penstock_enginecore.core.engine_core import EngineCore
from penstock_enginecore.core.kv_cache.spec import DRAFT_PREFIX
from penstock_enginecore.executor.generation.step_sampling import StepSampling
from penstock_enginecore.forward.cuda.sampler import DeviceLauncher
from tests.fakes.engines.in_process import Run, build_engine, generate
from tests.fakes.engines.late_device import LastMoment, choose_on_device
from tests.fakes.models.fused_models import offer_fused
from tests.fakes.models.tiny_models import VOCAB_SIZE, save_tiny_model

DEMO = Path(__file__).resolve().parents[2] / "examples/demo_model/penstock-tiny"
Requests = list[tuple[str, list[int], SamplingParams]]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("gemma3")
    save_tiny_model("gemma3", directory)
    return directory


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(1, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def plain_requests() -> Requests:
    settings: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 1},
        {"temperature": 0.7, "seed": 2, "top_p": 0.9},
        {"temperature": 1.3, "seed": -1, "top_k": 20},
        {"temperature": 1.0, "seed": 4, "min_p": 0.05, "stop_token_ids": list(range(0, VOCAB_SIZE, 9))},
        {"temperature": 0.9, "seed": 5, "top_k": 50, "top_p": 0.8},
    ]
    return [
        (f"r{i}", prompt(3 + 5 * i, i), SamplingParams(**{"max_tokens": 10 + i, **of})) for i, of in enumerate(settings)
    ]


def other_requests() -> Requests:
    settings: list[dict[str, Any]] = [
        {"frequency_penalty": 1.0, "presence_penalty": 0.3},
        {"logprobs": 3},
        {"bad_word_token_ids": ((5,), (9, 7))},
        {"prompt_logprobs": 2},
        {"logit_bias": {7: 4.0, 11: -9.0}, "min_tokens": 5, "stop_token_ids": list(range(0, VOCAB_SIZE, 3))},
        {"repetition_penalty": 1.4, "logprobs": 1, "top_p": 0.9},
        {"allowed_token_ids": list(range(2, 60)), "top_k": 9},
    ]
    return [
        (f"o{i}", prompt(4 + 3 * i, 50 + i), SamplingParams(temperature=1.0, seed=60 + i, max_tokens=7, **of))
        for i, of in enumerate(settings)
    ]


def assert_equal_logprobs(found: Run, expected: Run) -> None:
    """Check that the requests have the same log-probabilities, up to rounding."""
    assert found.logprobs.keys() == expected.logprobs.keys()
    for request_id, logprobs in expected.logprobs.items():
        own = found.logprobs[request_id]
        assert (own.offsets, own.token_ids, own.ranks) == (logprobs.offsets, logprobs.token_ids, logprobs.ranks)
        assert own.logprobs == pytest.approx(logprobs.logprobs, abs=1e-5)


def refuse_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make steps fail that wait for their own tokens."""
    monkeypatch.setattr(StepSampling, "sample", None)


def run(path: Path, requests: Requests, **sections: Any) -> tuple[Run, EngineCore]:
    engine = build_engine(path, kernels={"isa": "off"}, **sections)
    return generate(engine, requests), engine


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"scheduler": {"max_num_batched_tokens": 9}},
        {"scheduler": {"max_num_batched_tokens": 12}, "cache": {"enable_prefix_caching": False}},
        {"scheduler": {"async_scheduling": False}},
        {"speculative": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "adaptive": False}},
    ],
    ids=["whole prompts", "pieces of prompts", "preemptions", "one step at a time", "drafts"],
)
@pytest.mark.parametrize("others", [False, True], ids=["plain", "with rules beside"])
def test_tokens_are_those_of_an_engine_that_waits(
    path: Path, others: bool, sections: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = {"model": {"max_model_len": 44}}
    requests = plain_requests() + (other_requests() if others else [])
    expected, waiting = run(path, requests, **model)
    if "cache" in sections:  # enough blocks for the longest request, plus two
        num_blocks = waiting.scheduler.kv_cache.num_blocks_for(44) + 2
        sections = {**sections, "cache": {**sections["cache"], "num_blocks": num_blocks}}
    choose_on_device(monkeypatch, LastMoment)
    found, engine = run(path, requests, **model, **sections)
    assert found.tokens == expected.tokens
    assert found.finish_reasons == expected.finish_reasons
    assert_equal_logprobs(found, expected)
    assert engine.scheduler._async is sections.get("scheduler", {}).get("async_scheduling", True)
    if "cache" in sections and others:  # without the other requests, no request is preempted
        assert found.stats.num_preemptions > 0


def test_no_token_is_taken_from_the_host_before_a_request_needs_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the test above, which would otherwise compare the host's tokens with themselves."""
    choose_on_device(monkeypatch, LastMoment)
    _, engine = run(path, plain_requests())
    runner = engine.executor._worker.runner
    assert len(runner._coming) > 10
    assert runner._batch._num_unknown > 60


def test_requests_with_rules_do_not_make_other_requests_wait(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choose_on_device(monkeypatch, LastMoment)
    refuse_to_wait(monkeypatch)
    _, engine = run(path, plain_requests() + other_requests())
    assert engine.executor._worker.runner._batch._num_unknown > 0


@pytest.mark.parametrize("others", [False, True], ids=["plain", "with rules beside"])
def test_replayed_steps_choose_the_tokens_that_the_host_would(
    path: Path, others: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer_fused(monkeypatch)
    requests = plain_requests() + (other_requests() if others else [])
    expected = generate(build_engine(path), requests)
    choose_on_device(monkeypatch, LastMoment)
    apart: list[int] = []
    launch = DeviceLauncher.launch
    monkeypatch.setattr(
        DeviceLauncher, "launch", lambda self, logits, *args: apart.append(len(logits)) or launch(self, logits, *args)
    )
    engine = build_engine(path)
    found = generate(engine, requests)
    assert found.tokens == expected.tokens
    assert_equal_logprobs(found, expected)
    assert engine.executor.worker_stats()[0].graphs.replays > 5
    # Only requests with rules are sampled apart. The first step scores a prompt, so all its requests are.
    assert others or not apart
    assert max(apart[1:], default=0) == (5 if others else 0)


def test_decodes_are_replays_from_the_first_on(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer_fused(monkeypatch)
    choose_on_device(monkeypatch, LastMoment)
    engine = build_engine(path, kernels={"capture_at_start": True, "graph_sizes": (1, 3)})
    stats = engine.executor.worker_stats
    before = stats()[0].graphs
    assert (before.captured, before.replays) == (2, 2)  # the engine verifies each graph with a replay at load
    generate(engine, [("a", prompt(5, 1), SamplingParams(temperature=0.0, max_tokens=7, ignore_eos=True))])
    after = stats()[0].graphs
    # The third graph is the prompt's.
    assert (after.captured, after.replays, after.launched) == (3, 8, before.launched + 1)
    assert (after.padding_tokens, after.padding_rows) == (0, 0)


def test_no_step_waits_for_a_capture_while_the_engine_serves(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer_fused(monkeypatch)
    choose_on_device(monkeypatch, LastMoment)
    limits = {"max_num_seqs": 3, "max_num_batched_tokens": 40}
    engine = build_engine(path, kernels={"capture_at_start": True}, scheduler=limits)
    before = engine.executor.worker_stats()[0].graphs
    requests = [(f"{i}", prompt(7 + 9 * i, i), SamplingParams(temperature=0.0, max_tokens=5)) for i in range(4)]
    found = generate(engine, requests).tokens
    after = engine.executor.worker_stats()[0].graphs
    assert (after.captures, after.launched) == (before.captures, before.launched)
    assert after.replays > before.replays + 5
    assert found == generate(build_engine(path, kernels={"graphs": False}), requests).tokens


def test_a_draft_model_with_windows_of_its_own_does_not_disturb_captures(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer_fused(monkeypatch)
    choose_on_device(monkeypatch, LastMoment)
    save_tiny_model("mistral", tmp_path, sliding_window=5)
    engine = build_engine(
        path,
        kernels={"capture_at_start": True, "graph_sizes": (1,)},
        speculative={"method": "draft_model", "model": str(tmp_path), "adaptive": False},
    )
    groups = engine.scheduler.kv_cache.groups
    assert any(all(name.startswith(DRAFT_PREFIX) for name in group.layer_names) for group in groups)
    assert engine.executor.worker_stats()[0].graphs.captured == 1
    requests = plain_requests()[:1]
    assert generate(engine, requests).tokens == generate(build_engine(path), requests).tokens


def test_dummy_steps_and_recovery_keep_the_graphs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer_fused(monkeypatch)
    choose_on_device(monkeypatch, LastMoment)
    requests = plain_requests()[:2]
    expected = generate(build_engine(path), requests).tokens
    engine = build_engine(path, kernels={"capture_at_start": True, "graph_sizes": (1, 2)})
    executor = engine.executor
    before = executor.worker_stats()[0].graphs
    for _ in range(3):
        executor.execute_dummy_batch()
    executor.recover()
    after = executor.worker_stats()[0].graphs
    assert (after.captured, after.captures, after.launched) == (2, before.captures, before.launched)
    assert after.replays == before.replays + 4
    assert generate(engine, requests).tokens == expected


def test_constrained_requests_and_their_neighbours_get_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = DEMO / "tokenizer.json"
    vocab = Tokenizer.from_file(str(tokenizer)).get_vocab_size()
    save_tiny_model("llama", tmp_path, vocab_size=vocab, eos_token_id=1)
    shutil.copy(tokenizer, tmp_path)
    constrained = SamplingParams(
        temperature=1.0, seed=3, max_tokens=40, structured_output=StructuredOutput(regex="[0-9]{3}-[a-f]{5}")
    )
    requests = [("c", prompt(5, 1), constrained), *plain_requests()]
    expected, _ = run(tmp_path, requests)
    choose_on_device(monkeypatch, LastMoment)
    refuse_to_wait(monkeypatch)
    assert run(tmp_path, requests)[0].tokens == expected.tokens
