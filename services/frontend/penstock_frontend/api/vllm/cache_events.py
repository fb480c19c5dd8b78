"""Changes of the engines' prefix caches as messages of ``vllm.grpc.engine``."""

from smg_grpc_proto.generated import common_pb2

from penstock_common.types.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvCacheEvent
from penstock_frontend.dispatch.kv_events import KvEventBatch

_HASH_BYTES = 8


def kv_event_batch(batch: KvEventBatch, first_id: int) -> common_pb2.KvEventBatch:
    """The message for changes of a prefix cache, whose events are numbered from ``first_id``."""
    return common_pb2.KvEventBatch(
        sequence_number=batch.sequence,
        timestamp=batch.timestamp,
        dp_rank=batch.rank,
        events=[_kv_event(event, first_id + index) for index, event in enumerate(batch.events)],
    )


def _kv_event(event: KvCacheEvent, event_id: int) -> common_pb2.KvCacheEvent:
    match event:
        case BlockStored():
            return common_pb2.KvCacheEvent(event_id=event_id, stored=_stored(event))
        case BlockRemoved():
            removed = common_pb2.KvBlocksRemoved(block_hashes=[_folded(each) for each in event.block_hashes])
            return common_pb2.KvCacheEvent(event_id=event_id, removed=removed)
        case AllBlocksCleared():
            return common_pb2.KvCacheEvent(event_id=event_id, cleared=common_pb2.KvCacheCleared())


def _stored(event: BlockStored) -> common_pb2.KvBlocksStored:
    size = event.block_size
    stored = common_pb2.KvBlocksStored(
        blocks=[
            common_pb2.KvBlock(
                block_hash=_folded(block_hash),
                token_ids=event.token_ids[index * size : (index + 1) * size],
                block_size=size,
            )
            for index, block_hash in enumerate(event.block_hashes)
        ]
    )
    if event.lora_name:
        stored.lora_name = event.lora_name
    if event.parent_hash:
        stored.parent_block_hash = _folded(event.parent_hash)
    return stored


def _folded(block_hash: bytes) -> int:
    """The last eight bytes of a digest as a signed integer: what this contract names a block by."""
    return int.from_bytes(block_hash[-_HASH_BYTES:], "big", signed=True)
