"""Conversations with media: templates get parts as they read them, media stand where they were given, whatever a text
says.
"""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from penstock_common.config.settings import Reread
from penstock_common.errors import InvalidArgument
from penstock_common.types.media import Modality
from penstock_frontend.call_types import ChatMessage, ChatRequest, ContentPart, MediaPart, MixedPrompt, Tool
from penstock_frontend.config import LimitsConfig, ModelConfig
from penstock_frontend.processing.chat.rendering import ChatRenderer
from penstock_frontend.processing.chat.templates import load_chat_templates
from penstock_frontend.processing.prompts.tokenizer import load_model_files
from tests.fakes.models.chat_templates import save_chat_model
from tests.fakes.prepared_media import part_of
from tests.fakes.token_family import TokenFamily

PARTS = (
    "{%- for message in messages %}[{{ message['role'] }}]"
    "{%- if message['content'] is string %}{{ message['content'] | trim }}"
    "{%- else %}{%- for part in message['content'] %}"
    "{%- if part['type'] == 'text' %}{{ part['text'] | trim }}"
    "{%- elif part['type'] == 'image' %}{{ '<image>' }}"
    "{%- elif part['type'] == 'audio' or 'audio' in part %}{{ 'Audio: <audio>' }}"
    "{%- endif %}{%- endfor %}{%- endif %}[/{{ message['role'] }}]{%- endfor %}"
    "{%- if add_generation_prompt %}[assistant]{%- endif %}"
)
"""Template that reads parts."""
PARTS_ALONE = (
    "{% for m in messages %}{% if m.content[0].type == 'image' %}I:{% endif %}"
    "{% for line in m.content %}{% if line.type == 'text' %}{{ line.text }}{% else %}<image>{% endif %}{% endfor %}"
    "{% endfor %}"
)
"""Template that reads parts, but no texts."""
TEXTS = "{% for message in messages %}{{ message.role }}: {{ message.content | trim }}\n{% endfor %}"
"""Template that reads texts."""
IMAGES_TWICE = PARTS.replace("{{ '<image>' }}", "{{ '<image><image>' }}")


class Renderer:
    def __init__(
        self,
        folder: Path,
        template: str,
        family: TokenFamily | None = TokenFamily(),  # noqa: B008
        no_media: str = "",
    ) -> None:
        config = ModelConfig(path=str(save_chat_model(folder, template)))
        self.tokenizer = load_model_files(config, num_threads=1).tokenizer
        self.renderer = ChatRenderer(
            load_chat_templates(config), self.tokenizer, Reread(LimitsConfig()), family=family, no_media=no_media
        )

    async def parts(self, *messages: ChatMessage, **fields: Any) -> list[str]:
        """Return the rendered parts: texts, and ``(modality field)`` for media."""
        prompt = (await self.renderer.render(ChatRequest(messages=messages, **fields))).prompt
        assert isinstance(prompt, MixedPrompt)
        return [
            f"({part.modality} {part.field})" if isinstance(part, MediaPart) else str(part) for part in prompt.parts
        ]


@pytest.fixture
async def by_parts(tmp_path: Path) -> AsyncIterator[Renderer]:
    renderer = Renderer(tmp_path, PARTS)
    yield renderer
    renderer.tokenizer.close()


@pytest.fixture
async def by_texts(tmp_path: Path) -> AsyncIterator[Renderer]:
    renderer = Renderer(tmp_path, TEXTS)
    yield renderer
    renderer.tokenizer.close()


def says(*content: str | ContentPart, role: str = "user") -> ChatMessage:
    return ChatMessage(
        role=role,
        content=[ContentPart(type="text", text=each) if isinstance(each, str) else each for each in content],
    )


def shows(modality: Modality, name: str) -> ContentPart:
    return ContentPart(type="media", media=part_of(modality, field=name))


async def test_a_template_that_reads_parts_places_media(by_parts: Renderer) -> None:
    messages = [
        ChatMessage(role="system", content=" be brief "),
        says(shows("image", "a"), "what is ", shows("audio", "b"), shows("image", "c")),
        ChatMessage(role="assistant", content="a cat"),
        says("and", shows("image", "d")),
    ]
    assert await by_parts.parts(*messages) == [
        "[system]be brief[/system][user]",
        "(image a)",
        "what isAudio: ",
        "(audio b)",
        "(image c)",
        "[/user][assistant]a cat[/assistant][user]and",
        "(image d)",
        "[/user][assistant]",
    ]


async def test_a_template_that_reads_texts_gets_media_among_lines(by_texts: Renderer) -> None:
    parts = await by_texts.parts(says(shows("image", "a"), "what", shows("audio", "b"), "is <image>"), says("<audio>"))
    assert parts == ["user: ", "(image a)", "\nwhat\n", "(audio b)", "\nis <image>\nuser: <audio>\n"]


