"""Decoding of byte-level vocabularies (GPT-2, Llama 3, Qwen): there a token is some bytes, whatever stands beside it."""

from collections.abc import Callable, Sequence

import tokenizers

_Decode = Callable[[Sequence[int]], str]


class OddTokenError(Exception):
    """A token whose text is not that of its bytes."""


class ByteLevelDecoder:
    """What the library's decoder gives, in a fifth of the time for the few tokens that a stream decodes at once.

    The bytes of a token are looked up once, and held against what the library makes of the token alone.
    """

    def __init__(self, backend: tokenizers.Tokenizer, decode: _Decode) -> None:
        """``decode``: the library's, special tokens included."""
        self._bytes_of = _Bytes(backend, decode).__getitem__

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ``token_ids``; ids without a token are left out. Raises OddTokenError when the library has to do it."""
        return b"".join(map(self._bytes_of, token_ids)).decode("utf-8", "replace")


def is_byte_level(backend: tokenizers.Tokenizer) -> bool:
    """Whether the decoder joins the bytes of tokens and does nothing else."""
    return isinstance(backend.decoder, tokenizers.decoders.ByteLevel)


class _Bytes(dict[int, bytes]):
    """Filled as tokens come."""

    def __init__(self, backend: tokenizers.Tokenizer, decode: _Decode) -> None:
        super().__init__()
        self._backend = backend
        self._decode = decode
        self._odd: set[int] = set()

    def __missing__(self, token_id: int) -> bytes:
        if token_id in self._odd:
            raise OddTokenError
        data = spelt_bytes(self._backend.id_to_token(token_id) or "")
        if data.decode("utf-8", "replace") != self._decode([token_id]):
            self._odd.add(token_id)
            raise OddTokenError
        self[token_id] = data
        return data


def _byte_of_char() -> dict[str, int]:
    """How byte-level vocabularies write bytes: printable ones of Latin-1 as they are, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()


def spelt_bytes(token: str) -> bytes:
    """Return the bytes that a byte-level vocabulary spells by a token; a token with other characters is its own text."""
    try:
        return bytes(_BYTE_OF_CHAR[char] for char in token)
    except KeyError:
        return token.encode()
