"""Requests whose framing is ambiguous or invalid, and the statuses that RFC 9112 leaves a server for them."""

from random import Random

_HIDDEN = b"GET /ping HTTP/1.1\r\nhost: localhost\r\n\r\n"
"""A request inside the body of another request. If the framing is ambiguous, no server may answer this request."""
_SIZE = len(_HIDDEN)
_REJECTED = frozenset({400, 501})
"""Statuses for an invalid request or an unknown transfer coding."""
_TAKEN = frozenset({200, 400, 404, 411, 413, 422, 501})
"""Statuses if a server may also accept one interpretation. The server must then close the connection."""
_BODY = b'{"prompt":"a"}'


def _post(headers: bytes, body: bytes = b"", *, host: bytes = b"host: localhost\r\n") -> bytes:
    return b"POST /tokenize HTTP/1.1\r\n" + host + b"content-type: application/json\r\n" + headers + b"\r\n" + body


_LENGTH = b"content-length: %d\r\n" % len(_BODY)
_CHUNKED = b"transfer-encoding: chunked\r\n"
_CHUNKS = b"%x\r\n%s\r\n0\r\n\r\n" % (len(_BODY), _BODY)
_SHAPES: dict[str, tuple[bytes, frozenset[int]]] = {
    "length and chunked": (_post(b"content-length: 4\r\n" + _CHUNKED, b"0\r\n\r\n" + _HIDDEN), _TAKEN),
    "chunked and length": (_post(_CHUNKED + b"content-length: %d\r\n" % (_SIZE + 5), b"0\r\n\r\n" + _HIDDEN), _TAKEN),
    "two lengths": (_post(b"content-length: 0\r\ncontent-length: %d\r\n" % _SIZE, _HIDDEN), _REJECTED),
    "two lengths in one": (_post(b"content-length: 0, %d\r\n" % _SIZE, _HIDDEN), _REJECTED),
    "length with a sign": (_post(b"content-length: +%d\r\n" % len(_BODY), _BODY), _REJECTED),
    "negative length": (_post(b"content-length: -1\r\n", _HIDDEN), _REJECTED),
    "length with a space in it": (_post(b"content-length: 1 4\r\n", _BODY + _HIDDEN), _REJECTED),
    "hexadecimal length": (_post(b"content-length: 0xe\r\n", _BODY + _HIDDEN), _REJECTED),
    "length that is huge": (_post(b"content-length: " + b"9" * 40 + b"\r\n", _HIDDEN), frozenset({400, 413})),
    "empty length": (_post(b"content-length: \r\n", _HIDDEN), _REJECTED),
    "unknown coding": (_post(b"transfer-encoding: xchunked\r\n" + _LENGTH, _BODY + _HIDDEN), _REJECTED),
    "identity and length": (_post(b"transfer-encoding: identity\r\n" + _LENGTH, _BODY + _HIDDEN), _REJECTED),
    "chunked is not last": (_post(b"transfer-encoding: chunked, identity\r\n", b"0\r\n\r\n" + _HIDDEN), _REJECTED),
    "two codings": (_post(_CHUNKED + b"transfer-encoding: identity\r\n", b"0\r\n\r\n" + _HIDDEN), _REJECTED),
    "chunked twice": (_post(b"transfer-encoding: chunked, chunked\r\n", b"0\r\n\r\n" + _HIDDEN), _REJECTED),
    "coding behind a tab": (_post(b"transfer-encoding: \x0bchunked\r\n" + _LENGTH, _BODY + _HIDDEN), _REJECTED),
    "space before the colon": (_post(b"transfer-encoding : chunked\r\n" + _LENGTH, _BODY + _HIDDEN), _REJECTED),
    "folded coding": (_post(b"transfer-encoding:\r\n chunked\r\n" + _LENGTH, b"0\r\n\r\n" + _HIDDEN), _TAKEN),
    "folded length": (_post(b"x: y\r\n content-length: %d\r\n" % _SIZE, b""), _TAKEN),
    "bare CR in a header": (_post(b"x: y\rcontent-length: %d\r\n" % _SIZE, b""), _TAKEN),
    "NUL in a header": (_post(b"x: \0\r\n" + _LENGTH, _BODY), _REJECTED),
    "bare LF": (_post(_LENGTH, _BODY).replace(b"\r\n", b"\n"), _TAKEN),
    "bare CR": (_post(_LENGTH, _BODY).replace(b"\r\n", b"\r"), _REJECTED),
    "no host": (_post(_LENGTH, _BODY, host=b""), _REJECTED),
    "two hosts": (_post(_LENGTH, _BODY, host=b"host: localhost\r\nhost: y\r\n"), _REJECTED),
    "header without a name": (_post(b": x\r\n" + _LENGTH, _BODY), _REJECTED),
    "header without a colon": (_post(b"content-length\r\n" + _LENGTH, _BODY), _REJECTED),
    "version 1.0 and chunked": (_post(_CHUNKED, _CHUNKS + _HIDDEN).replace(b"HTTP/1.1", b"HTTP/1.0", 1), _TAKEN),
    "version 9.9": (_post(_LENGTH, _BODY).replace(b"HTTP/1.1", b"HTTP/9.9", 1), frozenset({400, 505})),
    "no version": (b"GET /ping\r\nhost: localhost\r\n\r\n", _TAKEN | {505}),
    "two spaces": (b"GET  /ping HTTP/1.1\r\nhost: localhost\r\n\r\n", _TAKEN),
    "four words": (b"GET /ping x HTTP/1.1\r\nhost: localhost\r\n\r\n", _TAKEN),
    "space before a header": (b"GET /ping HTTP/1.1\r\n x: y\r\nhost: localhost\r\n\r\n", _TAKEN),
}


def smuggling(rng: Random) -> tuple[str, bytes, frozenset[int]]:
    """Return name, bytes and allowed statuses of a smuggling attempt."""
    name = rng.choice(list(_SHAPES))
    raw, allowed = _SHAPES[name]
    return name, raw, allowed | {408}  # a busy machine sends the pieces too slowly
