"""Mixed prompts: put together without rows for positions that have none, and within the engines' limits."""

import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest

from penstock_common.config.settings import Reread
from penstock_common.errors import InvalidArgument, Unimplemented
from penstock_common.types.prompt_embeds import PromptEmbeds
from penstock_common.types.request import EngineCoreRequest
from penstock_frontend.call_types import GenerateRequest, MixedPrompt, Part
from penstock_frontend.config import FairnessConfig, LimitsConfig
from penstock_frontend.interfaces import ModelLimits
from penstock_frontend.processing.prompts.input import InputProcessor
from penstock_frontend.processing.prompts.mixed_prompt import text_context
from penstock_frontend.processing.prompts.tokenizer import Tokenizer
from tests.fakes.models import small_tokenizers

LIMITS = ModelLimits(max_model_len=10_000, vocab_size=400, hidden_size=4)


@pytest.fixture
def inputs() -> Iterator[InputProcessor]:
    tokenizer = Tokenizer(small_tokenizers.byte_level())
    yield InputProcessor(
        tokenizer,
        {},
        model_name="demo",
        limits=Reread(LimitsConfig(max_prompt_length=20_000)),
        fairness=Reread(FairnessConfig()),
    )
    tokenizer.close()


def vectors(count: int, hidden_size: int = 4) -> PromptEmbeds:
    data = bytes([count]) * (count * hidden_size * 2)
    return PromptEmbeds(dtype="float16", num_tokens=count, hidden_size=hidden_size, data=data)


async def process(
    inputs: InputProcessor, *parts: Part, limits: ModelLimits | None = LIMITS, **sampling: Any
) -> EngineCoreRequest:
    fields = tuple(f"mixed.parts[{i}]" for i in range(len(parts)))
    return await inputs.process(GenerateRequest(prompt=MixedPrompt(parts, fields), sampling=sampling), "r", limits)


async def refusal(inputs: InputProcessor, *parts: Part, limits: ModelLimits | None = LIMITS) -> InvalidArgument:
    with pytest.raises(InvalidArgument) as error:
        await process(inputs, *parts, limits=limits)
    return error.value


async def test_a_long_vector_is_no_reason_to_allocate_one_for_each_token(inputs: InputProcessor) -> None:
    vector, token_ids = vectors(1, hidden_size=25_000), [7] * 3000
    tracemalloc.start()
    request = await process(inputs, vector, token_ids, limits=None)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2_000_000  # 3001 rows have 150 MB
    assert request.prompt_embeds is not None
    assert request.prompt_embeds.num_tokens == 3001
    assert request.prompt_embeds.data == vector.data


async def test_vectors_of_another_length_than_the_models_are_refused(inputs: InputProcessor) -> None:
    error = await refusal(inputs, [7], vectors(1, hidden_size=5))
    assert error.field == "mixed.parts[1]"
    assert error.message == "mixed.parts[1] has embeddings of size 5; the model's hidden size is 4"


async def test_vectors_are_refused_where_no_engine_takes_them(inputs: InputProcessor) -> None:
    with pytest.raises(Unimplemented, match=r"mixed.parts\[0\] has embeddings"):
        await process(inputs, vectors(1), limits=LIMITS._replace(hidden_size=0))


async def test_too_many_positions_are_refused_before_the_prompt_is_assembled(inputs: InputProcessor) -> None:
    error = await refusal(inputs, vectors(6), [7] * 9995)
    assert (error.field, error.reason) == ("prompt", "PROMPT_TOO_LONG")
    assert error.message == "prompt has 10001 tokens and vectors up to mixed.parts[1]; max_model_len is 10000"


async def test_positions_are_bounded_while_no_engine_says_its_limit(inputs: InputProcessor) -> None:
    error = await refusal(inputs, [7] * 15_000, [7] * 15_000, limits=None)
    assert "limits.max_prompt_length is 20000" in error.message


async def test_a_text_far_too_long_for_the_model_is_not_tokenized(inputs: InputProcessor) -> None:
    error = await refusal(inputs, "a" * 641, vectors(1), limits=LIMITS._replace(max_model_len=10))
    assert error.field == "mixed.parts[0]"
    assert "641 characters" in error.message


async def test_truncating_keeps_the_vectors_of_the_positions_that_are_left(inputs: InputProcessor) -> None:
    request = await process(inputs, vectors(3), [7, 8], vectors(2), truncate_prompt_tokens=5)
    embeds = request.prompt_embeds
    assert embeds is not None
    assert request.prompt_token_ids == [0, 7, 8, 0, 0]
    assert embeds.is_token == bytes([0, 1, 1, 0, 0])
    assert embeds.data == vectors(3).data[:8] + vectors(2).data


async def test_truncating_away_all_vectors_leaves_a_prompt_of_tokens(inputs: InputProcessor) -> None:
    request = await process(inputs, vectors(3), [7, 8], truncate_prompt_tokens=2)
    assert request.prompt_embeds is None
    assert request.prompt_token_ids == [7, 8]


async def test_output_is_decoded_behind_the_last_vector(inputs: InputProcessor) -> None:
    request = await process(inputs, [5], vectors(3), [7, 8])
    assert text_context(request.prompt_token_ids, request.prompt_embeds) == [7, 8]
    assert text_context([0, 0], vectors(2)) == []
