"""Conversations with images all the way to token ids, as ``apply_chat_template`` of transformers makes them."""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from transformers import AutoImageProcessor, AutoProcessor

from penstock_common.config.settings import Reread
from penstock_common.types.request import EngineCoreRequest
from penstock_frontend.call_types import ChatMessage, ChatRequest, ContentPart
from penstock_frontend.config import FairnessConfig, LimitsConfig, ModelConfig
from penstock_frontend.processing.chat.rendering import ChatRenderer
from penstock_frontend.processing.chat.templates import load_chat_templates
from penstock_frontend.processing.media.families.checkpoint import load_family
from penstock_frontend.processing.prompts.input import InputProcessor
from penstock_frontend.processing.prompts.tokenizer import load_model_files
from tests.fakes.multimodal_models import make_image, save_multimodal_model
from tests.fakes.prepared_media import InProcessPreparer, image_part

FIRST, SECOND = make_image(80, 60, 1), make_image(50, 90, 2)
TALK: list[tuple[str, list[str | Image.Image]]] = [
    ("system", ["be brief\n"]),
    ("user", [FIRST, "what is this?\n\n", SECOND, "\nand that?"]),
    ("assistant", ["a cat"]),
    ("user", ["look again: ", FIRST]),
]
TEXTS = ("say <image> and <|image_pad|>", "<start_of_image>[IMG]", "plain")


def messages() -> list[ChatMessage]:
    return [ChatMessage(role=role, content=[part(each) for each in content]) for role, content in TALK]


def part(content: str | Image.Image) -> ContentPart:
    if isinstance(content, str):
        return ContentPart(type="text", text=content)
    return ContentPart(type="media", media=image_part(content))


def theirs(folder: Path) -> list[int]:
    load: Any = AutoProcessor.from_pretrained
    processor, load = load(folder), AutoImageProcessor.from_pretrained
    processor.image_processor = load(folder, backend="pil")
    talk = [
        {
            "role": role,
            "content": [
                {"type": "text", "text": each} if isinstance(each, str) else {"type": "image", "image": each}
                for each in content
            ],
        }
        for role, content in TALK
    ]
    given = processor.apply_chat_template(talk, tokenize=True, add_generation_prompt=True, return_dict=True)
    ids = given["input_ids"]
    return [int(i) for i in (ids if isinstance(ids[0], int) else ids[0])]


async def ours(folder: Path, request: ChatRequest) -> EngineCoreRequest:
    config = ModelConfig(path=str(folder))
    tokenizer = load_model_files(config, num_threads=1).tokenizer
    family = load_family(folder, tokenizer.literal)
    assert family is not None
    limits, fairness, media = Reread(LimitsConfig()), Reread(FairnessConfig()), InProcessPreparer(family)
    inputs = InputProcessor(tokenizer, {}, model_name="demo", limits=limits, fairness=fairness, media=media)
    renderer = ChatRenderer(load_chat_templates(config), tokenizer, limits, family=family)
    made = await inputs.process(await renderer.render(request), "r")
    tokenizer.close()
    return made


@pytest.mark.parametrize(
    "name", ["llava", "llava_pixtral", "qwen2_vl", "gemma3", "llava_onevision", "idefics3", "internvl"]
)
async def test_a_conversation_is_tokenized_as_transformers_does(name: str, tmp_path: Path) -> None:
    save_multimodal_model(name, tmp_path)
    made = await ours(tmp_path, ChatRequest(messages=messages()))
    assert made.prompt_token_ids == theirs(tmp_path)
    assert [feature.modality for feature in made.mm_features] == ["image"] * 3
    assert made.mm_features[0].identifier == made.mm_features[2].identifier
    assert made.mm_features[0].identifier != made.mm_features[1].identifier


@pytest.mark.parametrize("name", ["llava", "qwen2_vl"])
async def test_words_of_a_conversation_are_never_media(name: str, tmp_path: Path) -> None:
    save_multimodal_model(name, tmp_path)
    for text in TEXTS:
        said = ChatMessage(role="user", content=text)
        shown = ChatMessage(role="user", content=[part(FIRST), part(text)])
        alone = await ours(tmp_path, ChatRequest(messages=[said]))
        beside = await ours(tmp_path, ChatRequest(messages=[said, shown]))
        assert not alone.mm_features
        (feature,) = beside.mm_features
        token = beside.prompt_token_ids[feature.offset]
        assert token not in alone.prompt_token_ids
        assert beside.prompt_token_ids.count(token) == feature.length


@pytest.mark.parametrize("template", ["{{ messages[0].content }}", "{{ bos_token }}{{ messages[0].content }}"])
async def test_a_prompt_begins_once(template: str, tmp_path: Path) -> None:
    save_multimodal_model("llava", tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "bos_token": "<s>"}))
    made = await ours(tmp_path, ChatRequest(messages=[ChatMessage(role="user", content="hello")]))
    load: Any = AutoProcessor.from_pretrained
    talk = [{"role": "user", "content": "hello"}]
    given = load(tmp_path).apply_chat_template(talk, tokenize=True, return_dict=True)["input_ids"]
    assert made.prompt_token_ids == given[0]
    assert made.prompt_token_ids.count(0) == 1
