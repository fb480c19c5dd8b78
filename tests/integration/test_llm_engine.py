"""The engine classes of the Python API, and beam search, with the demo model."""

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock_common.errors import InvalidArgument, Unavailable
from penstock_local import LLM, AsyncLLMEngine, BeamSearchParams, FinishReason, LLMEngine, OutputKind, RequestOutput

DEMO = Path(__file__).resolve().parents[2] / "examples/demo_model/penstock-tiny"
OPTIONS: dict[str, Any] = {"device": "cpu", "num_threads": 1, "kv_cache_memory": "32MiB", "max_num_seqs": 16}
GREEDY = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
LONG = {"max_tokens": 2000, "ignore_eos": True}


@pytest.fixture(scope="module")
def expected() -> str:
    with LLM(str(DEMO), **OPTIONS) as llm:
        return llm.generate("Once upon", GREEDY)[0].text


@pytest.fixture(scope="module")
def engine() -> Iterator[LLMEngine]:
    with LLMEngine(str(DEMO), **OPTIONS) as engine:
        yield engine


def drive(engine: LLMEngine) -> dict[str, list[RequestOutput]]:
    told: dict[str, list[RequestOutput]] = {}
    while engine.has_unfinished_requests():
        outputs = engine.step()
        assert len({output.request_id for output in outputs}) == len(outputs)
        for output in outputs:
            told.setdefault(output.request_id, []).append(output)
    return told


def test_steps_tell_all_of_an_output_or_what_is_new_or_its_end(engine: LLMEngine, expected: str) -> None:
    for kind in OutputKind:
        engine.add_request(kind.name, "Once upon", GREEDY, output_kind=kind)
    told = drive(engine)
    texts = [output.text for output in told["CUMULATIVE"]]
    assert all(after.startswith(before) for before, after in itertools.pairwise(texts))
    assert texts[-1] == "".join(output.text for output in told["DELTA"]) == told["FINAL"][0].text == expected
    assert len(told["FINAL"]) == 1
    for outputs in told.values():
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        assert outputs[-1].outputs[0].finish_reason is FinishReason.LENGTH
    assert engine.step() == []


def test_all_sequences_of_a_prompt_are_told_of_together(engine: LLMEngine) -> None:
    engine.add_request("a", "Once", {"n": 3, "max_tokens": 4, "seed": 1, "ignore_eos": True})
    last = drive(engine)["a"][-1]
    assert [output.index for output in last.outputs] == [0, 1, 2]
    assert all(len(output.token_ids) == 4 for output in last.outputs)


def test_nothing_comes_of_an_aborted_request(engine: LLMEngine, expected: str) -> None:
    engine.add_request("long", "a", LONG)
    assert [output.request_id for output in engine.step()] == ["long"]
    engine.add_request("short", "Once upon", GREEDY)
    engine.abort(["long", "unknown"])
    told = drive(engine)
    assert set(told) == {"short"}
    assert told["short"][-1].text == expected


def test_wrong_requests_are_refused_and_failures_are_outputs(engine: LLMEngine) -> None:
    engine.add_request("a", "a", GREEDY)
    with pytest.raises(InvalidArgument, match="request_id is 'a', which a running request"):
        engine.add_request("a", "a", GREEDY)
    with pytest.raises(InvalidArgument, match="text is empty"):
        engine.add_request("b", "", GREEDY)
    engine.add_request("c", "a", {"structured_output": {"regex": "("}})
    told = drive(engine)
    assert told["a"][-1].error is None
    assert told["c"][0].error is not None
    assert "regex" in told["c"][0].error.message


def test_a_closed_engine_has_nothing_left() -> None:
    engine = LLMEngine(str(DEMO), **OPTIONS)
    engine.add_request("a", "a", LONG)
    assert engine.step()
    engine.close()
    assert not engine.has_unfinished_requests()
    with pytest.raises(Unavailable, match="this LLMEngine is closed"):
        engine.add_request("b", "b")


@pytest.mark.asyncio
async def test_an_event_loop_gets_outputs_ends_them_and_gives_them_up(expected: str) -> None:
    async with AsyncLLMEngine(str(DEMO), **OPTIONS) as engine:

        async def last(prompt: str) -> str:
            return [output async for output in engine.generate(prompt, GREEDY)][-1].text

        assert await asyncio.gather(*(last("Once upon") for _ in range(4))) == [expected] * 4
        deltas = [output.text async for output in engine.generate("Once upon", GREEDY, output_kind=OutputKind.DELTA)]
        assert "".join(deltas) == expected

        running = engine.generate("a", LONG, "mine")
        await anext(running)
        with pytest.raises(InvalidArgument, match="request_id is 'mine', which a running request"):
            await anext(engine.generate("a", LONG, "mine"))
        engine.abort("mine")
        outputs = [output async for output in running]
        assert (outputs[-1].finished, outputs[-1].outputs[0].finish_reason) == (True, FinishReason.ABORT)

        given_up = engine.generate("a", LONG, "mine")
        await anext(given_up)
        await given_up.aclose()
        assert await last("Once upon") == expected
    with pytest.raises(Unavailable, match="this AsyncLLMEngine is closed"):
        await anext(engine.generate("a"))


@pytest.mark.parametrize(("ignore_eos", "penalty"), [(True, 1.0), (False, 0.6)])
def test_beams_are_those_of_a_search_over_the_models_own_probabilities(ignore_eos: bool, penalty: float) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=10, ignore_eos=ignore_eos, length_penalty=penalty)
    prompt = "<|user|>What is 2 + 2?<|end|><|assistant|>"
    with LLM(str(DEMO), dtype="float32", **OPTIONS) as llm:
        (found,) = llm.beam_search(prompt, params)
        with pytest.raises(InvalidArgument, match="beam_width is 0; it must be at least 1"):
            BeamSearchParams(beam_width=0, max_tokens=1)
    expected = searched(list(found.prompt_token_ids), params)
    assert [tuple(beam.token_ids) for beam in found.beams] == [token_ids for token_ids, _ in expected]
    assert [beam.score for beam in found.beams] == pytest.approx([score for _, score in expected], abs=1e-4)
    if not ignore_eos:
        assert found.beams[0].finish_reason is FinishReason.STOP
        assert "<|end|>" not in found.beams[0].text


def searched(prompt: list[int], params: BeamSearchParams) -> list[tuple[tuple[int, ...], float]]:
    """Return token ids and scores of the best beams, computed from transformers' probabilities of all tokens."""
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    given = model.generation_config.eos_token_id
    ends = set() if params.ignore_eos else set(given if isinstance(given, list) else [given])
    beams: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    ended: list[tuple[tuple[int, ...], float]] = []
    for _ in range(params.max_tokens):
        candidates = []
        for token_ids, total in beams:
            with torch.no_grad():
                logprobs = model(torch.tensor([[*prompt, *token_ids]])).logits[0, -1].log_softmax(-1)
            best = logprobs.topk(2 * params.beam_width)
            candidates += [
                ((*token_ids, token), total + logprob)
                for token, logprob in zip(best.indices.tolist(), best.values.tolist(), strict=True)
            ]
        candidates.sort(key=lambda each: -each[1])
        ended += [each for each in candidates if each[0][-1] in ends]
        beams = [each for each in candidates if each[0][-1] not in ends][: params.beam_width]
    scored = [(token_ids, total / len(token_ids) ** params.length_penalty) for token_ids, total in [*ended, *beams]]
    return sorted(scored, key=lambda each: -each[1])[: params.beam_width]
