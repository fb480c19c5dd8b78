"""Compressed bodies are decompressed in bounded pieces, and damaged ones are refused."""

import gzip
import random
import tracemalloc
import zlib
from collections.abc import Callable

import brotli
import pytest

from penstock_common.errors import InvalidArgument
from penstock_frontend.api.http.request_body import MAX_NESTING, PIECE, JsonSize, check_json_size, decompressor_of, zstd
from penstock_frontend.api.openai.errors import HttpError


def raw_deflate(data: bytes) -> bytes:
    stream = zlib.compressobj(wbits=-15)
    return stream.compress(data) + stream.flush()


CODECS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": ("gzip", gzip.compress),
    "x-gzip": ("X-GZip", gzip.compress),
    "deflate": ("deflate", zlib.compress),
    "deflate without a header": ("deflate", raw_deflate),
    "br": ("br", brotli.compress),
    "zstd": (" zstd ", zstd.compress),
}
ALL = pytest.mark.parametrize("codec", CODECS)


def decompressed(encoding: str, *parts: bytes) -> bytes:
    decompressor = decompressor_of(encoding)
    assert decompressor is not None
    pieces = [piece for part in parts for piece in decompressor.pieces(part)]
    assert all(len(piece) <= 4 * PIECE for piece in pieces)
    decompressor.finish()
    return b"".join(pieces)


@ALL
@pytest.mark.parametrize("size", [0, 1, 1000, PIECE, 3 * PIECE + 17])
@pytest.mark.parametrize("part", [1, 7, 10_000_000])
def test_bodies_become_what_they_were(codec: str, size: int, part: int) -> None:
    encoding, compress = CODECS[codec]
    data = random.Random(size).randbytes(min(size, 3000)) + b"a" * max(size - 3000, 0)
    body = compress(data)
    assert decompressed(encoding, *[body[i : i + part] for i in range(0, len(body), part)]) == data


@ALL
def test_a_body_that_becomes_far_larger_comes_in_pieces(codec: str) -> None:
    encoding, compress = CODECS[codec]
    body = compress(bytes(100 << 20))
    decompressor = decompressor_of(encoding)
    assert decompressor is not None
    tracemalloc.start()
    size = 0
    for piece in decompressor.pieces(body):
        size += len(piece)
        if size > 2 << 20:
            break
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 12 << 20


@ALL
@pytest.mark.parametrize("damage", ["cut", "more", "garbage"])
def test_damaged_bodies_are_refused(codec: str, damage: str) -> None:
    encoding, compress = CODECS[codec]
    body = compress(b'{"model": "m", "prompt": "Once upon a time"}' * 10)
    body = {"cut": body[:-1], "more": body + b"{}", "garbage": b'{"model": "m"}'}[damage]
    with pytest.raises(HttpError, match="the body cannot be decompressed as") as refused:
        decompressed(encoding, body)
    assert refused.value.status == 400


@ALL
def test_an_empty_body_is_empty(codec: str) -> None:
    assert decompressed(CODECS[codec][0], b"") == b""


@pytest.mark.parametrize("encoding", ["", "identity", " Identity "])
def test_bodies_may_be_as_they_are(encoding: str) -> None:
    assert decompressor_of(encoding) is None


@pytest.mark.parametrize("encoding", ["compress", "gzip, br", "base64"])
def test_other_encodings_are_refused_by_name(encoding: str) -> None:
    with pytest.raises(
        HttpError, match=f"{encoding}'; supported: one of br, deflate, gzip, zstd, or no Content-Encoding"
    ) as refused:
        decompressor_of(encoding)
    assert refused.value.status == 415


def test_a_window_beyond_https_is_refused() -> None:
    compressor = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: 27})
    body = compressor.compress(random.Random(1).randbytes(1000)) + compressor.flush()
    with pytest.raises(HttpError, match="zstd"):
        decompressed("zstd", body)


# The values and objects in a JSON text, counted before the text is decoded.

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


async def test_bodies_beyond_a_limit_are_refused() -> None:
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
async def test_too_deep_nesting_is_refused(begin: bytes, end: bytes) -> None:
    repeats = MAX_NESTING // (begin.count(b"[") + begin.count(b"{"))
    limits = {"max_values": 10_000, "max_objects": 10_000}
    await check_json_size(begin * repeats + b"1" + end * repeats, **limits)
    await check_json_size(b"[%b]" % b",".join([b'{"a":[1]}'] * MAX_NESTING), **limits)
    with pytest.raises(InvalidArgument, match="lists and objects are nested more than 512 levels deep"):
        await check_json_size(begin * (repeats + 1) + b"1" + end * (repeats + 1), **limits)
