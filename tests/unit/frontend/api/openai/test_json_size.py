"""How much there is in a JSON text, counted before it is decoded."""

import pytest

from penstock_common.errors import InvalidArgument
from penstock_frontend.api.http.request_body import MAX_NESTING, JsonSize, check_json_size

TEXT = rb'{"a": [1, 2, "x,{[", "\\", "q\"{,"], "b\\\"{": {}, "c": [{"d": "\\\\\\"}, null]}'


def size_of(*pieces: bytes) -> tuple[int, int]:
    size = JsonSize()
    for piece in pieces:
        size.add(piece)
    return size.values, size.objects


def test_commas_and_brackets_count_where_they_are_in_no_string() -> None:
    assert size_of(b'["{", {"a,": 1}, "\\\\", {}]') == (6, 2)
    assert size_of(TEXT) == (12, 3)


def test_it_is_the_same_wherever_the_text_is_cut() -> None:
    for cut in range(len(TEXT)):
        assert size_of(TEXT[:cut], TEXT[cut:]) == size_of(TEXT)
    assert size_of(*(bytes([each]) for each in TEXT)) == size_of(TEXT)


async def test_what_is_beyond_a_limit_is_refused() -> None:
    await check_json_size(TEXT, max_values=12, max_objects=3)
    with pytest.raises(InvalidArgument, match=r"more than 11 JSON values; http.max_body_values is 11"):
        await check_json_size(TEXT, max_values=11, max_objects=3)
    with pytest.raises(InvalidArgument, match=r"more than 2 JSON objects; http.max_body_objects is 2"):
        await check_json_size(TEXT, max_values=12, max_objects=2)


def test_nesting_is_that_of_the_deepest_place_wherever_the_text_is_cut() -> None:
    for cut in range(len(TEXT)):
        size = JsonSize()
        for piece in (TEXT[:cut], TEXT[cut:]):
            size.add(piece)
        assert size.nesting == 3


@pytest.mark.parametrize(("begin", "end"), [(b"[", b"]"), (b'{"a":', b"}"), (b'[{"a":', b"}]")])
async def test_what_nests_too_deep_is_refused(begin: bytes, end: bytes) -> None:
    repeats = MAX_NESTING // (begin.count(b"[") + begin.count(b"{"))
    limits = {"max_values": 10_000, "max_objects": 10_000}
    await check_json_size(begin * repeats + b"1" + end * repeats, **limits)
    await check_json_size(b"[%b]" % b",".join([b'{"a":[1]}'] * MAX_NESTING), **limits)
    with pytest.raises(InvalidArgument, match="lists and objects nest more than 512 deep"):
        await check_json_size(begin * (repeats + 1) + b"1" + end * (repeats + 1), **limits)
