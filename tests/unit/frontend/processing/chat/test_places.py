"""Places of media in rendered conversations, whatever clients write around them."""

from collections.abc import Sequence
from typing import NamedTuple

from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock_common.types.media import Modality
from penstock_frontend.call_types import MediaPart
from penstock_frontend.processing.chat.messages import Places
from tests.fakes.prepared_media import part_of
from tests.fakes.token_family import TokenFamily

PLACEHOLDERS: dict[Modality, str] = {"image": "<image>", "audio": "<audio>"}
LETTERS: dict[Modality, str] = {"image": "\0", "audio": "\1"}
"""What no text has."""


class Shown(NamedTuple):
    """A medium of a conversation."""

    modality: Modality


Content = Sequence[str | Shown]
PIECES = ["<image>", "<audio>", "<ima", "ge>", "<", "image>", "<<", " ", "\n", "a"]
WORDS = st.lists(st.one_of(st.sampled_from(PIECES), st.characters(min_codepoint=32).map(str)), max_size=4).map("".join)
CONTENTS = st.lists(st.one_of(WORDS, st.builds(Shown, st.sampled_from(["image", "audio"]))), max_size=5)


def rendered(content: Content, marks: dict[Modality, str]) -> str:
    """As a template does it that trims texts and puts nothing between."""
    return "[user]" + "".join(each.strip() if isinstance(each, str) else marks[each.modality] for each in content)


def shown(parts: Sequence[str | MediaPart]) -> str:
    return "".join(part if isinstance(part, str) else LETTERS[part.modality] for part in parts)


@given(st.lists(CONTENTS, min_size=1, max_size=3))
@example([["<ima ", "ge>", Shown("image")], ["<", "", "image>"]])
@settings(max_examples=400, deadline=None)
def test_media_stand_where_they_were_given(talk: list[Content]) -> None:
    """As in the same conversation with letters for media that no text has."""
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
