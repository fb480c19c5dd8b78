"""Log-probabilities of output and prompt tokens equal transformers' log-probabilities of the complete sequence."""

from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, CohereConfig, GraniteConfig, OPTConfig, PretrainedConfig

from penstock_common.errors import InvalidArgument
from penstock_common.types.outputs import Logprobs
from penstock_common.types.request import EngineCoreRequest
from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.config import KernelsConfig, ModelConfig
from penstock_enginecore.core.engine_core import EngineCore
from penstock_enginecore.core.model_info import ModelInfo
from penstock_enginecore.core.scheduler.output import GrammarBitmask, ModelRunnerOutput
from penstock_enginecore.core.validation import RequestLimits, check_sampling
from penstock_enginecore.executor.generation import step_sampling
from penstock_enginecore.executor.uniproc import UniprocExecutor
from penstock_enginecore.forward.base import ForwardBatch
from penstock_enginecore.forward.build import ForwardConfig, build_forward
from penstock_enginecore.forward.dummy_inputs import Probe
from penstock_enginecore.forward.modules import Head
from penstock_enginecore.models.loader import load_model
from tests.fakes.engines import in_process
from tests.fakes.engines.in_process import answer, build_engine, generate
from tests.fakes.models.tiny_models import ARCHITECTURES, VOCAB_SIZE, save_tiny_model, tiny_config
from tests.fakes.patience import PATIENCE

