"""Forms: parts, names, limits, and damage."""

import asyncio
import random
from typing import Any, Literal

import msgspec
import pytest

from penstock_common.errors import InvalidArgument
from penstock_frontend.api.http.form_data import MAX_PARTS, MAX_TEXT_BYTES, FormReader, as_json, values_of
from penstock_frontend.api.http.request_body import Bodies
from penstock_frontend.api.openai.errors import HttpError
from penstock_frontend.config import HttpConfig


class Upload(msgspec.Struct, kw_only=True):
    file: bytes
    text: str | None = None
    number: float | None = None
    flag: bool | None = None
    words: list[Literal["a", "b"]] | None = None


TYPE = "multipart/form-data; boundary=limit"


def part(name: str, content: bytes, filename: str = "", *, headers: str = "") -> bytes:
    of_file = f'; filename="{filename}"' if filename else ""
    head = f'--limit\r\nContent-Disposition: form-data; name="{name}"{of_file}\r\n{headers}\r\n'
    return head.encode() + content + b"\r\n"


def form(*parts: bytes) -> bytes:
    return b"".join(parts) + b"--limit--\r\n"


def parsed(body: bytes, size: int = 1 << 20, content_type: str = TYPE) -> dict[str, Any]:
    reader = FormReader(content_type, ("file",))
    for start in range(0, len(body), size):
        reader.feed(body[start : start + size])
    return values_of(reader.finish(), Upload)


async def decoded(body: bytes, content_type: str = TYPE) -> Upload:
    async def receive() -> Any:
        return {"type": "http.request", "body": body, "more_body": False}

    with Bodies(HttpConfig()).open("client", content_type) as given:
        await given.read(receive)
        return await given.decode_form(Upload)


FILE = bytes(range(256)) * 40 + b"\r\n--limi\r\n--limit\x00\r\n--"
BODY = form(
    part("text", "Grüße".encode()),
    part("file", FILE, "a.wav", headers="Content-Type: audio/wav\r\n"),
    part("number", b"0.5"),
    part("flag", b"true"),
    part("words[]", b"a"),
    part("words[]", b"b"),
)


@pytest.mark.parametrize("size", [1, 2, 7, 100, 4096, 1 << 20])
def test_a_form_is_the_same_in_pieces_of_every_size(size: int) -> None:
    values = {"text": "Grüße", "file": FILE, "number": "0.5", "flag": "true", "words": ["a", "b"]}
    assert parsed(BODY, size) == values


async def test_a_form_becomes_a_struct() -> None:
    assert await decoded(BODY) == Upload(file=FILE, text="Grüße", number=0.5, flag=True, words=["a", "b"])


async def test_a_file_may_be_empty_and_may_have_no_file_name() -> None:
    assert (await decoded(form(part("file", b"")))).file == b""
    assert (await decoded(form(part("file", b"\xff")))).file == b"\xff"


def test_names_with_brackets_are_lists_and_objects() -> None:
    body = form(part("a[]", b"1"), part("b[0]", b"x"), part("b[1]", b"y"), part("c[k]", b"true"), part("words", b"a"))
    values = parsed(body)
    assert values == {"a": ["1"], "b": ["x", "y"], "c": {"k": "true"}, "words": ["a"]}
    assert as_json(values | {"file": b"x"}, Upload) == b'{"a":[1.0],"b":["x","y"],"c":{"k":true},"words":["a"]}'


