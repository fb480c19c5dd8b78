"""Text of an output as a client sees it: withheld, released and cut text, with its tokens."""

from hypothesis import given
from hypothesis import strategies as st

from penstock_common.types.outputs import Logprobs
from penstock_frontend.processing.outputs.detokenizer import IncrementalDetokenizer, OutputText, StopMatcher
from penstock_frontend.processing.prompts.tokenizer import Tokenizer
from tests.fakes.models import small_tokenizers

TOKENIZER = Tokenizer(small_tokenizers.byte_level())
[EOS] = TOKENIZER._backend.encode(small_tokenizers.EOS, add_special_tokens=False).ids
ALPHABET = "abcé你🙂 \n"


def ids_of(text: str) -> list[int]:
    return TOKENIZER._backend.encode(text, add_special_tokens=False).ids


def output_text(**options: object) -> OutputText:
    detokenizer = IncrementalDetokenizer(TOKENIZER, [], skip_special_tokens=True)
    return OutputText(detokenizer, **options)  # type: ignore[arg-type]


def run(ids: list[int], step: int = 1, **options: object) -> tuple[list[str], list[int], str]:
    """Return the pieces of text, the tokens, and the stop string, for an output that arrives ``step`` tokens at a time."""
    output = output_text(**options)
    pieces: list[str] = []
    tokens: list[int] = []
    for start in range(0, max(len(ids), 1), step):
        chunk = ids[start : start + step]
        delta = output.add(chunk, ended=start + step >= len(ids))
        pieces.append(delta.text)
        tokens.extend(delta.token_ids)
        if delta.stop:
            return pieces, tokens, delta.stop
    return pieces, tokens, ""


def cut(text: str, stops: list[str], *, include: bool) -> str:
    found = [(end, -len(s)) for end in range(1, len(text) + 1) for s in stops if text[:end].endswith(s)]
    if not found:
        return text
    end, minus_length = min(found)
    return text[: end if include else end + minus_length]


@st.composite
def text_and_stops(draw: st.DrawFn) -> tuple[str, list[str]]:
    """Stop strings are mostly pieces of the text, so that they lie across tokens and overlap each other."""
    text = draw(st.text(alphabet=ALPHABET, min_size=1, max_size=30))
    begin = st.integers(0, len(text) - 1)
    pieces = st.builds(lambda at, n: text[at : at + n], begin, st.integers(1, 6))
    return text, draw(st.lists(pieces | st.text(alphabet=ALPHABET, min_size=1, max_size=4), min_size=1, max_size=4))


@given(case=text_and_stops(), step=st.integers(1, 5), include=st.booleans())
def test_a_stop_string_cuts_the_text_where_it_is_first_complete(
    case: tuple[str, list[str]], step: int, include: bool
) -> None:
    text, stops = case
    pieces, _, stop = run(ids_of(text), step, stops=stops, include_stop=include)
    assert "".join(pieces) == cut(text, stops, include=include)
    assert bool(stop) == any(s in text for s in stops)


@given(case=text_and_stops(), step=st.integers(2, 5), include=st.booleans())
def test_text_and_tokens_are_the_same_however_many_tokens_come_at_once(
    case: tuple[str, list[str]], step: int, include: bool
) -> None:
    text, stops = case
    single, at_once = (run(ids_of(text), s, stops=stops, include_stop=include) for s in (1, step))
    assert ("".join(single[0]), *single[1:]) == ("".join(at_once[0]), *at_once[1:])


@given(case=text_and_stops())
def test_the_tokens_left_by_a_stop_string_are_those_whose_text_is_left(case: tuple[str, list[str]]) -> None:
    text, stops = case
    pieces, tokens, stop = run(ids_of(text), stops=stops)
    assert tokens == ids_of(text)[: len(tokens)]
    left = "".join(pieces)
    assert left.startswith(TOKENIZER.decode(tokens))
    longer = TOKENIZER.decode(ids_of(text)[: len(tokens) + 1])
    assert not stop or longer.endswith("\ufffd") or len(longer) > len(left)


@given(text=st.text(max_size=30), step=st.integers(1, 4))
def test_without_stop_strings_everything_comes_out(text: str, step: int) -> None:
    pieces, tokens, stop = run(ids_of(text), step)
    assert ("".join(pieces), tokens, stop) == (text, ids_of(text), "")


