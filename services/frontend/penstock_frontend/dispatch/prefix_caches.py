"""The prefix caches of engines, as far as known: which has which KV blocks of a prompt, in which medium."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import compress, islice

import msgspec

from penstock_common.block_hash import DIGEST_SIZE, BlockHasher
from penstock_common.errors import Internal
from penstock_common.types.kv_transfer import AllBlocksCleared, BlockRemoved, BlockStored, KvCacheEvent, KvMedium
from penstock_common.types.media import MultiModalFeature
from penstock_common.types.prompt_embeds import PromptEmbeds
from penstock_common.types.request import EngineCoreRequest, RequestContext


class BlockPlaces:
    """Of the blocks that one engine has outside its KV cache, in which media they are, the KV cache among them. All others are in
    the KV cache alone, so an engine without host memory and disk takes no memory here. Pure.
    """

    def __init__(self) -> None:
        self._media: dict[bytes, int] = {}
        """A bit for each medium."""

    def stored(self, medium: KvMedium, block_hashes: Iterable[bytes], has: Callable[[bytes], bool]) -> None:
        """The engine has blocks in a medium from now on. ``has``: whether it was known to have one, wherever."""
        if medium is KvMedium.DEVICE:
            for block_hash in block_hashes if self._media else ():
                if block_hash in self._media:
                    self._media[block_hash] |= _DEVICE
            return
        for block_hash in block_hashes:
            before = self._media.get(block_hash)
            if before is None:
                before = _DEVICE if has(block_hash) else 0
            self._media[block_hash] = before | 1 << medium

    def removed(self, medium: KvMedium, block_hashes: Iterable[bytes]) -> list[bytes]:
        """It has them there no more. Returns those that it has nowhere now."""
        nowhere = []
        for block_hash in block_hashes:
            before = self._media.get(block_hash)
            if before is None:
                if medium is KvMedium.DEVICE:
                    nowhere.append(block_hash)
                continue
            left = before & ~(1 << medium)
            if left & ~_DEVICE:
                self._media[block_hash] = left
                continue
            del self._media[block_hash]
            if not left:
                nowhere.append(block_hash)
        return nowhere

    def clear(self) -> None:
        """It has none."""
        self._media.clear()


_DEVICE = 1 << KvMedium.DEVICE


_STRIDE = 32
"""Blocks of which only the last is looked up while every engine that had the one before has it."""

_DIGITS = bytes.maketrans(b"01", b"\0\1")


class PrefixIndex:
    """From a block's hash to the engines that have it. Pure: whoever hears of changes tells it.

    An engine is a bit, so that one look-up answers for all of them. The index holds ``max_entries`` pairs of a block and an
    engine; what comes while it is full is left out, and so is what comes behind a block that is not known: engines evict
    a prompt's last blocks first, so whoever has a block has those before it.
    """

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._num_entries = 0
        self._holders: dict[bytes, int] = {}
        self._blocks: dict[str, set[bytes]] = {}
        self._bits: dict[str, int] = {}
        self._engines: list[str] = []
        """By place of their bits; empty where there is none."""

    def __len__(self) -> int:
        """Pairs of a block and an engine."""
        return self._num_entries

    @property
    def full(self) -> bool:
        """Whether something more would be left out."""
        return self._num_entries >= self._max_entries

    def num_on(self, engine: str) -> int:
        """Blocks that an engine is known to have."""
        return len(self._blocks.get(engine, ()))

    def has(self, engine: str, block_hash: bytes) -> bool:
        """Whether an engine is known to have a block."""
        return block_hash in self._blocks.get(engine, ())

    def store(self, engine: str, block_hashes: Iterable[bytes], parent: bytes = b"") -> int:
        """An engine has these blocks from now on, which stand behind ``parent``; empty: at the beginning, or anywhere.
        Returns how many of them were left out.
        """
        blocks, bit, holders = self._blocks_of(engine), self._bits[engine], self._holders
        left_out = 0
        known = not parent or parent in blocks
        for block_hash in block_hashes:
            if block_hash in blocks:
                continue
            if not known or self._num_entries >= self._max_entries:
                left_out += 1
                continue
            blocks.add(block_hash)
            others = holders.get(block_hash)
            holders[block_hash] = bit if others is None else others | bit
            self._num_entries += 1
        return left_out

    def remove(self, engine: str, block_hashes: Iterable[bytes]) -> None:
        """An engine has these blocks no longer; those that it is not known to have do not matter."""
        blocks = self._blocks.get(engine)
        if blocks is None:
            return
        for block_hash in block_hashes:
            if block_hash in blocks:
                blocks.remove(block_hash)
                self._release(block_hash, self._bits[engine])

    def clear(self, engine: str) -> None:
        """An engine has no blocks any more, or it is gone."""
        blocks = self._blocks.pop(engine, None)
        if blocks is None:
            return
        bit = self._bits.pop(engine)
        self._engines[bit.bit_length() - 1] = ""
        for block_hash in blocks:
            self._release(block_hash, bit)

    def runs(self, block_hashes: Iterable[bytes], block_size: int = 1) -> dict[str, int]:
        """By engine, how many of a prompt's tokens are in the blocks that it has; engines without the first block are not there.
        ``block_hashes`` is read a few blocks further than any engine has them.
        """
        holders = self._holders
        runs: dict[str, int] = {}
        hashes = iter(block_hashes)
        first = next(hashes, b"")
        engines, count = holders.get(first, 0), 1
        while engines:
            stride = list(islice(hashes, _STRIDE))
            if not stride:
                self._end(runs, engines, count * block_size)
                break
            place = 0
            while engines and engines & ~holders.get(stride[-1], 0):
                place = self._first_lost(engines, stride, place)
                lost = engines & ~holders.get(stride[place], 0)
                self._end(runs, lost, (count + place) * block_size)
                engines ^= lost
            count += len(stride)
        return runs

    def _first_lost(self, engines: int, stride: Sequence[bytes], first: int) -> int:
        """The place from ``first`` on of the first block that not all of these engines have; they do not all have the last."""
        last = len(stride) - 1
        while first < last:
            middle = (first + last) // 2
            if engines & ~self._holders.get(stride[middle], 0):
                last = middle
            else:
                first = middle + 1
        return first

    def _end(self, runs: dict[str, int], engines: int, length: int) -> None:
        """The runs of these engines are so long."""
        if engines & (engines - 1):
            digits = f"{engines:b}"[::-1].encode().translate(_DIGITS)
            runs.update(dict.fromkeys(compress(self._engines, digits), length))
        else:
            runs[self._engines[engines.bit_length() - 1]] = length

    def _blocks_of(self, engine: str) -> set[bytes]:
        blocks = self._blocks.get(engine)
        if blocks is None:
            if "" not in self._engines:
                self._engines.append("")
            place = self._engines.index("")
            self._engines[place], self._bits[engine] = engine, 1 << place
            blocks = self._blocks[engine] = set()
        return blocks

    def _release(self, block_hash: bytes, bit: int) -> None:
        self._num_entries -= 1
        if left := self._holders[block_hash] & ~bit:
            self._holders[block_hash] = left
        else:
            del self._holders[block_hash]


MAX_BLOCKS_LOOKED_UP = 4096
"""Of a prompt: hashing so many takes some 4 ms of the event loop. What an engine has cached beyond them does not count."""


class _Sequence(msgspec.Struct):
    """What blocks are hashed of: a ``penstock_common.block_hash.Hashed``."""

    context: RequestContext
    all_token_ids: list[int]
    prompt_embeds: PromptEmbeds | None
    mm_features: list[MultiModalFeature]
    block_hashes: list[bytes]
    lora_digest: bytes


class _Cache(msgspec.Struct):
    """``recorded``: what has happened since the engine was asked for its whole state; None while that is not under way."""

    block_size: int
    recorded: list[KvCacheEvent] | None = None
    places: BlockPlaces = msgspec.field(default_factory=BlockPlaces)


class PrefixCaches:
    """Follows the prefix caches of engines, and looks prompts up in all of them at once. Does no I/O. A block that an engine has
    in host memory or on a disk counts as one in its KV cache: to load it takes a few percent of the time to compute it.

    Events tell what changes during a session. What was there before an engine tells when it is asked: ``begin``, then ``settle``
    with the answer. Events in between are kept and repeated over it: what they say last of a block holds, whether or not
    the answer has it already, so the answer may be of any moment in between, and each part of it of another.
    """

    def __init__(self, max_blocks: int) -> None:
        """``max_blocks``: blocks that are remembered, each counted once for every engine that has it."""
        self._index = PrefixIndex(max_blocks)
        self._caches: dict[str, _Cache] = {}
        self._hashers: dict[int, BlockHasher] = {}
        """By block size, of the engines that there are."""

    @property
    def num_blocks(self) -> int:
        """Blocks that are remembered, each counted once for every engine that has it."""
        return len(self._index)

    @property
    def full(self) -> bool:
        """Whether as many are remembered as may be."""
        return self._index.full

    def num_on(self, engine: str) -> int:
        """Blocks that an engine is known to have."""
        return self._index.num_on(engine)

    def begin(self, engine: str, block_size: int) -> None:
        """Follow an engine, of which nothing is known yet. It is being asked for what it has: ``settle`` must follow."""
        self._index.clear(engine)
        self._caches[engine] = _Cache(block_size, recorded=[])
        self._look_for_block_sizes()

    def settle(self, engine: str, answers: Mapping[KvMedium, bytes] | None) -> None:
        """What an engine has answered: the digests of its blocks in each medium, one behind the other; None: nothing, so only
        what it has told since is known. Raises Internal where they cannot be digests.
        """
        cache = self._caches.get(engine)
        if cache is None or cache.recorded is None:
            return
        recorded, cache.recorded = cache.recorded, None
        if answers is None:
            return
        found = {medium: _digests(answer) for medium, answer in answers.items()}
        self._clear(engine, cache)
        for medium, block_hashes in found.items():
            self._store(engine, cache, medium, block_hashes)
        for event in recorded:
            self._apply(engine, cache, event)

    def apply(self, engine: str, events: Sequence[KvCacheEvent]) -> None:
        """An engine's prefix cache has changed. Engines that are not followed do not matter."""
        cache = self._caches.get(engine)
        if cache is None:
            return
        if cache.recorded is not None:
            cache.recorded += events
        for event in events:
            self._apply(engine, cache, event)

    def gone(self, engine: str) -> None:
        """An engine is followed no longer, and its cache may be gone."""
        self._index.clear(engine)
        self._caches.pop(engine, None)
        self._look_for_block_sizes()

    def cached_tokens(self, request: EngineCoreRequest, output_token_ids: Sequence[int] = ()) -> dict[str, int]:
        """By engine, how many of the first tokens of a request, and of the output that it goes on from, need not be computed
        there; engines that have none are not in it. The last token is always computed. Empty where the request does not read the
        cache.
        """
        if not len(self._index) or request.skips_prefix_cache:
            return {}
        embeds = request.prompt_embeds
        token_ids = request.prompt_token_ids
        if embeds is not None and not token_ids:
            token_ids = [0] * embeds.num_tokens
        digest = request.lora.digest if request.lora is not None else b""
        all_token_ids = [*token_ids, *output_token_ids]
        sequence = _Sequence(request.context, all_token_ids, embeds, request.mm_features, [], digest)
        num_tokens = len(sequence.all_token_ids)
        cached: dict[str, int] = {}
        for size, hasher in self._hashers.items():
            sequence.block_hashes = []
            found = self._index.runs(_hashes(hasher, sequence), size)
            if num_tokens % size == 0:  # an engine may have all of them
                found = {engine: min(count, num_tokens - 1) for engine, count in found.items()}
            cached |= found
        return cached

    def _apply(self, engine: str, cache: _Cache, event: KvCacheEvent) -> None:
        match event:
            case BlockStored():
                self._store(engine, cache, event.medium, event.block_hashes, event.parent_hash)
            case BlockRemoved():
                self._index.remove(engine, cache.places.removed(event.medium, event.block_hashes))
            case AllBlocksCleared():
                self._clear(engine, cache)

    def _store(
        self, engine: str, cache: _Cache, medium: KvMedium, block_hashes: Sequence[bytes], parent: bytes = b""
    ) -> None:
        cache.places.stored(medium, block_hashes, partial(self._index.has, engine))
        self._index.store(engine, block_hashes, parent)

    def _clear(self, engine: str, cache: _Cache) -> None:
        cache.places.clear()
        self._index.clear(engine)

    def _look_for_block_sizes(self) -> None:
        sizes = {cache.block_size for cache in self._caches.values()}
        self._hashers = {size: self._hashers.get(size) or BlockHasher(size) for size in sorted(sizes)}


