"""Stop strings: the first to be complete wins, however the text arrives."""

from hypothesis import given
from hypothesis import strategies as st

from penstock_frontend.processing.outputs.text import StopMatcher

LETTERS = st.text(alphabet="ab", max_size=12)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=4)


def first_complete(text: str, stops: list[str]) -> tuple[int, str] | None:
    """The definition, by trying everything: (end, stop)."""
    found = [(end, -len(s), s) for end in range(1, len(text) + 1) for s in stops if text[:end].endswith(s)]
    return (min(found)[0], min(found)[2]) if found else None


@given(pieces=st.lists(LETTERS, max_size=6), stops=STOPS)
def test_finds_what_the_definition_says_for_any_cut_of_the_text(pieces: list[str], stops: list[str]) -> None:
    matcher, fed, found = StopMatcher(stops), 0, None
    for piece in pieces:
        if (match := matcher.feed(piece)) is not None:
            found = (fed + match.end, match.stop)
            break
        fed += len(piece)
    assert found == first_complete("".join(pieces), stops)


@given(text=LETTERS, stops=STOPS)
def test_partial_is_the_longest_end_that_a_stop_string_begins_with(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    if matcher.feed(text) is None:
        ends = [n for n in range(len(text) + 1) if any(s.startswith(text[len(text) - n :]) for s in stops)]
        assert matcher.partial == max(ends)


def test_many_long_stop_strings_cost_one_pass() -> None:
    matcher = StopMatcher([("a" * 200) + chr(0x4E00 + i) for i in range(64)])
    assert matcher.feed("a" * 10_000) is None
    assert matcher.partial == 200
