"""Engines whose blocks are interchangeable."""

from typing import Any

import msgspec
import pytest

from penstock_enginecore.core.kv_cache.spec import KVCacheConfig, KVCacheGroup
from penstock_enginecore.kv_transfer.assembly import layout_of

GROUPS = (
    KVCacheGroup(layer_names=("0", "2")),
    KVCacheGroup(layer_names=("1", "draft.0"), sliding_window=8),
)
CONFIG = KVCacheConfig(num_blocks=10, block_size=16, groups=GROUPS, max_model_len=64)
COMPUTES = {
    "weights": "0123456789abcdef",
    "dtype": "bfloat16",
    "config.rope_theta": "10000",
    "task": "generate",
    "eos_token_ids": "[2]",
}


def fingerprint(config: KVCacheConfig = CONFIG, more: dict[str, str] | None = None, **shape: Any) -> bytes:
    given: dict[str, Any] = {"order": "slots", "num_shards": 1, "block_bytes": 4096, **shape}
    return layout_of(config, COMPUTES | (more or {}), **given).fingerprint


def test_what_says_nothing_of_blocks_makes_no_difference() -> None:
    assert len(fingerprint()) == 16
    another = msgspec.structs.replace(CONFIG, num_blocks=99, max_model_len=32)
    names = {"revision": "main", "eos_token_ids": "[3]", "task": "generate embed", "enable_in_reasoning": "true"}
    numerics = {"tensor_parallel_size": "2", "batch_invariant": "true"}
    assert fingerprint(another, names | numerics, numerics="avx512") == fingerprint()


@pytest.mark.parametrize(
    "change",
    [
        {"config": msgspec.structs.replace(CONFIG, block_size=32)},
        {"config": msgspec.structs.replace(CONFIG, groups=GROUPS[::-1])},
        {"config": msgspec.structs.replace(CONFIG, groups=(GROUPS[0],))},
        {"config": msgspec.structs.replace(CONFIG, groups=(GROUPS[0], msgspec.structs.replace(GROUPS[1], sliding_window=9)))},
        {"config": msgspec.structs.replace(CONFIG, groups=(GROUPS[0], msgspec.structs.replace(GROUPS[1], attention_chunk=9)))},
        {"more": {"weights": "1123456789abcdef"}},
        {"more": {"config.rope_theta": "20000"}},
        {"more": {"rotary_length": "64"}},
        {"more": {"dtype": "float16"}},
        {"more": {"cache_dtype": "fp8"}},
        {"more": {"quantization": "int8"}},
        {"order": "tiles16"},
        {"num_shards": 2},
        {"block_bytes": 8192},
    ],
    ids=str,
)  # fmt: skip
def test_what_blocks_depend_on_makes_a_difference(change: dict[str, Any]) -> None:
    assert fingerprint(**change) != fingerprint()


@pytest.mark.parametrize("weights", ["random", "/models/llama", "unreadable: OSError", ""])
def test_weights_without_a_hash_are_shared_with_no_other_engine(weights: str) -> None:
    assert fingerprint(more={"weights": weights}) == b""


def test_numerics_are_told() -> None:
    layout = layout_of(
        CONFIG,
        COMPUTES | {"tensor_parallel_size": "2"},
        order="slots",
        num_shards=2,
        block_bytes=1,
        numerics="avx512",
    )
    assert layout.numerics == "avx512 tensor_parallel_size=2"
    assert layout.groups[1].window == 8
