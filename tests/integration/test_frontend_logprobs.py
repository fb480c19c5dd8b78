"""Log-probabilities through a real frontend: the engine's numbers, and the text of each token."""

from typing import Any

import pytest

from penstock.common.v1 import logprobs_pb2, sampling_pb2
from penstock.inference.v1 import messages_pb2 as pb
from tests.fakes.engines.fake_engine import FakeEngine, logprobs_of
from tests.fakes.frontends.frontend_server import FrontendServer
from tests.fakes.models.small_tokenizers import byte_level, ids_of

TOKENIZER = byte_level()
DELTA, CUMULATIVE, FINAL = (
    sampling_pb2.OUTPUT_KIND_DELTA,
    sampling_pb2.OUTPUT_KIND_CUMULATIVE,
    sampling_pb2.OUTPUT_KIND_FINAL,
)


def without_texts(logprobs: logprobs_pb2.Logprobs) -> logprobs_pb2.Logprobs:
    copy = logprobs_pb2.Logprobs()
    copy.CopyFrom(logprobs)
    copy.ClearField("tokens")
    return copy


@pytest.mark.parametrize("kind", [DELTA, CUMULATIVE, FINAL])
@pytest.mark.parametrize("stop", [(), ("\ufffd",), ("e", "th")])
async def test_every_message_has_the_log_probabilities_of_its_tokens(
    frontend: FrontendServer, kind: Any, stop: tuple[str, ...]
) -> None:
    outputs = await frontend.outputs(n=3, seed=3, max_tokens=40, logprobs=2, stop=stop, output_kind=kind)
    assert any(output.token_ids for output in outputs)
    for output in outputs:
        if output.token_ids:
            assert without_texts(output.logprobs) == logprobs_of(output.token_ids, 2)
            assert len(output.logprobs.tokens) == len(output.logprobs.token_ids)
        else:
            assert not output.HasField("logprobs")


async def test_entries_have_their_text(frontend: FrontendServer, engine: FakeEngine) -> None:
    engine.script = lambda _: ids_of("the fox")
    outputs = await frontend.outputs(logprobs=0, output_kind=FINAL)
    assert "".join(outputs[0].logprobs.tokens) == outputs[0].text == "the fox"


async def test_prompt_log_probabilities_come_once_in_the_first_sequences_first_message(
    frontend: FrontendServer,
) -> None:
    prompt = [5, 6, 7]
    outputs = await frontend.outputs(token_ids=pb.TokenIds(ids=prompt), n=2, max_tokens=4, prompt_logprobs=1)
    [first] = [output for output in outputs if output.HasField("prompt_logprobs")]
    assert first == next(output for output in outputs if output.index == 0)
    assert without_texts(first.prompt_logprobs) == logprobs_of(prompt[1:], 1)
    assert len(first.prompt_logprobs.tokens) == 4


async def test_log_probabilities_come_only_when_asked_for(frontend: FrontendServer) -> None:
    for output in await frontend.outputs(max_tokens=3):
        assert not output.HasField("logprobs")
        assert not output.HasField("prompt_logprobs")


async def test_without_detokenization_there_are_no_texts(frontend: FrontendServer) -> None:
    [output] = await frontend.outputs(max_tokens=3, logprobs=1, prompt_logprobs=0, detokenize=False, output_kind=FINAL)
    assert len(output.logprobs.token_ids) == 6
    assert not output.logprobs.tokens
    assert not output.prompt_logprobs.tokens
