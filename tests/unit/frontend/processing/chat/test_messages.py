"""Places of media in rendered conversations, whatever clients write around them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock_common.config.settings import Reread
from penstock_common.errors import InvalidArgument
from penstock_common.types.media import Modality
from penstock_frontend.call_types import ChatMessage, ChatRequest, MediaPart, ToolCall
from penstock_frontend.config import LimitsConfig
from penstock_frontend.processing.chat.messages import Places, ShownRoles, as_shown, shown_roles
from penstock_frontend.processing.chat.rendering import ChatRenderer
from penstock_frontend.processing.chat.templates import ChatTemplates
from penstock_frontend.processing.prompts.tokenizer import Tokenizer
from tests.fakes.models.chat_templates import PHI
from tests.fakes.models.small_tokenizers import byte_level
from tests.fakes.prepared_media import part_of
from tests.fakes.token_family import TokenFamily

PLACEHOLDERS: dict[Modality, str] = {"image": "<image>", "audio": "<audio>"}
LETTERS: dict[Modality, str] = {"image": "\0", "audio": "\1"}
"""Placeholders that occur in no text."""


class Shown(NamedTuple):
    """A medium of a conversation."""

    modality: Modality


Content = Sequence[str | Shown]
PIECES = ["<image>", "<audio>", "<ima", "ge>", "<", "image>", "<<", " ", "\n", "a"]
WORDS = st.lists(st.one_of(st.sampled_from(PIECES), st.characters(min_codepoint=32).map(str)), max_size=4).map("".join)
CONTENTS = st.lists(st.one_of(WORDS, st.builds(Shown, st.sampled_from(["image", "audio"]))), max_size=5)


def rendered(content: Content, marks: dict[Modality, str]) -> str:
    """Render like a template that trims texts and adds no separator."""
    return "[user]" + "".join(each.strip() if isinstance(each, str) else marks[each.modality] for each in content)


def shown(parts: Sequence[str | MediaPart]) -> str:
    return "".join(part if isinstance(part, str) else LETTERS[part.modality] for part in parts)


@given(st.lists(CONTENTS, min_size=1, max_size=3))
@example([["<ima ", "ge>", Shown("image")], ["<", "", "image>"]])
@settings(max_examples=400, deadline=None)
def test_media_stand_where_they_were_given(talk: list[Content]) -> None:
    """Media are at the places of the letters in the same conversation with letters instead of media."""
    given_media = [part_of(each.modality) for content in talk for each in content if isinstance(each, Shown)]
    places = Places(TokenFamily(), given_media)
    guarded = [[each if isinstance(each, Shown) else places.guarded(each) for each in content] for content in talk]
    parts = places.split("".join(rendered(content, PLACEHOLDERS) for content in guarded), by_name=False)
    assert shown(parts) == "".join(rendered(content, LETTERS) for content in talk)
    assert [part for part in parts if isinstance(part, MediaPart)] == given_media


@given(CONTENTS)
@settings(max_examples=200, deadline=None)
def test_media_stand_where_they_are_named(content: Content) -> None:
    media = [part_of(each.modality) for each in content if isinstance(each, Shown)]
    places = Places(TokenFamily(), media)
    names = (places.named(index) for index in range(len(media)))
    text = "".join(each if isinstance(each, str) else next(names) for each in content)
    parts = places.split(text, by_name=True)
    assert shown(parts) == "".join(each if isinstance(each, str) else LETTERS[each.modality] for each in content)


def test_nothing_but_text_is_changed() -> None:
    places = Places(TokenFamily(), [])
    plain = {"role": "user", "content": "a < b, <b>bold</b>", "numbers": [1, 2.5, None, True], "deep": {"x": ("y",)}}
    assert places.guarded(plain) == {**plain, "deep": {"x": ["y"]}}
    assert places.guarded("</think> <imag ine>") == "</think> <imag ine>"


# Roles that a template does not render are converted to roles that it renders. No message is silently left out.

TURN = "{{ '<' ~ m.role ~ '>' ~ m.content }}"
ANY = f"{{% for m in messages %}}{TURN}{{% endfor %}}"
"""Template that writes every role."""
STRICT = f"""
{{%- for m in messages %}}
{{%- if m.role == 'system' and not loop.first %}}{{{{ raise_exception('System message must be at the beginning.') }}}}
{{%- elif m.role not in ('system', 'user', 'assistant', 'tool') %}}{{{{ raise_exception('Unexpected message role.') }}}}
{{%- else %}}{TURN}{{%- endif %}}{{%- endfor %}}"""
"""Template with the checks of Qwen 3.5."""
SILENT = f"""
{{%- if messages[0].role == 'system' %}}{{{{ '<system>' ~ messages[0].content }}}}{{% endif %}}
{{%- for m in messages %}}{{%- if m.role in ('user', 'assistant') %}}{TURN}{{% endif %}}{{% endfor %}}"""
"""A template that leaves out messages with unknown roles."""
GEMMA = """
{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('must alternate') }}{% endif %}
{%- set content = m.content | trim %}{{ '<' ~ m.role ~ '>' ~ content }}{%- endfor %}"""
DEVELOPER = f"""
{{%- for m in messages %}}
{{%- if m.role in ('system', 'developer', 'user', 'assistant', 'tool') %}}{TURN}{{% endif %}}{{% endfor %}}"""


async def prompt(template: str, *turns: tuple[str, Any], **fields: Any) -> str:
    renderer = ChatRenderer(ChatTemplates({"default": template}, {}), Tokenizer(byte_level()), Reread(LimitsConfig()))
    messages = [ChatMessage(role=role, content=content) for role, content in turns]
    rendered = (await renderer.render(ChatRequest(messages=messages, **fields))).prompt
    assert isinstance(rendered, str)
    return rendered.strip()


U, A = ("user", "Hi"), ("assistant", "Yes")


@pytest.mark.parametrize(
    ("template", "turns", "wanted"),
    [
        (ANY, [("developer", "a"), U], "<system>a<user>Hi"),
        (ANY, [("system", "a"), U, A, ("system", "b"), U], "<system>a<user>Hi<assistant>Yes<system>b<user>Hi"),
        (ANY, [("system", "a"), ("developer", "b"), U, U], "<system>a<system>b<user>Hi<user>Hi"),
        (DEVELOPER, [("developer", "a"), U, ("developer", "b"), U], "<developer>a<user>Hi<developer>b<user>Hi"),
        (STRICT, [("system", "a"), U], "<system>a<user>Hi"),
        (STRICT, [("system", "a"), ("system", "b"), U], "<system>a\n\nb<user>Hi"),
        (STRICT, [U, A, ("system", "b"), U], "<system>b<user>Hi<assistant>Yes<user>Hi"),
        (STRICT, [("developer", "a"), U, ("system", "b"), U], "<system>a\n\nb<user>Hi<user>Hi"),
        (SILENT, [("developer", "a"), U], "<system>a<user>Hi"),
        (SILENT, [("system", "a"), ("system", ""), U, A, ("developer", "c")], "<system>a\n\nc<user>Hi<assistant>Yes"),
        (GEMMA, [("system", "a"), ("developer", "b"), U], "<user>a\n\nb\n\nHi"),
        (GEMMA, [U, A, ("system", "b"), U], "<user>b\n\nHi<assistant>Yes<user>Hi"),
        (GEMMA, [U, U, A, U], "<user>Hi\n\nHi<assistant>Yes<user>Hi"),
        (GEMMA, [("system", "a")], "<user>a"),
        (PHI, [("developer", "a"), U], "<|system|>a<|end|><|user|>Hi<|end|><|assistant|>"),
    ],
)
async def test_messages_are_given_roles_that_the_template_shows(
    template: str, turns: list[tuple[str, str]], wanted: str
) -> None:
    assert await prompt(template, *turns) == wanted


async def test_a_last_message_that_goes_on_keeps_its_place() -> None:
    turns = [U, ("system", "a"), ("assistant", "Well")]
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    assert await prompt(STRICT, *turns, **fields) == "<system>a<user>Hi<assistant>Well"


async def test_a_result_of_a_tool_that_the_template_leaves_out_is_refused() -> None:
    call = ChatMessage(role="assistant", content=None, tool_calls=[ToolCall(id="1", name="f", arguments="{}")])
    turns = [ChatMessage(role="user", content="Hi"), call, ChatMessage(role="tool", content="42", tool_call_id="1")]
    renderer = ChatRenderer(ChatTemplates({"default": SILENT}, {}), Tokenizer(byte_level()), Reread(LimitsConfig()))
    with pytest.raises(
        InvalidArgument, match=r"messages\[2\].role is 'tool', but the model's chat template does not show"
    ) as e:
        await renderer.render(ChatRequest(messages=turns))
    assert e.value.field == "messages[2].role"
    renderer = ChatRenderer(ChatTemplates({"default": ANY}, {}), Tokenizer(byte_level()), Reread(LimitsConfig()))
    assert "<tool>42" in str((await renderer.render(ChatRequest(messages=turns))).prompt)


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('never') }}", "{{ 1 +", "", "{% for i in range(9999999999) %}{% endfor %}"]
)
def test_a_template_that_renders_nothing_is_left_alone(template: str) -> None:
    assert shown_roles(ChatTemplates({"default": template}, {}), str) == ShownRoles()


def test_parts_are_joined_and_media_keep_their_place() -> None:
    text, image = {"type": "text", "text": "a"}, {"type": "image", "image": ""}
    first, second = {"role": "system", "content": [text]}, {"role": "system", "content": "b"}
    user = {"role": "user", "content": [image, text]}
    between = {"type": "text", "text": "\n\n"}
    strict = ShownRoles(systems=False)
    joined = {"role": "system", "content": [text, between, {"type": "text", "text": "b"}]}
    assert as_shown([user, first, second], strict) == [joined, user]
    with_image = {"role": "system", "content": [image]}
    assert as_shown([user, with_image], strict) == [user, with_image]
    assert as_shown([user, user], ShownRoles(users=False)) == [
        {"role": "user", "content": [image, text, between, image, text]}
    ]
