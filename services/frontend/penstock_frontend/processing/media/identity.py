"""What a medium is known by in every store and cache."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from penstock_common.types.media import Modality, TensorData
from penstock_frontend.media_parts import EncodedFile, Features, Frames

_KEY_BYTES = hashlib.blake2b.MAX_KEY_SIZE
_LENGTH_BYTES = 8
_canonical = msgspec.json.Encoder(order="deterministic")

_DECODING = b"2"
"""Version of how files become pixels and samples. Raise it when the same file gives other ones: engines and tiers keep embeddings
and KV blocks for longer than a frontend runs. 2: alpha is composited on white, and 16-bit grey is scaled.
"""

Arguments = bytes
"""Of a processor: a JSON object, the same for the same whatever order they came in."""
Content = EncodedFile | Frames | Features
"""A medium that is here."""


def identifier(
    modality: Modality,
    content: Content,
    *,
    family: bytes,
    arguments: Arguments,
    cache_salt: str,
) -> str:
    """64 hexadecimal digits: BLAKE2b-256, keyed with the salt, over all that the medium's embeddings depend on, each with its
    length.

    ``family``: ``Family.identity``. What clients call a medium is no part of it.
    """
    hashed = hashlib.blake2b(digest_size=32, key=_key(cache_salt))
    for field in (modality.encode(), family, arguments, *_fields(content)):
        hashed.update(len(field).to_bytes(_LENGTH_BYTES, "little"))
        hashed.update(field)
    return hashed.hexdigest()


def arguments_of(processor_kwargs: Mapping[str, Any]) -> Arguments:
    """Raises ValueError for what JSON has no word for."""
    try:
        return _canonical.encode(dict(processor_kwargs))
    except (TypeError, ValueError, OverflowError, RecursionError) as e:
        raise ValueError("cannot be written as JSON") from e


def _key(cache_salt: str) -> bytes:
    salt = cache_salt.encode()
    return salt if len(salt) <= _KEY_BYTES else hashlib.blake2b(salt, digest_size=32).digest()


def _fields(content: Content) -> Iterator[bytes | bytearray]:
    """Begins with the kind, so that none can be taken for another."""
    if isinstance(content, EncodedFile):
        yield from (b"file", _DECODING, content.data)
    elif isinstance(content, Frames):
        yield from (b"frames", _DECODING)
        for frame in content.frames:
            yield from (repr(float(frame.timestamp)).encode(), frame.data)
    else:
        yield b"features"
        yield from _tensors(content.tensors.items())


def _tensors(tensors: Iterable[tuple[str, TensorData]]) -> Iterator[bytes | bytearray]:
    for name, tensor in sorted(tensors, key=lambda item: item[0]):
        yield from (name.encode(), tensor.dtype.encode(), _canonical.encode(tensor.shape), tensor.data)
