import base64
from urllib.parse import quote

import pytest

from penstock_frontend.processing.media.data_urls import (
    DataUrlError,
    decode_base64,
    decode_data_url,
    is_data_url,
    parse_data_url,
)

DATA = bytes(range(256)) * 3 + b"\xfb\xff\xfe"
TEXT = base64.b64encode(DATA).decode()
HEAD = "data:image/png;base64,"
SLICE = 128 * 1024


def read(url: str) -> bytes:
    assert is_data_url(url)
    return decode_data_url(parse_data_url(url))


def lines(data: bytes, end: str) -> str:
    return base64.encodebytes(data).decode().replace("\n", end)


@pytest.mark.parametrize(
    "head",
    [
        "data:image/png;base64,",
        "data:;base64,",
        "DATA:image/x;charset=utf-8;BASE64,",
        "data:image/png; charset=utf-8; base64,",
        " \r\n data:image/png;base64,",
    ],
)
def test_a_data_url_is_its_bytes_whatever_type_it_says(head: str) -> None:
    assert read(head + TEXT) == DATA


WRITTEN = {
    "line breaks": lines(DATA, "\n"),
    "line breaks of Windows": lines(DATA, "\r\n"),
    "space in front": " " + TEXT,
    "spaces and tabs within": " \t".join(TEXT),
    "no padding": base64.b64encode(DATA + b"a").decode().rstrip("="),
    "too little padding": base64.b64encode(DATA + b"a").decode()[:-1],
    "padding behind a line break": base64.b64encode(DATA + b"a").decode().replace("==", "\n=\n=\n"),
    "base64url": base64.urlsafe_b64encode(DATA).decode(),
    "percent-encoded": quote(TEXT, safe=""),
    "percent-encoded throughout": "".join(f"%{ord(character):02x}" for character in TEXT),
    "percent-encoded line breaks": lines(DATA, "%0A"),
}


@pytest.mark.parametrize("text", WRITTEN.values(), ids=WRITTEN)
def test_base64_is_decoded_however_programs_write_it(text: str) -> None:
    assert read(HEAD + text).removesuffix(b"a") == DATA


@pytest.mark.parametrize("size", [1, 2, 3, 4, SLICE - 1, SLICE, SLICE * 3 // 4, 2_500_001])
@pytest.mark.parametrize("end", ["", "\n", "%0D%0A"])
def test_a_data_url_of_any_length_is_decoded(size: int, end: str) -> None:
    data = (bytes(range(256)) * (size // 256 + 1))[:size]
    text = lines(data, end) if end else base64.b64encode(data).decode()
    assert read("data:;base64," + text) == data


def test_bytes_that_are_percent_encoded_need_no_base64() -> None:
    assert read("data:image/png," + quote(DATA)) == DATA
    with pytest.raises(DataUrlError, match="has 'é' at character 19, which must be percent-encoded"):
        read("data:image/png,%89é")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("data:image/png;base64", "is not a data: URL, because it has no comma after the media type"),
        ("data:" + "x" * 1000 + ";base64,abcd", "is not a data: URL, because it has no comma after the media type"),
        ("data:image/png,abcd", "is a data: URL without ;base64 before its comma"),
        ("data:base64,abcd", "is a data: URL without ;base64 before its comma"),
        (HEAD, "is empty"),
        (HEAD + " \n", "is empty"),
        (HEAD + "==", "is empty"),
        (HEAD + "ab!d", "has '!' at character 25, which is not base64"),
        (HEAD + "\n\nab\n.d", "has '.' at character 28, which is not base64"),
        (HEAD + "%61%62%21d", "has '%21' at character 29, which is not base64"),
        (HEAD + "ab%zz", "has '%' at character 25, which is not base64"),
        (HEAD + "ab%", "has '%' at character 25, which is not base64"),
        (HEAD + "abc\0", r"has '\x00' at character 26, which is not base64"),
        (HEAD + "é" * 4, "has 'é' at character 23, which is not base64"),
        (HEAD + "abc\ud800", r"has '\ud800' at character 26, which is not base64"),
        (HEAD + HEAD + "abcd", "has ':' at character 27, which is not base64"),
        (HEAD + "b'abcd'", """has "'" at character 24, which is not base64"""),
        (HEAD + "abcd====", "has '=' at character 29, after base64's padding"),
        (HEAD + "ab==cd==", "has 'c' at character 27, after base64's padding"),
        (HEAD + "ab=\n-d", "has '-' at character 27, after base64's padding"),
        (HEAD + "abcd" * (SLICE // 4) + "ab=%3d=", f"has '=' at character {23 + SLICE + 6}, after"),
        (HEAD + "A" * SLICE * 3 + "%40", f"has '%40' at character {23 + SLICE * 3}, which is not base64"),
        (HEAD + "A" * (SLICE - 4) + "AA==" + "A" * SLICE, f"has 'A' at character {23 + SLICE}, after"),
        (
            HEAD + "abcde",
            "has 5 base64 characters, but the number of characters can never be a multiple of four plus one",
        ),
    ],
    ids=lambda value: value[:40],
)
def test_the_first_wrong_character_is_named_with_its_position(url: str, message: str) -> None:
    with pytest.raises(DataUrlError) as error:
        read(url)
    assert str(error.value).startswith(message)
    assert "abcd" not in str(error.value)


def test_positions_leave_out_characters_that_the_client_did_not_write() -> None:
    with pytest.raises(DataUrlError, match="at character 3,"):
        decode_base64("data:;base64,ab!d", 13, 17, unwritten=13)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 1000, 1001, 1002])
def test_the_bytes_of_a_data_url_are_bounded_before_it_is_decoded(size: int) -> None:
    text = base64.b64encode(bytes(size)).decode()
    assert parse_data_url(HEAD + text).most_bytes == size
    assert parse_data_url(HEAD + text.rstrip("=")).most_bytes == size
    assert parse_data_url(HEAD + text + "\n\n").most_bytes >= size
    assert parse_data_url("data:," + "%00" * size).most_bytes >= size
