"""Which request holds which KV cache blocks, and which prefixes can be reused.

The prefix cache follows the idea of vLLM's automatic prefix caching: a block is identified by the hash of the whole
prefix it ends.
"""

import msgspec

from penstock_enginecore.core.kv_cache.block_hash import BlockHasher
from penstock_enginecore.core.kv_cache.block_pool import BlockPool, KVCacheBlock
from penstock_enginecore.core.kv_cache.spec import KVCacheConfig
from penstock_enginecore.core.request import Request


class ComputedBlocks(msgspec.Struct, frozen=True):
    """Cached blocks a request can start from, and the tokens it need not compute."""

    blocks: tuple[KVCacheBlock, ...] = ()
    num_tokens: int = 0


class PrefixCacheStats(msgspec.Struct):
    """Tokens looked up and tokens found, since the start."""

    queries: int = 0
    hits: int = 0


NOTHING_COMPUTED = ComputedBlocks()


class KVCacheManager:
    """Allocates blocks to requests.

    Only full blocks whose tokens are final and computed become findable, so ``cache_blocks`` is called after a step.

    When every token of a request is cached, the last one is computed again, because its logits are needed. Its keys and
    values are written into the last, possibly shared, block: the same numbers up to floating-point rounding, in a slot
    whose readers all have the same prefix. That costs one token instead of one block.
    """

    def __init__(self, config: KVCacheConfig, *, enable_prefix_caching: bool) -> None:
        self.block_size = config.block_size
        self.pool = BlockPool(config.num_blocks)
        self.prefix_stats = PrefixCacheStats()
        self._enabled = enable_prefix_caching
        self._hasher = BlockHasher(config.block_size)
        self._blocks: dict[str, list[KVCacheBlock]] = {}
        self._num_cached: dict[str, int] = {}

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` tokens fill or begin."""
        return -(-num_tokens // self.block_size)

    def hash_prompt(self, request: Request) -> None:
        """Hash the request's full blocks ahead of scheduling. Touches the request alone: any thread may call it."""
        if self._enabled:
            self._hasher.extend(request, request.num_tokens)

    def get_computed_blocks(self, request: Request) -> ComputedBlocks:
        """The longest cached prefix, leaving at least the last token to compute."""
        if not self._enabled or request.skip_reading_prefix_cache:
            return NOTHING_COMPUTED
        self._hasher.extend(request, request.num_tokens)
        blocks = []
        for block_hash in request.block_hashes:
            block = self.pool.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        if not blocks:
            return NOTHING_COMPUTED
        num_tokens = min(len(blocks) * self.block_size, request.num_tokens - 1)
        return ComputedBlocks(tuple(blocks), num_tokens)

    def allocate_slots(self, request: Request, num_new_tokens: int) -> list[int] | None:
        """Blocks for the next ``num_new_tokens`` tokens of a running request.

        Returns the ids of the blocks added, often none, or None when there are not enough.
        """
        blocks = self._blocks[request.key]
        missing = -(-(request.num_computed_tokens + num_new_tokens) // self.block_size) - len(blocks)
        if missing <= 0:
            return []
        if missing > self.pool.num_free_blocks:
            return None
        new = self.pool.allocate(missing)
        blocks.extend(new)
        return [block.block_id for block in new]

    def admit(self, request: Request, computed: ComputedBlocks, num_new_tokens: int, *, reserve: int) -> bool:
        """Give a waiting request its cached blocks and blocks for ``num_new_tokens`` tokens more.

        Returns False, and does nothing, unless ``reserve`` blocks stay free.
        """
        missing = self.num_blocks_for(computed.num_tokens + num_new_tokens) - len(computed.blocks)
        revived = sum(block.ref_count == 0 for block in computed.blocks)
        if missing + revived + reserve > self.pool.num_free_blocks:
            return False
        self.pool.touch(computed.blocks)
        self._blocks[request.key] = [*computed.blocks, *self.pool.allocate(missing)]
        self._num_cached[request.key] = len(computed.blocks)
        if request.num_preemptions == 0 and self._enabled:
            self.prefix_stats.queries += request.num_tokens
            self.prefix_stats.hits += computed.num_tokens
        return True

    def block_ids(self, request: Request) -> list[int]:
        """The request's block table."""
        return [block.block_id for block in self._blocks[request.key]]

    def cache_blocks(self, request: Request) -> None:
        """Make the full blocks among the tokens that are processed findable."""
        if not self._enabled:
            return
        first = self._num_cached[request.key]
        full = request.num_processed_tokens // self.block_size
        if full <= first:
            return
        self._hasher.extend(request, full * self.block_size)
        blocks = self._blocks[request.key]
        for index in range(first, full):
            self.pool.cache(blocks[index], request.block_hashes[index])
        self._num_cached[request.key] = full

    def free(self, request: Request) -> None:
        """Give back all blocks of a request. Their content stays findable until they are used for something else."""
        self._num_cached.pop(request.key, None)
        blocks = self._blocks.pop(request.key, None)
        if blocks:
            self.pool.free(blocks)

    def num_common_prefix_blocks(self, running: list[Request]) -> int:
        """Computed blocks that every running request has at its start."""
        count = 0
        if not running:
            return 0
        for block in self._blocks[running[0].key]:
            if block.ref_count != len(running):
                break
            count += 1
        if count:
            count = min(count, min(request.num_processed_tokens for request in running) // self.block_size)
        return count

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. Returns False, and does nothing, while a request holds blocks."""
        return self.pool.forget()
