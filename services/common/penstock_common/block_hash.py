"""Content hashes of KV cache blocks. Engines use the hashes for caching, and frontends use them for routing. Engines
and frontends compute equal hashes.

A block's hash covers its parent's hash, its token IDs and its extra keys, so equal hashes mean equal prefixes. The hash
is BLAKE2b with 128 bits. Every process computes the same hash for the same block. The hash is strong enough that no
client can craft a prompt that reads another tenant's blocks. (BLAKE2b takes 0.6 us for a block of 64 bytes of token
IDs, half as long as BLAKE3.)
"""

import hashlib
import struct
from bisect import bisect_right
from collections.abc import Sequence
from operator import attrgetter
from typing import Protocol

from penstock_common.types.media import MultiModalFeature
from penstock_common.types.prompt_embeds import PromptEmbeds
from penstock_common.types.request import RequestContext

DIGEST_SIZE = 16
_PERSON = b"penstock-block-1"
_NO_TEXT = b"\xff"
"""Separator between the cache salt and the adapter's digest in a block's extra keys: a byte that UTF-8 never contains.

Without the separator, one salt could equal the concatenation of another salt and an adapter.
"""


_MEDIUM = b"\xfe"
"""First byte of the key of a media item, which is a part of a block's extra keys. UTF-8 never contains this byte, and
no key of an adapter begins with this byte.
"""
_PAIR = struct.Struct("<qq").pack
_END = attrgetter("end")


class Hashed(Protocol):
    """A sequence whose blocks are hashed: its tokens, and all other data that determine the content of its blocks."""

    context: RequestContext
    all_token_ids: list[int]
    prompt_embeds: PromptEmbeds | None
    mm_features: list[MultiModalFeature]
    """Media items in order of position, without overlaps."""
    block_hashes: list[bytes]
    """Hashes of the blocks that have been hashed so far."""

    @property
    def lora_digest(self) -> bytes:
        """Digest of the applied LoRA adapter, or empty bytes without an adapter."""


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST_SIZE, person=_PERSON).digest()


def root_hash(block_size: int) -> bytes:
    """Return the hash that the first block of every sequence uses as its parent's hash. The value depends on the block
    size, so the hashes of blocks of different sizes are never equal.
    """
    return _digest(struct.pack("<I", block_size))


def extra_keys(sequence: Hashed, start: int, end: int) -> bytes:
    """Return the extra keys of the block with positions ``start`` to ``end``.

    The extra keys of the first block contain the cache salt and the LoRA adapter. The hashes of later blocks also cover
    salt and adapter, through the parent's hash. The extra keys of every block also cover the block's prompt embeddings
    and media.
    """
    keys = b""
    if start == 0:
        keys = sequence.context.cache_salt.encode()
        if sequence.lora_digest:
            keys += _NO_TEXT + sequence.lora_digest
    embeds = sequence.prompt_embeds
    if embeds is not None and start < embeds.num_tokens:
        keys += _vectors_digest(embeds, start, end)
    if sequence.mm_features:
        for feature in media_between(sequence.mm_features, start, end):
            keys += _MEDIUM + _media_key(feature, start, end)
    return keys


def media_between(features: Sequence[MultiModalFeature], start: int, end: int) -> Sequence[MultiModalFeature]:
    """Return the media items that overlap the positions from ``start`` to ``end``. ``features`` must be in order of
    position.
    """
    first = last = bisect_right(features, start, key=_END)
    while last < len(features) and features[last].offset < end:
        last += 1
    return features[first:last]


def _media_key(feature: MultiModalFeature, start: int, end: int) -> bytes:
    """Return the key of a media item for the block from ``start`` to ``end``.

    The key covers the item's identifier and which part of the item is in the block.
    """
    runs = b"".join(
        _PAIR(run.start, run.count)
        for run in feature.embed_runs
        if feature.offset + run.start < end and start < feature.offset + run.start + run.count
    )
    return feature.identifier.encode() + _PAIR(feature.offset - start, len(runs)) + runs


def _vectors_digest(embeds: PromptEmbeds, start: int, end: int) -> bytes:
    """Return the digest of the embeddings at the positions from ``start`` to ``end``.

    The digest is cached, and the sequences of a request share the cache.
    """
    digest: bytes | None = embeds.memo.get((start, end))
    if digest is None:
        # Blocks are hashed in order. When the previous block was hashed, ``memo`` got the number of this block's first
        # row.
        first: int | None = embeds.memo.get(("first row", start))
        if first is None:
            first = embeds.num_vectors(0, start)
        last = embeds.memo[("first row", end)] = first + embeds.num_vectors(start, end)
        rows = embeds.data[first * embeds.row_bytes : last * embeds.row_bytes]
        places = bytes(embeds.is_vector(position) for position in range(start, end))
        digest = embeds.memo[(start, end)] = _digest(embeds.dtype.encode() + places + rows)
    return digest


class BlockHasher:
    """Extends a sequence's ``block_hashes`` as its tokens fill blocks."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._root = root_hash(block_size)
        self._pack = struct.Struct(f"<{block_size}I").pack

    def extend(self, sequence: Hashed, num_tokens: int) -> None:
        """Hash the blocks that are not hashed yet, and that the first ``num_tokens`` tokens of the sequence fill
        completely.
        """
        hashes = sequence.block_hashes
        token_ids = sequence.all_token_ids
        for index in range(len(hashes), num_tokens // self.block_size):
            parent = hashes[-1] if hashes else self._root
            start = index * self.block_size
            end = start + self.block_size
            tokens = self._pack(*token_ids[start:end])
            hashes.append(_digest(parent + tokens + extra_keys(sequence, start, end)))
