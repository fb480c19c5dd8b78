"""Tokens, log-probabilities and finish reasons are the same with and without drafts, for any drafts."""

import itertools
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch

from penstock_common.types.outputs import FinishReason, Logprobs, RequestError
from penstock_common.types.request import EngineCoreRequest
from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.config import SpeculativeConfig
from penstock_enginecore.core.engine_core import EngineCore
from penstock_enginecore.executor.generation.drafting import Drafting
from tests.fakes.engines.in_process import build_engine
from tests.fakes.engines.known_drafter import KINDS, KnownDrafter
from tests.fakes.models.tiny_models import VOCAB_SIZE, save_tiny_model

CLIENT = "test"
PROMPTS = (1, 3, 7, 16, 34, 9)


class Ended(NamedTuple):
    """The output of a finished request."""

    token_ids: list[int]
    logprobs: Logprobs
    finish_reason: FinishReason | None
    stop_reason: Any
    error: RequestError | None


PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0, "seed": 3},
    "filters": {"temperature": 0.9, "seed": 5, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
    "penalties": {
        "temperature": 0.8,
        "seed": 1,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.6,
        "presence_penalty": 0.4,
    },
    "greedy penalties": {"temperature": 0.0, "frequency_penalty": 1.5},
    "logprobs": {"temperature": 1.0, "seed": 9, "logprobs": 3},
    "prompt logprobs": {"temperature": 0.0, "logprobs": 0, "prompt_logprobs": 1},
    "bias": {"temperature": 0.0, "logit_bias": {5: 4.0, 9: 3.0}},
    "allowed": {"temperature": 1.0, "seed": 2, "allowed_token_ids": tuple(range(3, 20))},
    "min tokens": {"temperature": 1.0, "seed": 4, "min_tokens": 9, "stop_token_ids": tuple(range(2, 90))},
    "stop tokens": {"temperature": 1.0, "seed": 6, "stop_token_ids": tuple(range(2, 30))},
    "short": {"temperature": 1.0, "seed": 6, "max_tokens": 2},
    "one": {"temperature": 0.0, "max_tokens": 1},
}


def requests_of(bad_words: tuple[tuple[int, ...], ...] = ()) -> list[EngineCoreRequest]:
    generator = torch.Generator().manual_seed(1)
    requests = []
    for number, ((name, params), length) in enumerate(zip(PARAMS.items(), itertools.cycle(PROMPTS))):
        prompt = torch.randint(1, VOCAB_SIZE, (length,), generator=generator).tolist()
        sampling = SamplingParams(**{"max_tokens": 24, "bad_word_token_ids": bad_words} | params)
        requests.append(
            EngineCoreRequest(request_id=f"{number} {name}", prompt_token_ids=prompt, sampling_params=sampling)
        )
    return requests


def run(engine: EngineCore, requests: list[EngineCoreRequest]) -> tuple[dict[str, Ended], Any]:
    """Return the finished requests and the last statistics.

    Requests are queued two at a time, so that prompts start in the same steps as other requests' drafts.
    """
    found = {request.request_id: Ended([], Logprobs(), None, None, None) for request in requests}
    left = list(requests)
    stats = None
    while left or engine.has_requests:
        for request in left[:2]:
            engine.add(engine.preprocess(CLIENT, request))
        left = left[2:]
        for outputs in engine.step(lambda: None).values():
            stats = outputs.scheduler_stats or stats
            for output in outputs.outputs:
                before = found[output.request_id]
                assert output.offset == len(before.token_ids)
                if output.new_logprobs is not None:
                    assert len(output.new_logprobs) == len(output.new_token_ids)
                    before.logprobs.extend(output.new_logprobs)
                found[output.request_id] = Ended(
                    before.token_ids + output.new_token_ids,
                    before.logprobs,
                    output.finish_reason,
                    output.stop_reason,
                    output.error,
                )
    return found, stats


def engine_of(path: Path, drafter: KnownDrafter | None = None, num_drafts: int = 4, **sections: Any) -> EngineCore:
    speculative = {"method": "ngram", "num_speculative_tokens": num_drafts, "adaptive": False} if drafter else {}
    sections["cache"] = {"block_size": 16, "num_blocks": 128} | sections.get("cache", {})
    engine = build_engine(path, speculative=speculative, **sections)
    if drafter is not None:
        engine.executor._worker.runner._drafting = Drafting(drafter)
    return engine


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp(request.param)
    save_tiny_model(request.param, path, hidden_size=64)
    return path


class Reference(NamedTuple):
    path: Path
    requests: list[EngineCoreRequest]
    ended: dict[str, Ended]

    def drafter(self, kind: str) -> KnownDrafter:
        outputs = {tuple(r.prompt_token_ids): self.ended[r.request_id].token_ids for r in self.requests}
        return KnownDrafter(outputs, KINDS[kind], VOCAB_SIZE)


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    plain, _ = run(engine_of(model), requests_of())
    banned = tuple(tuple(ended.token_ids[2:4]) for ended in plain.values() if len(ended.token_ids) > 4)
    requests = requests_of(banned)
    ended, stats = run(engine_of(model), requests)
    assert stats.spec_decoding_stats is None
    assert len({tuple(e.token_ids) for e in ended.values()}) == len(requests)
    return Reference(model, requests, ended)


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"scheduler": {"max_num_batched_tokens": 16}},
    "asynchronous": {"scheduler": {"async_scheduling": True}},
    "several steps": {"executor": {"max_concurrent_batches": 3}},
    "few blocks": {"cache": {"num_blocks": 8, "enable_prefix_caching": False}, "model": {"max_model_len": 64}},
    "torch": {"kernels": {"decoder": False, "linear": False}},
}


