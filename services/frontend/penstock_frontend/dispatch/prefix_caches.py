"""Index of the engines' prefix caches: which KV blocks each engine has, and in which media."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
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
    """Tracks the blocks that one engine has in media outside its KV cache, such as host memory and disk. Does no I/O.

    Blocks that are only in the KV cache are not stored here. If an engine has no tiers in host memory or on disk, its
    object therefore stays empty.
    """

    def __init__(self) -> None:
        self._media: dict[bytes, int] = {}
        """Media in which each block is, as a bit mask with one bit per medium."""

    def stored(self, medium: KvMedium, block_hashes: Iterable[bytes], has: Callable[[bytes], bool]) -> None:
        """Record that the engine stored blocks in a medium.

        ``has`` returns True if the engine was already known to have a given block in any medium.
        """
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
        """Record that blocks were removed from a medium. Return the blocks that are now in no medium of the engine."""
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
        """Remove all blocks of the engine."""
        self._media.clear()


_DEVICE = 1 << KvMedium.DEVICE


_STRIDE = 32
"""Number of blocks that a lookup covers in one step.

A lookup first checks the last block of a step. If all engines that have the block before the step also have the last
block of the step, the lookup skips the blocks between.
"""

_DIGITS = bytes.maketrans(b"01", b"\0\1")


class PrefixIndex:
    """Maps each block hash to the engines that have the block. Does no I/O.

    Each engine is one bit of an integer, so one lookup returns all engines with a block. The index stores at most
    ``max_entries`` pairs of block and engine. When it is full, it drops new blocks. The index also drops blocks whose
    parent it does not know. A dropped block only makes the known prefix shorter. Engines evict the last blocks of a
    prompt first, so an engine that has a block also has all blocks before it.
    """

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._num_entries = 0
        self._holders: dict[bytes, int] = {}
        self._blocks: dict[str, set[bytes]] = {}
        self._bits: dict[str, int] = {}
        self._engines: list[str] = []
        """Name of the engine at each bit position. Empty if no engine uses the position."""

    def __len__(self) -> int:
        """Return the number of stored pairs of block and engine."""
        return self._num_entries

    @property
    def full(self) -> bool:
        """True if the index has ``max_entries`` pairs, so that it would drop new blocks."""
        return self._num_entries >= self._max_entries

    def num_on(self, engine: str) -> int:
        """Return the number of blocks that an engine is known to have."""
        return len(self._blocks.get(engine, ()))

    def has(self, engine: str, block_hash: bytes) -> bool:
        """Return True if the index knows that an engine has a block."""
        return block_hash in self._blocks.get(engine, ())

    def store(self, engine: str, block_hashes: Iterable[bytes], parent: bytes = b"") -> int:
        """Add consecutive blocks of an engine. The first of them follows the block ``parent``.

        Return how many of the blocks the index dropped.

        An empty ``parent`` means that the blocks are at the beginning of a prompt, or that their position is unknown.
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
        """Remove blocks of an engine. Ignore blocks that the index does not know."""
        blocks = self._blocks.get(engine)
        if blocks is None:
            return
        for block_hash in block_hashes:
            if block_hash in blocks:
                blocks.remove(block_hash)
                self._release(block_hash, self._bits[engine])

    def clear(self, engine: str) -> None:
        """Remove all blocks of an engine, and free the engine's bit position."""
        blocks = self._blocks.pop(engine, None)
        if blocks is None:
            return
        bit = self._bits.pop(engine)
        self._engines[bit.bit_length() - 1] = ""
        for block_hash in blocks:
            self._release(block_hash, bit)

    def runs(self, block_hashes: Iterable[bytes], block_size: int = 1) -> dict[str, int]:
        """Return, by engine, how many of a prompt's first tokens are in blocks that the engine has cached.

        Leave out engines that do not have the first block.

        The lookup reads at most ``_STRIDE`` further items of ``block_hashes`` after the last cached block.
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
        """Return the position in ``stride`` of the first block that at least one of these engines does not have. The
        search starts at ``first``.

        At least one of the engines must lack the last block of ``stride``.
        """
        last = len(stride) - 1
        while first < last:
            middle = (first + last) // 2
            if engines & ~self._holders.get(stride[middle], 0):
                last = middle
            else:
                first = middle + 1
        return first

    def _end(self, runs: dict[str, int], engines: int, length: int) -> None:
        """Record ``length`` as the number of cached prefix tokens of these engines."""
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
"""Maximum number of blocks to look up per prompt. Computing their hashes occupies the event loop for about 4 ms. Cached
blocks after this number are ignored.
"""


class _Sequence(msgspec.Struct):
    """Sequence whose block hashes are computed. Implements ``penstock_common.block_hash.Hashed``."""

    context: RequestContext
    all_token_ids: list[int]
    prompt_embeds: PromptEmbeds | None
    mm_features: list[MultiModalFeature]
    block_hashes: list[bytes]
    lora_digest: bytes


class _Cache(msgspec.Struct):
    """Cache state of one engine, except the blocks in the index.

    Attributes:
        states: Hashes of the blocks at whose end the engine has stored the state of the recurrent layers. None if the
            model has no recurrent layers.
        recorded: Events that arrived since the frontend requested the list of cached blocks. None if no request is
            pending.
    """

    block_size: int
    states: set[bytes] | None = None
    recorded: list[KvCacheEvent] | None = None
    places: BlockPlaces = msgspec.field(default_factory=BlockPlaces)


class PrefixCaches:
    """Tracks the prefix caches of all engines, and looks up the cached prefix of a prompt on all engines at once. Does
    no I/O.

    A block in host memory or on disk counts like a block in the KV cache. The reason is that loading a block takes only a few
    percent of the time that the engine needs to compute the block.

    During a session, the engine's events report changes of its cache. The caller also requests from the engine which
    blocks it had cached before. The caller calls ``begin`` when it sends this request, and ``settle`` with the engine's
    answer. This class records the events that arrive between ``begin`` and ``settle``, and applies them again after the
    answer. The last event of a block decides whether the block is cached. Each part of the answer may therefore
    describe the cache at any time between ``begin`` and ``settle``.
    """

    def __init__(self, max_blocks: int) -> None:
        """Create the index. ``max_blocks`` is the maximum number of tracked blocks. A block counts once for each engine
        that has it.
        """
        self._index = PrefixIndex(max_blocks)
        self._caches: dict[str, _Cache] = {}
        self._hashers: dict[int, BlockHasher] = {}
        """Block hashers for the block sizes of all engines, by block size."""

    @property
    def num_blocks(self) -> int:
        """Number of tracked blocks. A block counts once for each engine that has it."""
        return len(self._index)

    @property
    def full(self) -> bool:
        """True if the number of tracked blocks has reached its maximum."""
        return self._index.full

    def num_on(self, engine: str) -> int:
        """Return the number of blocks that an engine is known to have."""
        return self._index.num_on(engine)

    def begin(self, engine: str, block_size: int, *, has_states: bool = False) -> None:
        """Start to track an engine from which the list of cached blocks was requested. The caller must call ``settle``
        with the answer.

        ``has_states`` is True if the engine's model has recurrent layers, so that the engine reports their states.
        """
        self._index.clear(engine)
        self._caches[engine] = _Cache(block_size, states=set() if has_states else None, recorded=[])
        self._look_for_block_sizes()

    def settle(self, engine: str, answers: Mapping[KvMedium, bytes] | None) -> None:
        """Apply an engine's answer to the request for its cached blocks.

        ``answers`` has, by medium, the digests of the blocks in one byte string. If ``answers`` is None, the index
        knows only the blocks in events since ``begin``. Raises Internal if an answer does not consist of whole digests.
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
        """Apply the events of an engine's prefix cache. Ignore the events if the engine is not tracked."""
        cache = self._caches.get(engine)
        if cache is None:
            return
        if cache.recorded is not None:
            cache.recorded += events
        for event in events:
            self._apply(engine, cache, event)

    def gone(self, engine: str) -> None:
        """Stop tracking an engine, and remove its blocks."""
        self._index.clear(engine)
        self._caches.pop(engine, None)
        self._look_for_block_sizes()

    def cached_tokens(self, request: EngineCoreRequest, output_token_ids: Sequence[int] = ()) -> dict[str, int]:
        """Return, by engine, how many of the first tokens of the request and its previous output are cached on the
        engine.

        Engines without cached tokens are left out. The last token never counts as cached, because engines always
        compute it. The result is empty if the request skips the prefix cache.
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
            if num_tokens % size == 0:  # an engine may have cached all tokens, but it must compute the last token again
                found = {engine: min(count, num_tokens - 1) for engine, count in found.items()}
            for engine in found:
                if (states := self._caches[engine].states) is not None:
                    count = min(found[engine], num_tokens - 1) // size
                    found[engine] = _last_state(states, sequence.block_hashes[:count]) * size
            cached |= {engine: count for engine, count in found.items() if count}
        return cached

    def _apply(self, engine: str, cache: _Cache, event: KvCacheEvent) -> None:
        match event:
            case BlockStored():
                self._store(engine, cache, event.medium, event.block_hashes, event.parent_hash)
            case BlockRemoved():
                if event.medium is KvMedium.STATE:
                    if cache.states is not None:
                        cache.states.difference_update(event.block_hashes)
                    return
                self._index.remove(engine, cache.places.removed(event.medium, event.block_hashes))
            case AllBlocksCleared():
                self._clear(engine, cache)

    def _store(
        self, engine: str, cache: _Cache, medium: KvMedium, block_hashes: Sequence[bytes], parent: bytes = b""
    ) -> None:
        if medium is KvMedium.STATE:
            if cache.states is not None:
                cache.states.update(block_hashes)
            return
        cache.places.stored(medium, block_hashes, partial(self._index.has, engine))
        self._index.store(engine, block_hashes, parent)

    def _clear(self, engine: str, cache: _Cache) -> None:
        cache.places.clear()
        if cache.states is not None:
            cache.states.clear()
        self._index.clear(engine)

    def _look_for_block_sizes(self) -> None:
        sizes = {cache.block_size for cache in self._caches.values()}
        self._hashers = {size: self._hashers.get(size) or BlockHasher(size) for size in sorted(sizes)}


def _last_state(states: Set[bytes], block_hashes: Sequence[bytes]) -> int:
    """Return the number of blocks up to and including the last block whose state is in ``states``. Return 0 if there is
    none.
    """
    for count in range(len(block_hashes), 0, -1):
        if block_hashes[count - 1] in states:
            return count
    return 0


def with_media(cached: Mapping[str, int], held: Mapping[str, Sequence[MultiModalFeature]]) -> dict[str, int]:
    """Return, by engine, the number of cached tokens, to which the tokens of cached media items are added.

    ``held`` has, by engine, the media items of the request that the engine has cached.
    """
    counts = dict(cached)
    for engine, features in held.items():
        prefix = cached.get(engine, 0)
        counts[engine] = prefix + sum(
            feature.end - max(feature.offset, prefix) for feature in features if feature.end > prefix
        )
    return counts


def _digests(answer: bytes) -> list[bytes]:
    """Split an engine's list of cached blocks into digests. Raises Internal if its length is not a multiple of the
    digest size.
    """
    if len(answer) % DIGEST_SIZE:
        raise Internal(
            f"the engine's list of cached blocks has {len(answer)} bytes; expected a multiple of {DIGEST_SIZE} bytes"
        )
    return [answer[start : start + DIGEST_SIZE] for start in range(0, len(answer), DIGEST_SIZE)]


def _hashes(hasher: BlockHasher, sequence: _Sequence) -> Iterator[bytes]:
    """Yield the hash of each full block of the sequence. Each hash is computed only when the caller asks for it."""
    for index in range(min(len(sequence.all_token_ids) // hasher.block_size, MAX_BLOCKS_LOOKED_UP)):
        hasher.extend(sequence, (index + 1) * hasher.block_size)
        yield sequence.block_hashes[index]
