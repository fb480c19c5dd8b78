"""What must be the same at two engines so that a block of one means the same to the other."""

import hashlib
import json
import re
from collections.abc import Mapping

import msgspec

from penstock_common.types.kv_transfer import KvGroup, KvLayout
from penstock_enginecore.core.kv_cache.spec import KVCacheConfig

FINGERPRINT_BYTES = 16
_PERSON = b"penstock-kv-1"
_OF_TOKENS_ALONE = frozenset({"task", "eos_token_ids", "enable_in_reasoning", "revision"})
"""Of what an engine's tokens depend on, what keys and values do not, or what is a name."""
_NUMERICS = ("tensor_parallel_size", "batch_invariant")
"""What changes how numbers are rounded."""
_HASH = re.compile(r"[0-9a-f]{16}")


def layout_of(
    config: KVCacheConfig,
    computes: Mapping[str, str],
    *,
    order: str,
    num_shards: int,
    block_bytes: int,
    numerics: str = "",
) -> KvLayout:
    """The layout of an engine's blocks. ``computes``: what its tokens depend on, as ``variant.config_of`` has it: with hashes of
    the weights, and no path. ``order``: how numbers lie in a block. The fingerprint is empty where the weights have no hash, as
    random ones have none: then no other engine has the same.
    """
    groups = tuple(KvGroup(group.layer_names, group.sliding_window or 0) for group in config.groups)
    layout = KvLayout(
        dtype=computes.get("cache_dtype", computes.get("dtype", "")),
        block_size=config.block_size,
        groups=groups,
        order=order,
        num_shards=num_shards,
        numerics=" ".join([numerics, *(f"{key}={computes[key]}" for key in _NUMERICS if key in computes)]).strip(),
    )
    if _HASH.fullmatch(computes.get("weights", "")) is None:
        return layout
    values = {key: computes[key] for key in computes if key not in _OF_TOKENS_ALONE and key not in _NUMERICS}
    said = [
        layout.dtype,
        layout.block_size,
        [[group.layer_names, group.sliding_window, group.attention_chunk] for group in config.groups],
        order,
        num_shards,
        block_bytes,
        values,
    ]
    digest = hashlib.blake2b(
        json.dumps(said, sort_keys=True).encode(), digest_size=FINGERPRINT_BYTES, person=_PERSON
    ).digest()
    return msgspec.structs.replace(layout, fingerprint=digest)
