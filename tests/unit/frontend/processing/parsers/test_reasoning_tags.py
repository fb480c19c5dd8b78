"""Information about a model's reasoning that the frontend sends to engines."""

from collections.abc import Iterator

import pytest
import structlog

from penstock_common.config.settings import Reread
from penstock_common.types.request import EngineCoreRequest, ReasoningTokens
from penstock_common.types.sampling import StructuredOutput
from penstock_frontend.call_types import GenerateRequest
from penstock_frontend.config import FairnessConfig, LimitsConfig
from penstock_frontend.processing.parsers.deepseek import DeepSeekR1ReasoningParser
from penstock_frontend.processing.parsers.reasoning_tags import Qwen3ReasoningParser, reasoning_of
from penstock_frontend.processing.prompts.input import InputProcessor
from penstock_frontend.processing.prompts.tokenizer import Tokenizer
from tests.fakes.models.small_tokenizers import byte_level

CONSTRAINED = {"structured_output": StructuredOutput(regex="a")}


@pytest.fixture
def tokenizer() -> Iterator[Tokenizer]:
    backend = byte_level()
    backend.add_tokens(["<think>", "</think>"])
    tokenizer = Tokenizer(backend)
    yield tokenizer
    tokenizer.close()


@pytest.fixture
def tokens(tokenizer: Tokenizer) -> ReasoningTokens:
    return ReasoningTokens(tokenizer.vocab_size - 2, tokenizer.vocab_size - 1)


@pytest.fixture
def inputs(tokenizer: Tokenizer) -> InputProcessor:
    reasoning = reasoning_of(Qwen3ReasoningParser, tokenizer)
    return InputProcessor(
        tokenizer,
        {},
        model_name="demo",
        limits=Reread(LimitsConfig()),
        fairness=Reread(FairnessConfig()),
        reasoning=reasoning,
    )


async def sent(inputs: InputProcessor, prompt: str | list[int], **sampling: object) -> EngineCoreRequest:
    return await inputs.process(GenerateRequest(prompt=prompt, sampling=sampling), "r")


@pytest.mark.parametrize(
    ("prompt", "ended"),
    [
        ("hi", None),
        ("<think>hm</think>hi", None),
        ("hi<think>", False),
        ("hi<think>\n \n", False),
        ("hi<think>\n\n</think>\n\n", True),
    ],
)
async def test_engines_are_told_whether_a_text_ends_the_reasoning(
    inputs: InputProcessor, tokens: ReasoningTokens, prompt: str, ended: bool | None
) -> None:
    request = await sent(inputs, prompt, **CONSTRAINED)
    assert (request.reasoning_parser_kwargs, request.reasoning_ended) == (tokens, ended)


async def test_of_token_ids_engines_see_themselves_whether_they_end_it(
    inputs: InputProcessor, tokens: ReasoningTokens
) -> None:
    request = await sent(inputs, [5, tokens.end_token_id], **CONSTRAINED)
    assert (request.reasoning_parser_kwargs, request.reasoning_ended) == (tokens, None)


async def test_engines_are_told_of_a_reasoning_that_has_a_budget(
    inputs: InputProcessor, tokens: ReasoningTokens
) -> None:
    request = await sent(inputs, "hi<think>", thinking_token_budget=3)
    assert (request.reasoning_parser_kwargs, request.reasoning_ended) == (tokens, False)
    assert (await sent(inputs, "hi", thinking_token_budget=3)).reasoning_ended is None


async def test_a_model_that_always_reasons_begins_with_the_answer_unless_a_constraint_may(tokenizer: Tokenizer) -> None:
    inputs = InputProcessor(
        tokenizer,
        {},
        model_name="demo",
        limits=Reread(LimitsConfig()),
        fairness=Reread(FairnessConfig()),
        reasoning=reasoning_of(DeepSeekR1ReasoningParser, tokenizer),
    )
    assert (await sent(inputs, "hi", thinking_token_budget=3)).reasoning_ended is False
    assert (await sent(inputs, "hi<think></think>", thinking_token_budget=3)).reasoning_ended is True
    assert (await sent(inputs, "hi", thinking_token_budget=3, **CONSTRAINED)).reasoning_ended is None


async def test_without_a_constraint_there_is_nothing_to_tell(inputs: InputProcessor) -> None:
    request = await sent(inputs, "hi<think>")
    assert (request.reasoning_parser_kwargs, request.reasoning_ended) == (None, None)


async def test_a_model_that_does_not_reason_is_constrained_at_once(tokenizer: Tokenizer) -> None:
    assert reasoning_of(None, tokenizer) is None
    inputs = InputProcessor(
        tokenizer, {}, model_name="demo", limits=Reread(LimitsConfig()), fairness=Reread(FairnessConfig())
    )
    request = await sent(inputs, "hi<think>", **CONSTRAINED)
    assert (request.reasoning_parser_kwargs, request.reasoning_ended) == (None, None)


def test_tags_that_are_no_tokens_are_told_in_the_log() -> None:
    tokenizer = Tokenizer(byte_level())
    with structlog.testing.capture_logs() as logs:
        assert reasoning_of(Qwen3ReasoningParser, tokenizer) is None
    tokenizer.close()
    assert [(log["log_level"], log["tags"]) for log in logs] == [("warning", ["<think>", "</think>"])]