def of(token_ids: list[int]) -> Logprobs:
    """Return log-probabilities that identify their tokens, with two entries for each position."""
    logprobs = Logprobs()
    for token_id in token_ids:
        logprobs.add([token_id, 0], [-float(token_id), 0.0], [token_id + 1, 1])
    return logprobs


@given(case=text_and_stops(), step=st.integers(1, 5), include=st.booleans())
def test_log_probabilities_come_and_go_with_their_tokens(case: tuple[str, list[str]], step: int, include: bool) -> None:
    text, stops = case
    ids, output = ids_of(text), output_text(stops=stops, include_stop=include)
    for start in range(0, len(ids), step):
        chunk = ids[start : start + step]
        delta = output.add(chunk, logprobs=of(chunk), ended=start + step >= len(ids))
        assert delta.logprobs == (of(list(delta.token_ids)) if delta.token_ids else None)
        if delta.stop:
            break


def test_text_that_may_begin_a_stop_string_is_withheld_and_then_released() -> None:
    pieces, tokens, stop = run(ids_of("a<b<"), stops=["<<"])
    assert pieces == ["a", "", "<b", "<"]
    assert (tokens, stop) == (ids_of("a<b<"), "")


def test_tokens_are_withheld_with_their_text() -> None:
    output = output_text(stops=["<<"])
    assert [list(output.add([token]).token_ids) for token in ids_of("a<b")] == [[97 - 33 + 2], [], ids_of("<b")]


def test_a_token_with_text_on_both_sides_of_the_cut_goes_with_the_stop_string() -> None:
    ids = ids_of("the quick")
    assert len(ids) < len("the quick")
    pieces, tokens, stop = run(ids, stops=[TOKENIZER.decode(ids[-1:])[-1]])
    assert stop
    assert "".join(pieces) == "the quick"[: "the quick".index(stop)]
    assert TOKENIZER.decode(tokens) == "the quick"[: len(TOKENIZER.decode(tokens))]


def test_an_included_stop_string_keeps_its_tokens() -> None:
    pieces, tokens, stop = run(ids_of("ab!!cd"), stops=["!!"], include_stop=True)
    assert ("".join(pieces), tokens, stop) == ("ab!!", ids_of("ab!!"), "!!")


def test_stop_strings_within_min_tokens_are_ignored() -> None:
    ids = ids_of("x.y.z.")
    pieces, _, stop = run(ids, stops=["."], min_tokens=3)
    assert ("".join(pieces), stop) == ("x.y", ".")


def test_a_stop_string_must_lie_wholly_behind_min_tokens() -> None:
    pieces, _, stop = run(ids_of("..z"), stops=[".."], min_tokens=1)
    assert ("".join(pieces), stop) == ("..z", "")


def test_the_token_that_stopped_the_output_is_counted_and_not_shown() -> None:
    delta = output_text().add([*ids_of("ab"), EOS], ended=True, stop_token=True)
    assert (delta.text, list(delta.token_ids)) == ("ab", [*ids_of("ab"), EOS])
    stop_token = ids_of("!")[0]
    assert output_text().add([*ids_of("ab"), stop_token], ended=True, stop_token=True).text == "ab"
    assert output_text(include_stop=True).add([*ids_of("ab"), stop_token], ended=True, stop_token=True).text == "ab!"


def test_tokens_behind_a_stop_string_are_dropped_and_not_counted() -> None:
    output = output_text(stops=["."])
    assert output.add(ids_of("a.bcd")).stop == "."
    assert output.num_tokens == 2


def test_a_stop_string_in_the_flushed_text_counts() -> None:
    pieces, _, stop = run(ids_of("a🦊")[:-1], stops=["\ufffd"])
    assert ("".join(pieces), stop) == ("a", "\ufffd")


def test_without_a_detokenizer_tokens_pass_and_there_is_no_text() -> None:
    delta = OutputText(None).add([5, 6], ended=True)
    assert (delta.text, list(delta.token_ids)) == ("", [5, 6])


# Stop strings: the stop string that is complete first wins, for any split of the text.

LETTERS = st.text(alphabet="ab", max_size=12)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=4)


def first_complete(text: str, stops: list[str]) -> tuple[int, str] | None:
    """Find the first complete stop string by trying all of them. Returns its end and the string."""
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