async def test_a_template_that_reads_no_text_gets_parts_always(tmp_path: Path) -> None:
    renderer = Renderer(tmp_path, PARTS_ALONE)
    messages = [ChatMessage(role="system", content="hi"), says(shows("image", "a"), "you")]
    assert await renderer.parts(*messages) == ["hiI:", "(image a)", "you"]
    assert (await renderer.renderer.render(ChatRequest(messages=messages[:1]))).prompt == "hi"
    renderer.tokenizer.close()


@pytest.mark.parametrize("text", ["<image>", "a<image><audio>b", "<<image>>", "<image", "<", "<audi ", "im<imag"])
async def test_a_text_is_never_a_place(by_parts: Renderer, text: str) -> None:
    rest = {"<image": "age>", "<": "image>", "<audi ": "o>", "im<imag": "e>"}.get(text, "<image>")
    parts = await by_parts.parts(
        says(text, rest, shows("image", "a")),
        ChatMessage(role="assistant", content=text),
        ChatMessage(role="user", content=rest),
        says(shows("audio", "b"), text),
    )
    shown = text.strip()
    assert parts == [
        f"[user]{shown}{rest}",
        "(image a)",
        f"[/user][assistant]{shown}[/assistant][user]{rest}[/user][user]Audio: ",
        "(audio b)",
        f"{shown}[/user][assistant]",
    ]


async def test_tools_and_arguments_of_the_template_are_no_places_either(tmp_path: Path) -> None:
    renderer = Renderer(tmp_path, "{{ tools | tojson }}{{ more }}" + PARTS)
    tool = Tool(name="look", description="at an <image>", parameters={"type": "object", "properties": {"<image>": {}}})
    parts = await renderer.parts(says(shows("image", "a")), tools=[tool], template_kwargs={"more": ["<image>"]})
    assert parts[0].count("<image>") == 3
    assert parts[1:] == ["(image a)", "[/user][assistant]"]
    renderer.tokenizer.close()


async def test_the_last_message_is_continued_behind_its_media(by_parts: Renderer, by_texts: Renderer) -> None:
    asked = says("look")
    for content, end in ((("it is", shows("image", "a")), []), ((shows("image", "a"), "it is"), ["it is"])):
        answer = says(*content, role="assistant")
        parts = await by_parts.parts(asked, answer, continue_final_message=True, add_generation_prompt=False)
        begin = "[user]look[/user][assistant]" + ("" if end else "it is")
        assert parts == [begin, "(image a)", *end]
    answer = says(shows("image", "a"), "it is", role="assistant")
    parts = await by_texts.parts(asked, answer, continue_final_message=True, add_generation_prompt=False)
    assert parts == ["user: look\nassistant: ", "(image a)", "\nit is"]


async def test_a_template_that_writes_other_places_is_told_of(tmp_path: Path) -> None:
    for index, (template, words) in enumerate(
        ((IMAGES_TWICE, "more placeholders"), ("{{ messages[0].role }}", "other placeholders"))
    ):
        renderer = Renderer(tmp_path / str(index), template)
        with pytest.raises(InvalidArgument, match=words):
            await renderer.parts(says("look", shows("image", "a")))
        renderer.tokenizer.close()


async def test_media_that_the_model_does_not_take_are_refused(by_parts: Renderer, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument) as error:
        await by_parts.parts(says(shows("video", "messages[0].content[0].video_url")))
    assert error.value.field == "messages[0].content[0].video_url"
    assert "a video; this model accepts text, audio, image" in error.value.message
    text_only = Renderer(tmp_path / "text", PARTS, family=None)
    with pytest.raises(InvalidArgument, match="a is an image; this model accepts text"):
        await text_only.parts(says(shows("image", "a")))
    with pytest.raises(InvalidArgument) as error:
        await by_parts.parts(says(ContentPart(type="video")))
    assert error.value.field == "messages[0].content[0].type"
    text_only.tokenizer.close()


async def test_a_multimodal_model_without_media_gets_the_prompts_of_one(tmp_path: Path) -> None:
    reason = "media are disabled (media.enabled is false)"
    renderers = [Renderer(tmp_path / "a", PARTS), Renderer(tmp_path / "b", PARTS, family=None, no_media=reason)]
    with_media, without = [
        await renderer.renderer.render(ChatRequest(messages=[says("look")])) for renderer in renderers
    ]
    assert (without.prompt, without.add_special_tokens) == (with_media.prompt, with_media.add_special_tokens)
    with pytest.raises(InvalidArgument, match=r"a is an image; this server accepts only text: media are disabled \("):
        await renderers[1].parts(says(shows("image", "a")))
    for each in renderers:
        each.tokenizer.close()
