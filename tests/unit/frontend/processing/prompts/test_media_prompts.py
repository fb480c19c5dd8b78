"""Prompts with media have the tokens of transformers' own processor, and one item for each part."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from PIL import Image
from transformers import AutoProcessor

from penstock_common.config.settings import Reread
from penstock_common.errors import InvalidArgument, RequestFailed, Unimplemented
from penstock_common.types.media import MediaLimits
from penstock_common.types.prompt_embeds import PromptEmbeds
from penstock_common.types.request import EngineCoreRequest, PoolingParams, PoolingTask, RequestContext
from penstock_frontend.call_types import GenerateRequest, MixedPrompt, Part, PoolingRequest
from penstock_frontend.config import FairnessConfig, LimitsConfig, ModelConfig
from penstock_frontend.interfaces import ModelLimits
from penstock_frontend.processing.media.families.checkpoint import load_family
from penstock_frontend.processing.outputs.collector import OutputCollector
from penstock_frontend.processing.outputs.processor import RequestState
from penstock_frontend.processing.prompts import sampling_params
from penstock_frontend.processing.prompts.input import InputProcessor
from penstock_frontend.processing.prompts.named_prompts import NamedPrompts
from penstock_frontend.processing.prompts.pooling import PoolingInputs
from penstock_frontend.processing.prompts.tokenizer import Tokenizer, load_model_files
from tests.fakes.multimodal_models import make_image, save_multimodal_model
from tests.fakes.prepared_media import InProcessPreparer, image_part, part_of

TAKEN = (MediaLimits(modality="image", max_items=16, max_tokens=200),)
LIMITS = ModelLimits(max_model_len=200, vocab_size=512, media=TAKEN)
EMBED = PoolingParams(task=PoolingTask.EMBED)
NO_CONTEXT = RequestContext()
ROWS = 16
"""Number of tokens of an image for this LLaVA."""


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "llava"
    save_multimodal_model("llava", folder)
    return folder


@pytest.fixture
def tokenizer(llava: Path) -> Iterator[Tokenizer]:
    tokenizer = load_model_files(ModelConfig(path=str(llava)), num_threads=1).tokenizer
    yield tokenizer
    tokenizer.close()


@pytest.fixture
def preparer(llava: Path, tokenizer: Tokenizer) -> InProcessPreparer:
    family = load_family(llava, tokenizer.literal)
    assert family is not None
    return InProcessPreparer(family)


@pytest.fixture
def inputs(tokenizer: Tokenizer, preparer: InProcessPreparer) -> InputProcessor:
    return _inputs(tokenizer, media=preparer)


def _inputs(tokenizer: Tokenizer, **more: Any) -> InputProcessor:
    return InputProcessor(
        tokenizer, {}, model_name="demo", limits=Reread(LimitsConfig()), fairness=Reread(FairnessConfig()), **more
    )


async def process(
    inputs: InputProcessor, *parts: Part, context: RequestContext = NO_CONTEXT, **sampling: Any
) -> EngineCoreRequest:
    fields = tuple(f"mixed.parts[{i}]" for i in range(len(parts)))
    request = GenerateRequest(prompt=MixedPrompt(parts, fields), sampling=sampling, context=context)
    return await inputs.process(request, "r", LIMITS)


async def refusal(inputs: InputProcessor, *parts: Part, **sampling: Any) -> RequestFailed:
    with pytest.raises((InvalidArgument, Unimplemented)) as error:
        inputs.check(await process(inputs, *parts, **sampling), LIMITS)
    return error.value


def theirs(llava: Path, text: str, images: list[Image.Image]) -> list[int]:
    load: Any = AutoProcessor.from_pretrained
    processor = load(llava, backend="pil")
    return [int(i) for i in processor(text=text, images=images)["input_ids"][0]]


async def test_text_and_images_are_tokenized_as_transformers_does(inputs: InputProcessor, llava: Path) -> None:
    images = [make_image(50, 40, 1), make_image(31, 77, 2)]
    request = await process(inputs, "What is ", image_part(images[0]), " and", image_part(images[1]), "?\n")
    assert request.prompt_token_ids == theirs(llava, "What is <image> and<image>?\n", images)
    first, second = request.mm_features
    places = [i for i, token in enumerate(request.prompt_token_ids) if token == request.prompt_token_ids[first.offset]]
    assert places == [*range(first.offset, first.end), *range(second.offset, second.end)]
    assert (first.num_embeds, second.num_embeds) == (ROWS, ROWS)
    assert first.data["pixel_values"].dtype == "uint8"
    assert first.identifier != second.identifier


async def test_the_placeholders_characters_in_a_clients_text_are_text(
    inputs: InputProcessor, tokenizer: Tokenizer
) -> None:
    image = tokenizer.token_id("<image>")
    request = await process(inputs, "say <image>, ", image_part(make_image(8, 8)), "<image>")
    assert [i for i, token in enumerate(request.prompt_token_ids) if token == image] == [
        *range(request.mm_features[0].offset, request.mm_features[0].end)
    ]
    text = tokenizer.decode([token for token in request.prompt_token_ids if token != image])
    assert text == "<s>say <image>, <image>"
    alone = await inputs.process(GenerateRequest(prompt="say <image>"), "r", LIMITS)
    assert image not in alone.prompt_token_ids
    assert not alone.mm_features


async def test_other_special_tokens_in_a_text_are_found_as_ever(inputs: InputProcessor, tokenizer: Tokenizer) -> None:
    request = await process(inputs, "<|im_start|>", image_part(make_image(8, 8)))
    assert request.prompt_token_ids[1] == tokenizer.token_id("<|im_start|>")


async def test_token_ids_stand_beside_media_and_nothing_is_put_before_a_medium_alone(inputs: InputProcessor) -> None:
    part = image_part(make_image(20, 20))
    request = await process(inputs, [5, 6], part, [7], part)
    assert request.prompt_token_ids[:2] == [5, 6]
    assert [(f.offset, f.length) for f in request.mm_features] == [(2, ROWS), (ROWS + 3, ROWS)]
    assert request.mm_features[0].identifier == request.mm_features[1].identifier
    alone = await process(inputs, part)
    assert len(alone.prompt_token_ids) == ROWS


async def test_sequences_of_a_request_share_its_features(inputs: InputProcessor) -> None:
    request = await process(inputs, "a", image_part(make_image(8, 8)), n=3)
    sequences = sampling_params.sequences(request)
    assert len({id(each.mm_features[0]) for each in sequences}) == 1


async def test_salt_deadline_and_tenant_go_to_who_prepares_media(
    inputs: InputProcessor, preparer: InProcessPreparer
) -> None:
    context = RequestContext(cache_salt="s", deadline=9e9, tenant="t")
    await process(inputs, image_part(make_image(8, 8)), context=context)
    assert preparer.asked == [("s", 9e9, "t")]


async def test_features_unsupported_with_media_are_refused_by_name(inputs: InputProcessor) -> None:
    part = image_part(make_image(8, 8), "mixed.parts[1].media")
    for name in ("prompt_logprobs", "truncate_prompt_tokens"):
        error = await refusal(inputs, "a", part, **{name: 3})
        assert isinstance(error, Unimplemented)
        assert f"sampling_params.{name}" in error.message
        assert "mixed.parts[1].media" in error.message
    vectors = PromptEmbeds(dtype="float16", num_tokens=1, hidden_size=4, data=bytes(8))
    assert "has embeddings and mixed.parts[1].media is media" in (await refusal(inputs, part, vectors)).message


async def test_a_modality_that_the_model_does_not_take_is_refused(inputs: InputProcessor, tokenizer: Tokenizer) -> None:
    error = await refusal(inputs, "a", part_of("audio", field="mixed.parts[1].media"))
    assert error.message == "mixed.parts[1].media is a sound; this model accepts text, image"
    text_only = _inputs(tokenizer)
    assert (await refusal(text_only, part_of("image"))).message == "media is an image; this model accepts text"


async def test_a_multimodal_model_without_media_says_why(tokenizer: Tokenizer) -> None:
    inputs = _inputs(tokenizer, no_media="media are disabled (media.enabled is false)")
    error = await refusal(inputs, part_of("image"))
    assert (
        error.message == "media is an image; this server accepts only text: media are disabled (media.enabled is false)"
    )


async def test_media_that_no_engine_takes_are_refused(inputs: InputProcessor) -> None:
    prompt = MixedPrompt((part_of("image"),), ("media",))
    request = GenerateRequest(prompt=prompt, sampling={}, context=NO_CONTEXT)
    with pytest.raises(
        InvalidArgument,
        match="media is an image; the engines do not accept media of this modality, because .* is false",
    ):
        await inputs.process(request, "r", LIMITS._replace(media=()))


async def test_a_prompt_that_is_too_long_says_how_much_of_it_is_media(inputs: InputProcessor) -> None:
    many: list[Part] = ["a", image_part(make_image(8, 8))] * 12
    error = await refusal(inputs, *many)
    assert error.reason == "PROMPT_TOO_LONG"
    assert "192 of them media" in error.message
    error = await refusal(inputs, [5] * (LIMITS.max_model_len - ROWS), image_part(make_image(8, 8)))
    assert error.message == "prompt is 200 tokens, 16 of them media; max_model_len is 200 and leaves no room for output"


async def test_usage_tells_how_many_tokens_are_media(inputs: InputProcessor, tokenizer: Tokenizer) -> None:
    request = await process(inputs, "a", image_part(make_image(8, 8)), image_part(make_image(8, 9)))
    collector = OutputCollector(request.sampling_params.output_kind, 1, 1)
    usage = RequestState(request, tokenizer, collector).usage()
    assert usage.media_tokens == {"image": 2 * ROWS}
    assert usage.prompt_tokens == len(request.prompt_token_ids)


async def test_an_input_to_embed_may_have_media(inputs: InputProcessor, tokenizer: Tokenizer) -> None:
    pooling = PoolingInputs(tokenizer, inputs, Reread(LimitsConfig()), NamedPrompts())
    image = image_part(make_image(30, 30), "inputs[1].mixed.parts[1].media")
    mixed = MixedPrompt(("what", image), ("inputs[1].mixed.parts[0].text", image.field))
    request = PoolingRequest(
        inputs=["hello", mixed, [5, 6]], fields=["inputs[0].text", "inputs[1].mixed", "inputs[2]"], params=EMBED
    )
    text, with_image, ids = await pooling.process(request, "r", LIMITS)
    assert with_image.prompt_token_ids == (await process(inputs, "what", image)).prompt_token_ids
    assert [feature.length for feature in with_image.mm_features] == [ROWS]
    assert not text.mm_features
    assert ids.prompt_token_ids == [5, 6]
    with pytest.raises(
        Unimplemented, match=r"truncate_prompt_tokens is set, .* prompts with media \(inputs\[1\]\.mixed\); remove it"
    ):
        await pooling.process(msgspec.structs.replace(request, truncate_prompt_tokens=5), "r", LIMITS)
    with pytest.raises(InvalidArgument, match="a pair must consist of two texts"):
        pair = PoolingRequest(inputs=[mixed], seconds=["b"], fields=["inputs[1].mixed"], params=EMBED)
        await pooling.process(pair, "r", LIMITS)
    small = LIMITS._replace(max_model_len=16)
    with pytest.raises(InvalidArgument, match="16 of them media"):
        await pooling.process(request, "r", small)
