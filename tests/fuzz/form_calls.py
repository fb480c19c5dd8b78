"""Hostile forms with audio files: forms that are almost valid, and malformed forms."""

from random import Random
from typing import NamedTuple

from tests.fuzz.seeds import MODEL

PATHS = ("/v1/audio/transcriptions", "/v1/audio/translations")
_BOUNDARY = "limit-7"
_FIELDS: dict[str, tuple[str, ...]] = {
    "model": (MODEL, "", "none", "x" * 5000),
    "language": ("de", "", "german", "zz", "\0"),
    "prompt": ("", "a", "\u202e\0", "a" * 100_000),
    "response_format": ("json", "text", "srt", "vtt", "verbose_json", "diarized_json", ""),
    "temperature": ("0", "0.4", "-1", "2", "nan", "inf", "1e999", "x"),
    "stream": ("true", "false", "1", "perhaps"),
    "seed": ("0", "-9223372036854775808", "9" * 50, "1.5"),
    "timestamp_granularities[]": ("word", "segment", "line"),
    "timestamp_granularities": ("word", "[]"),
    "include[]": ("logprobs",),
    "chunking_strategy": ("auto", "none"),
    "chunking_strategy[type]": ("server_vad",),
    "priority": ("1", "9" * 50),
    "lora": ("", "none"),
    "unknown": ("x",),
    "a[b[c]]": ("x",),
    "[]": ("x",),
}
_STARTS = (b"RIFF\xff\xff\xff\xffWAVE", b"fLaC", b"OggS", b"ID3\4", b"\0\0\0\x18ftypM4A ", b"\x1aE\xdf\xa3", b"")
_HEADERS = (
    "Content-Transfer-Encoding: base64\r\n",
    "Content-Type: text/plain; charset=utf-16\r\n",
    "X: " + "y" * 10_000 + "\r\n",
    "X: y\r\n" * 100,
    "no colon\r\n",
    ": \r\n",
)


class Form(NamedTuple):
    """Path, header Content-Type and body of a request."""

    path: str
    content_type: str
    body: bytes


def make_form(rng: Random) -> Form:
    """Return a hostile form."""
    file = rng.choice(_STARTS) + rng.randbytes(rng.choice((0, 10, 5000)))
    parts = [_part("file", file, rng, '; filename="a.wav"')] * rng.choice((0, 1, 1, 1, 1, 2))
    for name in rng.choices(list(_FIELDS), k=rng.choice((0, 1, 2, 5, 200))):
        parts.append(_part(name, rng.choice(_FIELDS[name]).encode(), rng))
    rng.shuffle(parts)
    body = b"".join(parts) + f"--{_BOUNDARY}--\r\n".encode()
    if rng.random() < 0.3:
        body = _damaged(body, rng)
    content_type = f"multipart/form-data; boundary={_BOUNDARY}"
    if rng.random() < 0.1:
        content_type = rng.choice(("multipart/form-data", "application/json", f"{content_type}{'x' * 300}", "\xff"))
    return Form(rng.choice(PATHS), content_type, body)


def _part(name: str, content: bytes, rng: Random, of_file: str = "") -> bytes:
    headers = rng.choice(_HEADERS) if rng.random() < 0.03 else ""
    head = f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"{of_file}\r\n{headers}\r\n'
    return head.encode() + content + b"\r\n"


def _damaged(body: bytes, rng: Random) -> bytes:
    how = rng.randrange(5)
    if how == 0:
        return body[: rng.randrange(len(body) + 1)]
    if how == 1:
        made = bytearray(body)
        for _ in range(rng.choice((1, 4, 32))):
            made[rng.randrange(len(made))] = rng.choice((0, 10, 13, 34, 45, 58, 59, rng.randrange(256)))
        return bytes(made)
    if how == 2:
        return body.replace(b"\r\n", b"\n")
    if how == 3:
        return f"--{_BOUNDARY}\r\n".encode() * 10_000
    return b"preamble\r\n" + body + rng.randbytes(1000)