@pytest.mark.each_value
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_every_request_ends_with_the_tokens_and_logprobs_that_it_has_without(
    reference: Reference, kind: str, setting: str
) -> None:
    sections = SETTINGS[setting]
    if setting == "torch" and kind not in ("right", "by chance"):
        pytest.skip("bits are the kernels'; two kinds are enough for tokens")
    drafter = reference.drafter(kind)
    engine = engine_of(reference.path, drafter, **sections)
    ended, stats = run(engine, reference.requests)
    for request_id, expected in reference.ended.items():
        found = ended[request_id]
        assert found.token_ids == expected.token_ids, request_id
        assert found[2:] == expected[2:], request_id
        if setting != "torch":
            assert found.logprobs == expected.logprobs, request_id
    assert engine.scheduler.kv_cache.pool.usage == 0
    assert not engine.scheduler.drafter_failure
    counts = stats.spec_decoding_stats
    assert counts.num_draft_tokens > 0
    assert (counts.num_accepted_tokens == 0) is (kind == "wrong")
    if setting == "few blocks":
        assert stats.num_preemptions > 0


@pytest.mark.parametrize("kind", ["right", "by chance", "wrong"])
@pytest.mark.parametrize("family", ["gemma3n", "gemma4_shared"])
def test_drafts_do_not_change_the_tokens_of_layers_that_share_keys(family: str, kind: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    save_tiny_model(family, tmp_path)
    requests = requests_of()
    plain, _ = run(engine_of(tmp_path), requests)
    drafter = Reference(tmp_path, requests, plain).drafter(kind)
    ended, stats = run(engine_of(tmp_path, drafter, scheduler={"max_num_batched_tokens": 16}), requests)
    assert {key: each.token_ids for key, each in ended.items()} == {key: each.token_ids for key, each in plain.items()}
    assert stats.spec_decoding_stats.num_draft_tokens > 0


def test_right_drafts_take_as_few_steps_as_they_can(reference: Reference) -> None:
    engine = engine_of(reference.path, reference.drafter("right"), num_drafts=4)
    request = next(r for r in reference.requests if r.request_id.endswith(" greedy"))
    _, stats = run(engine, [request])
    # The prompt's step gives one token, each later step five tokens: 1, 6, 11, 16, 21. The last step gives three
    # tokens, of which two are drafts.
    assert stats.step_counter == 6
    assert stats.spec_decoding_stats.num_accepted_tokens_per_pos == [5, 5, 4, 4]


def test_a_request_may_have_no_drafts_or_fewer(reference: Reference) -> None:
    drafter = reference.drafter("right")
    engine = engine_of(reference.path, drafter, num_drafts=4)
    of_request = {0: 0, 1: 1, 2: 4, 3: 30}
    requests = []
    for number, most in of_request.items():
        request = reference.requests[number]
        params = msgspec.structs.replace(request.sampling_params, num_speculative_tokens=most)
        requests.append(msgspec.structs.replace(request, sampling_params=params))
    most_scheduled = dict.fromkeys(of_request.values(), 0)
    ended: dict[str, Ended] = {}
    for request in requests:
        found, stats = run(engine, [request])
        ended |= found
        asked = request.sampling_params.num_speculative_tokens
        most_scheduled[asked] = len(stats.spec_decoding_stats.num_accepted_tokens_per_pos)
    assert most_scheduled == {0: 0, 1: 1, 4: 4, 30: 4}
    assert {i: e.token_ids for i, e in ended.items()} == {
        r.request_id: reference.ended[r.request_id].token_ids for r in requests
    }


@pytest.mark.parametrize("fails_at", [1, 3])
def test_a_drafter_that_fails_is_switched_off_and_no_request_ends_for_it(reference: Reference, fails_at: int) -> None:
    drafter = reference.drafter("right")
    drafter.fails_at = fails_at
    engine = engine_of(reference.path, drafter)
    ended, _ = run(engine, reference.requests)
    assert {i: e.token_ids for i, e in ended.items()} == {i: e.token_ids for i, e in reference.ended.items()}
    assert engine.scheduler.drafter_failure == "RuntimeError: the drafter has had enough"
    assert drafter.proposed == fails_at


def test_an_aborted_request_is_ended_for_the_drafter_too(reference: Reference) -> None:
    drafter = reference.drafter("right")
    engine = engine_of(reference.path, drafter)
    request = reference.requests[0]
    engine.add(engine.preprocess(CLIENT, request))
    for _ in range(3):
        engine.step(lambda: None)
    assert len(drafter.living) == 1
    engine.scheduler.abort_requests(CLIENT, [request.request_id])
    engine.step(lambda: None)
    assert not drafter.living


def test_speculation_is_refused_where_it_cannot_be(model: Path) -> None:
    with pytest.raises(Exception, match=r"speculative.model is empty"):
        SpeculativeConfig(method="draft_model")
    with pytest.raises(Exception, match=r"prompt_lookup_min is 4; it must be at most .* 3"):
        SpeculativeConfig(method="ngram", prompt_lookup_min=4, prompt_lookup_max=3)