@pytest.mark.parametrize(
    ("parts", "field", "says"),
    [
        ((part("text", b"a"), part("text", b"b")), "text", "text is set more than once; send it once"),
        ((part("file", b"a"), part("file", b"b")), "file", "file is set more than once"),
        ((part("c[k]", b"a"), part("c[k]", b"b")), "c.k", "c.k is set more than once"),
        ((part("a", b"1"), part("a[]", b"1")), "a", "a is sent in two forms"),
        ((part("a[]", b"1"), part("a[k]", b"1")), "a", "a is sent in two forms"),
        ((part("text", b"\xff"),), "text", "text is not valid UTF-8"),
        ((part("number", b"x"), part("file", b"")), "number", "number is 'x'; it must be a number"),
        ((part("flag", b"x" * 1000), part("file", b"")), "flag", "xxx'...; it must be"),
        ((part("words", b"c"), part("file", b"")), "words[0]", "words[0]"),
        ((part("text", b"a"),), "file", "file is not set"),
    ],
)
async def test_wrong_fields_are_named(parts: tuple[bytes, ...], field: str, says: str) -> None:
    with pytest.raises(InvalidArgument) as error:
        await decoded(form(*parts))
    assert error.value.field == field
    assert says in error.value.message


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "its last boundary is missing"),
        (BODY[:-10], "its last boundary is missing"),
        (BODY[: len(BODY) // 2], "its last boundary is missing"),
        (b"nonsense", "the body is not a valid form"),
        (form(b"--limit\r\n\r\nx\r\n"), "a part has no name"),
        (form(b"--limit\r\nContent-Disposition: form-data\r\n\r\nx\r\n"), "a part has no name"),
        (
            form(part("file", b"AA==", headers="Content-Transfer-Encoding: base64\r\n")),
            "'base64'; send its bytes unencoded",
        ),
        (form(part("file", b"", headers="".join(f"X{i}: y\r\n" for i in range(20)))), "header count"),
        (form(part("file", b"", headers=f"X: {'y' * 5000}\r\n")), "header size"),
        (form(part("n" * 5000, b"")), "header size"),
        (form(*(part(f"n{i}", b"x") for i in range(MAX_PARTS + 1))), f"more than {MAX_PARTS} parts"),
        (form(part("text", bytes(MAX_TEXT_BYTES + 1))), f"more than {MAX_TEXT_BYTES} bytes"),
        (form(*(part(f"n{i}", bytes(MAX_TEXT_BYTES // 4)) for i in range(5))), f"more than {MAX_TEXT_BYTES} bytes"),
    ],
)
def test_malformed_forms_are_refused(body: bytes, says: str) -> None:
    with pytest.raises(InvalidArgument) as error:
        parsed(body)
    assert error.value.reason == "INVALID_FORM"
    assert says.lower() in error.value.message.lower()


@pytest.mark.parametrize(
    "content_type", ["", "application/json", "multipart/mixed; boundary=limit", "text/plain; x=\"'"]
)
def test_other_types_are_refused(content_type: str) -> None:
    with pytest.raises(HttpError) as error:
        parsed(BODY, content_type=content_type)
    assert error.value.status == 415


@pytest.mark.parametrize(
    "content_type", ["multipart/form-data", "multipart/form-data; boundary=", f"{TYPE}{'x' * 300}"]
)
def test_a_boundary_is_needed(content_type: str) -> None:
    with pytest.raises(InvalidArgument, match="oundary"):
        parsed(BODY, content_type=content_type)


@pytest.mark.parametrize("boundary", ['"limit"', "limit"])
def test_the_header_may_be_written_in_other_ways(boundary: str) -> None:
    content_type = f"Multipart/Form-Data; charset=utf-8; Boundary={boundary}"
    assert parsed(BODY, content_type=content_type)["file"] == FILE


async def test_random_damage_is_a_client_error() -> None:
    dice = random.Random(7)
    outcomes = []
    for _ in range(400):
        body = bytearray(BODY)
        for _ in range(dice.choice((1, 2, 8))):
            body[dice.randrange(len(body))] = dice.choice((0, 10, 13, 34, 45, 58, 59, 92, dice.randrange(256)))
        try:
            await decoded(bytes(body[: dice.choice((len(body), dice.randrange(len(body)))) or 1]))
        except InvalidArgument as e:
            outcomes.append(e.message)
    assert len(outcomes) > 200


async def test_other_work_runs_while_a_large_form_is_parsed() -> None:
    async def receive() -> Any:
        chunk = next(chunks)
        return {"type": "http.request", "body": chunk, "more_body": len(chunk) > 2}

    body = form(part("file", bytes(8 << 20)))
    chunks = iter([*(body[at : at + 4096] for at in range(0, len(body), 4096)), b""])
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    with Bodies(HttpConfig()).open("client", TYPE) as given:
        await given.read(receive)
        task = asyncio.create_task(other())
        await given.decode_form(Upload)
        task.cancel()
    assert turns > 20
