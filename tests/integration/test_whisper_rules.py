"""Whisper's rules in an engine: tokens equal those of transformers' processors, also if requests are preempted, resumed
or scheduled ahead.

The model is a small text model, because the rules read only tokens and logits.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock_common.types.request import EngineCoreRequest
from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.models import loader
from penstock_enginecore.models.whisper_rules import WhisperRules
from tests.fakes.engines.in_process import answer, build_engine, generate
from tests.fakes.models.tiny_models import VOCAB_SIZE, save_tiny_model
from tests.fakes.models.whisper_processors import processors_of

END, START, LANGUAGE, TASK, NO_TIMESTAMPS = 200, 201, 202, 203, 249
RULES = WhisperRules((1, 2, 3), (END,), NO_TIMESTAMPS, 5, END, START, (TASK,))
SOUND = [9] * 12
PROMPTS = {"timed": [*SOUND, START, LANGUAGE, TASK], "untimed": [*SOUND, START, LANGUAGE, TASK, NO_TIMESTAMPS]}
NEW_TOKENS = 24
Model = tuple[Path, torch.nn.Module]


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Model:
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("whisper")
    return path, save_tiny_model("gemma2", path)


@pytest.fixture(autouse=True)
def _with_rules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(loader, "read_whisper_rules", lambda *args: RULES)
    return


def expected(model: torch.nn.Module, prompt: list[int]) -> list[int]:
    """Return the greedy tokens after transformers' processors."""
    processors = processors_of(RULES, len(prompt), timed=prompt[-1] != NO_TIMESTAMPS)
    tokens = list(prompt)
    for _ in range(NEW_TOKENS):
        with torch.inference_mode():
            scores = model(torch.tensor([tokens])).logits[:, -1].float()
        scores = processors(torch.tensor([tokens]), scores)
        tokens.append(int(scores.argmax()))
    return tokens[len(prompt) :]


def params(**values: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": NEW_TOKENS, "ignore_eos": True, "seed": 3, **values})


@pytest.mark.parametrize(
    "sections",
    [
        {"scheduler": {"async_scheduling": False}},
        {"scheduler": {"async_scheduling": True}},
        {"speculative": {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}},
    ],
    ids=["in turn", "ahead", "drafts"],
)
def test_tokens_equal_those_of_transformers(whisper: Model, sections: dict[str, Any]) -> None:
    path, model = whisper
    engine = build_engine(path, **sections)
    found = generate(engine, [(name, prompt, params()) for name, prompt in PROMPTS.items()]).tokens
    for name, prompt in PROMPTS.items():
        assert found[name] == expected(model, prompt), name
    assert found["timed"][0] > NO_TIMESTAMPS
    assert set(found["untimed"]).isdisjoint(RULES.suppressed)


@pytest.mark.parametrize("values", [{}, {"temperature": 1.0}], ids=["greedy", "drawn"])
def test_preempted_and_resumed_requests_keep_their_tokens(whisper: Model, values: dict[str, Any]) -> None:
    path, _ = whisper
    requests = [(f"{name}{i}", prompt, params(**values)) for name, prompt in PROMPTS.items() for i in range(3)]
    whole = generate(build_engine(path), requests).tokens
    crowded = generate(build_engine(path, cache={"num_blocks": 28}), requests)
    assert crowded.stats.num_preemptions > 0
    assert crowded.tokens == whole
    moved = [
        EngineCoreRequest(
            request_id=f"{request_id} {count}",
            prompt_token_ids=prompt,
            sampling_params=given,
            prior_output_token_ids=whole[request_id][:count],
            attempt=1,
        )
        for request_id, prompt, given in requests[::3]
        for count in (1, 2, 7)
    ]
    resumed = answer(build_engine(path), moved).tokens
    for each in moved:
        name = each.request_id.split()[0]
        assert [*each.prior_output_token_ids, *resumed[each.request_id]] == whole[name]


def test_one_request_finds_the_language_and_scores_a_token_that_the_mask_excludes(whisper: Model) -> None:
    path, model = whisper
    prompt, languages, silence = [*SOUND, START], (LANGUAGE, 210, 211), 240
    asked = params(max_tokens=1, allowed_token_ids=languages, logprob_token_ids=(silence, *languages))
    run = generate(build_engine(path), [("r", prompt, asked)])
    with torch.inference_mode():
        exact = model(torch.tensor([prompt])).logits[0, -1].float().log_softmax(dim=-1)
    best = max(languages, key=lambda token: float(exact[token]))
    assert run.tokens["r"] == [best]
    assert run.logprobs["r"].token_ids == [best, silence, *languages]
    assert run.logprobs["r"].logprobs == pytest.approx(exact[[best, silence, *languages]].tolist(), abs=1e-5)
    assert silence < VOCAB_SIZE