PROMPTS = [torch.randint(1, VOCAB_SIZE, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (1, 5, 23)]
NEW_TOKENS = 6
ALL = {"max_logprobs": -1}


class Recorder(UniprocExecutor):
    """Keeps every log-probability that steps report, by request."""

    output: dict[str, Logprobs]
    prompt: dict[str, Logprobs]

    def sample_tokens(self, grammar: GrammarBitmask | None = None) -> "Future[ModelRunnerOutput]":
        future = super().sample_tokens(grammar)
        result = future.result(timeout=PATIENCE)
        for reported, kept in ((result.logprobs, type(self).output), (result.prompt_logprobs, type(self).prompt)):
            for request_id, logprobs in reported.items():
                # Engines append a number to request ids.
                kept.setdefault(request_id.rsplit("#", 1)[0], Logprobs()).extend(logprobs)
        return future


@pytest.fixture(autouse=True)
def recorder(monkeypatch: pytest.MonkeyPatch) -> type[Recorder]:
    Recorder.output, Recorder.prompt = {}, {}
    monkeypatch.setattr(in_process, "make_executor", Recorder)
    return Recorder


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("gemma2")
    return path, save_tiny_model("gemma2", path)


def params(**values: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": NEW_TOKENS, "seed": 5, **values})


def check(
    model: torch.nn.Module, tokens: list[int], first: int, logprobs: Logprobs, count: int, rounding: float = 0.0
) -> None:
    """Check that ``logprobs`` are the log-probabilities of ``tokens[first:]`` and of the ``count`` likeliest tokens. Ranks
    may count tokens in any order whose log-probabilities differ by at most ``rounding``.
    """
    with torch.inference_mode():
        exact = model(torch.tensor([tokens])).logits[0].float().log_softmax(dim=-1)
    assert len(logprobs) == len(tokens) - first
    for i, token_id in enumerate(tokens[first:]):
        start, end = logprobs.offsets[i : i + 2]
        ids, row = logprobs.token_ids[start:end], exact[first + i - 1]
        assert ids[0] == token_id
        assert end - start == 1 + count
        assert set(ids[1:]) == set(row.topk(count).indices.tolist())
        assert logprobs.logprobs[start:end] == pytest.approx(row[ids].tolist(), abs=1e-4)
        best = 1 + int((row > row[token_id] + rounding).sum())
        worst = max(best, int((row > row[token_id] - rounding).sum()))
        assert best <= logprobs.ranks[start] <= worst
        assert logprobs.ranks[start + 1 : end] == list(range(1, count + 1))


def run(engine: EngineCore, requests: list[tuple[str, list[int], SamplingParams]]) -> dict[str, list[int]]:
    """Return each request's complete sequence: prompt and output."""
    outputs = generate(engine, requests).tokens
    return {request_id: prompt + outputs[request_id] for request_id, prompt, _ in requests}


@pytest.mark.parametrize("tokens_per_step", [7, 2048], ids=["chunked", "whole"])
@pytest.mark.parametrize("chunk_bytes", [4 * VOCAB_SIZE * 3, 2**26], ids=["three rows at a time", "all rows"])
def test_prompt_and_output_tokens_of_a_mixed_batch_are_scored(
    gemma: tuple[Path, torch.nn.Module], tokens_per_step: int, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_sampling, "_MAX_LOGITS_BYTES", chunk_bytes)
    path, model = gemma
    # The requests share prompts. A request that scores its prompt must not skip cached tokens.
    engine = build_engine(path, model=ALL, scheduler={"max_num_batched_tokens": tokens_per_step})
    wanted = {
        "neither": {},
        "chosen": {"logprobs": 0, "temperature": 1.5},
        "prompt": {"prompt_logprobs": 3},
        "both": {"logprobs": 4, "prompt_logprobs": 0},
        "ruled": {"logprobs": 5, "repetition_penalty": 3.0, "logit_bias": {9: 80.0}, "temperature": 0.8},
        "all": {"logprobs": -1, "prompt_logprobs": -1},
    }
    requests = [
        (f"{name}{i}", prompt, params(**values)) for name, values in wanted.items() for i, prompt in enumerate(PROMPTS)
    ]
    sequences = run(engine, requests)
    for request_id, prompt, given in requests:
        for count, first, end, reported in (
            (given.logprobs, len(prompt), None, Recorder.output),
            (given.prompt_logprobs, 1, len(prompt), Recorder.prompt),
        ):
            if count is None or (first == end):
                assert request_id not in reported
            else:
                count = VOCAB_SIZE if count < 0 else count
                check(model, sequences[request_id][:end], first, reported[request_id], count)


def test_logprobs_do_not_change_what_is_chosen(gemma: tuple[Path, torch.nn.Module]) -> None:
    values = {"temperature": 1.0, "top_p": 0.9, "presence_penalty": 1.0}
    engine = build_engine(gemma[0])
    without = run(engine, [("a", PROMPTS[2], params(**values))])["a"]
    assert run(engine, [("b", PROMPTS[2], params(**values, logprobs=3))])["b"] == without


def test_preempted_requests_are_scored_and_penalized_as_if_they_had_not_been(
    gemma: tuple[Path, torch.nn.Module],
) -> None:
    values = {"temperature": 1.0, "frequency_penalty": 1.0, "repetition_penalty": 1.2, "logprobs": 2, "max_tokens": 24}
    requests = [(f"r{i}", PROMPTS[2][: 6 + i], params(**values, bad_word_token_ids=((4,), (9, 4)))) for i in range(5)]
    alone = {r[0]: run(build_engine(gemma[0]), [r])[r[0]] for r in requests}
    Recorder.output.clear()
    engine = build_engine(gemma[0], cache={"num_blocks": 20})
    result = generate(engine, requests)
    assert result.stats.num_preemptions > 0
    for request_id, prompt, _ in requests:
        assert prompt + result.tokens[request_id] == alone[request_id]
        check(gemma[1], alone[request_id], len(prompt), Recorder.output[request_id], 2)


_SMALL = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
}
HEADS: dict[str, PretrainedConfig] = {
    # A head with scaled logits, a head with divided logits, and a model whose head does not call the base module.
    "cohere": CohereConfig(**_SMALL, intermediate_size=64, logit_scale=0.3),
    "granite": GraniteConfig(**_SMALL, intermediate_size=64, logits_scaling=8.0),
    "opt": OPTConfig(**_SMALL, ffn_dim=64, word_embed_proj_dim=48),
}


@pytest.mark.parametrize("name", [*ARCHITECTURES, *HEADS])
def test_the_head_alone_gives_the_models_logits(name: str) -> None:
    torch.manual_seed(0)
    config = HEADS.get(name) or tiny_config(name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    head = Head(model)
    with torch.inference_mode(), head.capture() as states:
        logits = model(input_ids=torch.arange(1, 10)[None], use_cache=False).logits[0]
    assert head.reproduces(states, logits) == (name != "opt")
    if name != "opt":
        rows = torch.tensor([6, 0, 3])
        torch.testing.assert_close(head.logits(states, rows), logits[rows], atol=1e-5, rtol=1e-5)
    assert not any(type(module).__name__ == "_Replay" for module in model.modules()), "the model is whole again"


def test_a_model_that_does_not_come_apart_is_scored_all_the_same(
    gemma: tuple[Path, torch.nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Head, "reproduces", lambda *args: False)
    path, model = gemma
    engine = build_engine(path, scheduler={"max_num_batched_tokens": 7})
    requests = [(f"r{i}", prompt, params(prompt_logprobs=2, logprobs=1)) for i, prompt in enumerate(PROMPTS)]
    sequences = run(engine, requests)
    for request_id, prompt, _ in requests[1:]:
        check(model, sequences[request_id][: len(prompt)], 1, Recorder.prompt[request_id], 2)
        check(model, sequences[request_id], len(prompt), Recorder.output[request_id], 1)


def test_scoring_a_prompt_never_makes_logits_of_more_rows_than_fit(
    gemma: tuple[Path, torch.nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_sampling, "_MAX_LOGITS_BYTES", 4 * VOCAB_SIZE * 5)
    model = load_model(ModelConfig(path=str(gemma[0])), torch.device("cpu"), lambda line: None)
    config = ForwardConfig(torch.device("cpu"), "reference", KernelsConfig(isa="off"), num_threads=1, block_size=16)
    forward = build_forward(model, config).forward
    rows = []
    handle = model.module.get_output_embeddings().register_forward_hook(
        lambda module, args, output: rows.append(output.shape[1])
    )
    targets = step_sampling.PromptTargets("a", np.arange(30), np.arange(30), 1)
    probe = Probe.largest(30, max_len=64, block_size=16)
    forward.bind(forward.memory.throwaway(16, probe.num_blocks))
    with torch.inference_mode():
        batch = ForwardBatch(np.arange(1, 31), probe.positions, [probe.metadata])
        step_sampling.score_prompts(forward, batch, np.array([29]), [targets])
    handle.remove()
    assert rows == [1, 5, 5, 5, 5, 5, 5]


GIVEN = (9, 3, 40)


def check_given(model: torch.nn.Module, tokens: list[int], first: int, logprobs: Logprobs) -> None:
    """Check that each position of ``logprobs`` has the token of ``tokens[first:]`` and the tokens ``GIVEN``."""
    with torch.inference_mode():
        exact = model(torch.tensor([tokens])).logits[0].float().log_softmax(dim=-1)
    assert len(logprobs) == len(tokens) - first
    for i, token_id in enumerate(tokens[first:]):
        start, end = logprobs.offsets[i : i + 2]
        assert logprobs.token_ids[start:end] == [token_id, *GIVEN]
        row = exact[first + i - 1]
        assert logprobs.logprobs[start:end] == pytest.approx(row[[token_id, *GIVEN]].tolist(), abs=1e-4)
        for token, rank in zip(logprobs.token_ids[start:end], logprobs.ranks[start:end], strict=True):
            assert int((row > row[token] + 1e-5).sum()) < rank <= int((row > row[token] - 1e-5).sum()) + 1


@pytest.mark.parametrize(
    "sections",
    [{}, {"speculative": {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}}],
    ids=["plain", "drafts"],
)
def test_given_tokens_are_scored_before_masks_beside_requests_that_score_the_likeliest(
    gemma: tuple[Path, torch.nn.Module], sections: dict[str, object]
) -> None:
    path, model = gemma
    wanted = {
        "given": {"logprob_token_ids": GIVEN},
        "masked": {"logprob_token_ids": GIVEN, "logprobs": 0, "allowed_token_ids": (7, 8), "max_tokens": 1},
        "ruled": {"logprob_token_ids": GIVEN, "logprobs": 3, "repetition_penalty": 3.0, "temperature": 0.8},
        "likeliest": {"logprobs": 2},
        "none": {},
    }
    prompt = PROMPTS[2] + PROMPTS[2][:9]
    sequences = run(build_engine(path, **sections), [(name, prompt, params(**each)) for name, each in wanted.items()])
    assert sequences["masked"][-1] in (7, 8)
    for name in ("given", "masked", "ruled"):
        check_given(model, sequences[name], len(prompt), Recorder.output[name])
    check(model, sequences["likeliest"], len(prompt), Recorder.output["likeliest"], 2)
    assert "none" not in Recorder.output


def test_given_tokens_of_a_resumed_request_are_scored_from_the_first_new_token(
    gemma: tuple[Path, torch.nn.Module],
) -> None:
    path, model = gemma
    whole = run(build_engine(path), [("r", PROMPTS[1], params(logprob_token_ids=GIVEN))])["r"]
    Recorder.output.clear()
    prior = whole[len(PROMPTS[1]) :][:2]
    moved = EngineCoreRequest(
        request_id="m",
        prompt_token_ids=PROMPTS[1],
        sampling_params=params(logprob_token_ids=GIVEN),
        prior_output_token_ids=prior,
        attempt=1,
    )
    assert prior + answer(build_engine(path), [moved]).tokens["m"] == whole[len(PROMPTS[1]) :]
    check_given(model, whole, len(PROMPTS[1]) + 2, Recorder.output["m"])


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"logprob_token_ids": (5, VOCAB_SIZE)}, rf"logprob_token_ids\[1\] is {VOCAB_SIZE}; token ids go from 0"),
        ({"logprob_token_ids": (5,) * 129}, "logprob_token_ids has 129 ids; the limit is 128"),
        ({"logprob_token_ids": (5, 6), "logprobs": 3}, "logprobs is 3, but logprob_token_ids has 2 ids"),
        ({"logprob_token_ids": (5, 6), "logprobs": -1}, "logprobs is -1, but logprob_token_ids has 2 ids"),
    ],
)
def test_given_tokens_out_of_range_are_refused(
    gemma: tuple[Path, torch.nn.Module], values: dict[str, object], error: str
) -> None:
    limits = RequestLimits(
        model=ModelInfo(max_len=64, vocab_size=VOCAB_SIZE, dtype="float32"), max_model_len=64, max_logprobs=0
    )
    with pytest.raises(InvalidArgument, match=error):
        check_sampling(params(**values), limits)
    check_sampling(params(logprob_token_ids=(5,) * 128), limits)