def with_media(cached: Mapping[str, int], held: Mapping[str, Sequence[MultiModalFeature]]) -> dict[str, int]:
    """By engine, tokens that need not be computed there, in which the media that it has count as if it had cached their tokens.
    ``held``: by engine, the media of a request that it has.
    """
    counts = dict(cached)
    for engine, features in held.items():
        prefix = cached.get(engine, 0)
        counts[engine] = prefix + sum(
            feature.end - max(feature.offset, prefix) for feature in features if feature.end > prefix
        )
    return counts


def _digests(answer: bytes) -> list[bytes]:
    """Raises Internal."""
    if len(answer) % DIGEST_SIZE:
        raise Internal(f"the engine's cached blocks are {len(answer)} bytes; a digest has {DIGEST_SIZE}")
    return [answer[start : start + DIGEST_SIZE] for start in range(0, len(answer), DIGEST_SIZE)]


def _hashes(hasher: BlockHasher, sequence: _Sequence) -> Iterator[bytes]:
    """Of the sequence's full blocks, each computed when it is asked for."""
    for index in range(min(len(sequence.all_token_ids) // hasher.block_size, MAX_BLOCKS_LOOKED_UP)):
        hasher.extend(sequence, (index + 1) * hasher.block_size)
        yield sequence.block_hashes[index]
