"""Input processing: tokenization, truncation, and the limits of the engines."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from tokenizers import normalizers

from penstock_common.config.settings import Reread
from penstock_common.errors import InvalidArgument, NotFound
from penstock_common.types.request import EngineCoreRequest, RequestContext
from penstock_frontend.call_types import GenerateRequest, MixedPrompt
from penstock_frontend.call_warnings import WarningLog
from penstock_frontend.config import FairnessConfig, LimitsConfig
from penstock_frontend.interfaces import ModelLimits
from penstock_frontend.processing.prompts.input import InputProcessor
from penstock_frontend.processing.prompts.tokenizer import Encoded, Tokenizer
from tests.fakes.models import small_tokenizers
from tests.fakes.patience import PATIENCE

LIMITS = ModelLimits(max_model_len=10, vocab_size=400)


@pytest.fixture
def tokenizer() -> Iterator[Tokenizer]:
    tokenizer = Tokenizer(small_tokenizers.byte_level())
    yield tokenizer
    tokenizer.close()


@pytest.fixture
def inputs(tokenizer: Tokenizer) -> InputProcessor:
    return InputProcessor(
        tokenizer,
        {},
        model_name="demo",
        limits=Reread(LimitsConfig(max_prompt_length=50)),
        fairness=Reread(FairnessConfig()),
    )


async def process(inputs: InputProcessor, **fields: Any) -> EngineCoreRequest:
    """Process a request. ``fields`` are those of the request and of its context."""
    context = {name: fields.pop(name) for name in RequestContext.__struct_fields__ if name in fields}
    request = GenerateRequest(**fields, context=RequestContext(**context))
    return await inputs.process(request, inputs.request_id(request.context.external_request_id))


async def test_text_is_tokenized_with_the_special_tokens_of_the_tokenizer(
    inputs: InputProcessor, tokenizer: Tokenizer
) -> None:
    with_bos = await process(inputs, prompt="hello")
    without = await process(inputs, prompt="hello", add_special_tokens=False)
    assert with_bos.prompt_token_ids == [0, *without.prompt_token_ids]
    assert tokenizer.decode(without.prompt_token_ids) == "hello"


async def test_token_ids_are_used_as_they_are(inputs: InputProcessor) -> None:
    assert (await process(inputs, prompt=(7, 8, 9))).prompt_token_ids == [7, 8, 9]


@pytest.mark.parametrize("prompt", ["<s>hello", MixedPrompt(("<s>hello", " you"), ("mixed.parts[0].text", ""))])
async def test_a_prompt_that_gets_two_bos_tokens_is_warned_of(inputs: InputProcessor, prompt: Any) -> None:
    warnings = WarningLog().begin("client")
    assert (await process(inputs, prompt=prompt)).prompt_token_ids[:2] == [0, 0]
    field = "prompt" if isinstance(prompt, str) else "mixed.parts[0].text"
    assert warnings.headers["penstock-warning"] == (
        f"double_bos: {field} begins with '<s>', and the tokenizer adds another one: leave it out, or set add_special_tokens "
        "to false"
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "hello"},
        {"prompt": "hello <s>"},
        {"prompt": "<s>hello", "add_special_tokens": False},
        {"prompt": "<s><s>hello", "add_special_tokens": False},
        {"prompt": (0, 0, 5)},
    ],
)
async def test_other_prompts_are_not_warned_of(inputs: InputProcessor, fields: dict[str, Any]) -> None:
    warnings = WarningLog().begin("client")
    await process(inputs, **fields)
    assert warnings.headers == {}


async def test_truncation_keeps_the_last_tokens(inputs: InputProcessor) -> None:
    request = await process(inputs, prompt=(7, 8, 9), sampling={"truncate_prompt_tokens": 2})
    assert request.prompt_token_ids == [8, 9]


async def test_ids_towards_the_engine_are_unique_even_for_the_same_request_id(inputs: InputProcessor) -> None:
    requests = [await process(inputs, prompt=(1,), external_request_id="r") for _ in range(3)]
    assert len({r.request_id for r in requests}) == 3
    assert {r.context.external_request_id for r in requests} == {"r"}


def test_a_request_without_an_id_gets_a_random_one(inputs: InputProcessor) -> None:
    assert len({inputs.request_id("") for _ in range(10)}) == 10


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({"prompt": ""}, "text", "text is empty"),
        ({"prompt": ()}, "token_ids.ids", "is empty"),
        ({"prompt": "x" * 51}, "text", "51 characters; limits.max_prompt_length is 50"),
        ({"prompt": (1,) * 51}, "token_ids.ids", "51 ids; limits.max_prompt_length is 50"),
        ({"prompt": "x", "cache_salt": "s" * 257}, "cache_salt", "257 bytes; limits.max_cache_salt_bytes is 256"),
        (
            {"prompt": "x", "external_request_id": "é" * 129},
            "request_id",
            "258 bytes; limits.max_request_id_bytes is 256",
        ),
    ],
)
async def test_what_cannot_be_served_is_refused_before_an_engine_is_needed(
    inputs: InputProcessor, fields: dict[str, Any], field: str, message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message) as e:
        await process(inputs, **fields)
    assert e.value.field == field


async def test_an_unknown_model_is_refused_with_the_known_ones(inputs: InputProcessor) -> None:
    with pytest.raises(NotFound, match="model is 'demmo'; known: demo"):
        await process(inputs, prompt="x", model="demmo")


@pytest.mark.parametrize(
    ("prompt", "params", "field", "message"),
    [
        ((1,) * 12, {}, "prompt", "prompt is 12 tokens; max_model_len is 10"),
        ((1,) * 10, {}, "prompt", "leaves no room for output"),
        ((1, 400), {}, "token_ids.ids", r"token_ids.ids\[1\] is 400; it must be below the vocabulary size, 400"),
        ((1,) * 8, {"min_tokens": 3}, "sampling_params.min_tokens", "leaves room for 2"),
        ((1,), {"stop_token_ids": (400,)}, "sampling_params.stop_token_ids[0]", "is 400"),
    ],
)
async def test_what_the_engines_cannot_take_is_refused(
    inputs: InputProcessor, prompt: tuple[int, ...], params: dict[str, Any], field: str, message: str
) -> None:
    request = await process(inputs, prompt=prompt, sampling=params)
    with pytest.raises(InvalidArgument, match=message) as e:
        inputs.check(request, LIMITS)
    assert e.value.field == field


async def test_the_longest_prompt_that_leaves_room_for_a_token_is_taken(inputs: InputProcessor) -> None:
    inputs.check(await process(inputs, prompt=(1,) * 9), LIMITS)


async def test_bad_words_are_tokenized_alone_and_behind_a_space(inputs: InputProcessor, tokenizer: Tokenizer) -> None:
    request = await process(inputs, prompt="x", sampling={"bad_words": ("fox", "fox", "dog")})
    params = request.sampling_params
    assert params.bad_words == ("fox", "fox", "dog")
    texts = [tokenizer.decode(token_ids) for token_ids in params.bad_word_token_ids]
    assert texts == ["fox", " fox", "dog", " dog"]


async def test_bad_words_come_behind_the_sequences_that_were_given(inputs: InputProcessor) -> None:
    request = await process(inputs, prompt="x", sampling={"bad_words": ("a",), "bad_word_token_ids": ((7, 8),)})
    assert request.sampling_params.bad_word_token_ids[0] == (7, 8)
    assert len(request.sampling_params.bad_word_token_ids) == 3


async def test_a_bad_word_without_tokens_is_refused() -> None:
    backend = small_tokenizers.byte_level()
    backend.normalizer = normalizers.Strip()
    tokenizer = Tokenizer(backend)
    inputs = InputProcessor(
        tokenizer, {}, model_name="demo", limits=Reread(LimitsConfig()), fairness=Reread(FairnessConfig())
    )
    with pytest.raises(InvalidArgument, match="bad_words\\[1\\] is ' ', which has no tokens") as e:
        await process(inputs, prompt="x", sampling={"bad_words": ("a", " ")})
    tokenizer.close()
    assert e.value.field == "sampling_params.bad_words[1]"


@pytest.mark.parametrize("params", [{}, {"truncate_prompt_tokens": 3}])
async def test_a_text_far_beyond_the_engines_limit_is_refused_unread(
    tokenizer: Tokenizer, params: dict[str, Any]
) -> None:
    inputs = InputProcessor(
        tokenizer, {}, model_name="demo", limits=Reread(LimitsConfig()), fairness=Reread(FairnessConfig())
    )
    request = GenerateRequest(prompt="x" * 641, sampling=params)
    with pytest.raises(InvalidArgument, match="text has 641 characters; for max_model_len 10") as e:
        await inputs.process(request, "r", LIMITS)
    assert (e.value.field, e.value.reason) == ("text", "PROMPT_TOO_LONG")
    assert await inputs.process(GenerateRequest(prompt="x" * 640), "r", LIMITS)


async def test_token_ids_beyond_the_engines_limit_are_refused_unless_they_are_cut(inputs: InputProcessor) -> None:
    with pytest.raises(InvalidArgument, match="prompt is 11 tokens; max_model_len is 10"):
        await inputs.process(GenerateRequest(prompt=(1,) * 11), "r", LIMITS)
    cut = GenerateRequest(prompt=(1,) * 11, sampling={"truncate_prompt_tokens": 3})
    assert len((await inputs.process(cut, "r", LIMITS)).prompt_token_ids) == 3


async def test_a_long_text_does_not_keep_short_ones_waiting(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = threading.Event()
    encode = tokenizer._encode

    def slow_when_long(text: str, *options: bool) -> Encoded:
        if len(text) > 100_000:
            assert held.wait(20)
        return encode(text, *options)

    monkeypatch.setattr(tokenizer, "_encode", slow_when_long)
    long = [asyncio.create_task(tokenizer.encode("a" * 100_001)) for _ in range(3)]
    short = await asyncio.wait_for(tokenizer.encode("a"), PATIENCE)
    assert short.ids
    assert not any(task.done() for task in long)
    held.set()
    await asyncio.gather(*long)


async def test_tokens_are_written_as_the_vocabulary_has_them_where_they_are_asked_for(tokenizer: Tokenizer) -> None:
    plain, shown = await tokenizer.encode("hi you"), await tokenizer.encode("hi you", with_tokens=True)
    assert plain.ids == shown.ids
    assert plain.tokens == ()
    assert list(shown.tokens) == tokenizer._backend.encode("hi you").tokens


def test_an_endless_model_name_is_not_compared_with_the_known_ones(inputs: InputProcessor) -> None:
    with pytest.raises(NotFound) as e:
        inputs.check_model("demo" * 100)
    assert "did you mean" not in e.value.message
