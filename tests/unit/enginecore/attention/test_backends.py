"""The CPU backend against the reference, and the reference against attention computed without a cache."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_common.errors import ConfigError
from penstock_enginecore.attention import cpu as cpu_module
from penstock_enginecore.attention.base import AttentionBackend, AttentionMetadata, AttentionParams, StepPlan
from penstock_enginecore.attention.factory import create_backend
from penstock_enginecore.attention.kv_cache import SLOTS, KVCache, KVLayout
from penstock_enginecore.core.kv_cache.spec import KVCacheSpec

CPU = torch.device("cpu")
NUM_BLOCKS_SLACK = 5


@dataclass
class Step:
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    cache: KVCache
    metadata: AttentionMetadata

    def layout(self, backend: AttentionBackend, dtype: torch.dtype | None = None) -> KVLayout:
        """Return the layout in which ``backend`` stores this kind of layer, in ``dtype`` or the step's own dtype."""
        heads, keys, values = self.cache.num_kv_heads, self.cache.keys, self.cache.values
        spec = KVCacheSpec(
            block_size=self.metadata.block_size,
            num_kv_heads=heads,
            head_size=keys.shape[1] // heads,
            head_size_v=values.shape[1] // heads,
            dtype_size=keys.element_size(),
        )
        return backend.layout(spec, dtype or keys.dtype)

    def run(self, backend: str, params: AttentionParams) -> torch.Tensor:
        plan = StepPlan(self.metadata, CPU)
        return create_backend(backend, CPU).attend(self.query, self.key, self.value, self.cache, plan, params)


def make_step(
    query_lens: list[int],
    seq_lens: list[int],
    *,
    block_size: int,
    heads: tuple[int, int] = (4, 2),
    head_size: int = 16,
    head_size_v: int = 16,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Step:
    """Return requests with random keys and values in shuffled blocks. Unused slots hold NaN, block 0 holds zeros."""
    generator = torch.Generator().manual_seed(seed)
    num_heads, num_kv_heads = heads
    blocks_each = [-(-n // block_size) for n in seq_lens]
    num_blocks = 1 + sum(blocks_each) + NUM_BLOCKS_SLACK
    shuffled = (torch.randperm(num_blocks - 1, generator=generator) + 1).numpy().astype(np.int32)
    table = np.zeros((len(seq_lens), max(blocks_each)), dtype=np.int32)
    keys = torch.full((num_blocks * block_size, num_kv_heads * head_size), torch.nan, dtype=dtype)
    values = torch.full((num_blocks * block_size, num_kv_heads * head_size_v), torch.nan, dtype=dtype)
    keys[:block_size] = values[:block_size] = 0
    new_keys, new_values, new_slots, used = [], [], [], 0
    for i, (n, length) in enumerate(zip(query_lens, seq_lens, strict=True)):
        table[i, : blocks_each[i]] = shuffled[used : used + blocks_each[i]]
        used += blocks_each[i]
        positions = np.arange(length)
        slots = torch.from_numpy(
            table[i, positions // block_size].astype(np.int64) * block_size + positions % block_size
        )
        keys[slots] = torch.randn(length, num_kv_heads * head_size, generator=generator).to(dtype)
        values[slots] = torch.randn(length, num_kv_heads * head_size_v, generator=generator).to(dtype)
        new_keys.append(keys[slots[-n:]])
        new_values.append(values[slots[-n:]])
        new_slots.append(slots[-n:])
    metadata = AttentionMetadata(
        query_start_loc=np.cumsum([0, *query_lens]),
        seq_lens=np.array(seq_lens),
        block_table=table,
        slot_mapping=torch.cat(new_slots).numpy(),
        block_size=block_size,
    )
    return Step(
        query=torch.randn(sum(query_lens), num_heads, head_size, generator=generator).to(dtype),
        key=torch.cat(new_keys).view(-1, num_kv_heads, head_size),
        value=torch.cat(new_values).view(-1, num_kv_heads, head_size_v),
        cache=KVCache(keys, values, num_kv_heads),
        metadata=metadata,
    )


def random_lengths(seed: int) -> tuple[list[int], list[int]]:
    """Return lengths of decodes, of new prefills, and of chunks after cached tokens."""
    generator = np.random.default_rng(seed)
    query_lens, seq_lens = [], []
    for _ in range(int(generator.integers(1, 12))):
        kind = generator.integers(3)
        new = 1 if kind == 0 else int(generator.integers(2, 40))
        cached = 0 if kind == 1 else int(generator.integers(0, 150))
        query_lens.append(new)
        seq_lens.append(cached + new)
    return query_lens, seq_lens


PARAMS = {
    "full": AttentionParams(scaling=0.25),
    "window": AttentionParams(scaling=0.25, sliding_window=9),
    "window of one": AttentionParams(scaling=0.25, sliding_window=1),
    "wide window": AttentionParams(scaling=0.25, sliding_window=10_000),
    "softcap": AttentionParams(scaling=1.0, softcap=3.0),
    "softcap and window": AttentionParams(scaling=1.0, softcap=3.0, sliding_window=20),
    "sinks": AttentionParams(scaling=0.25, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
    "sinks and window": AttentionParams(scaling=0.25, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0]), sliding_window=7),
    "chunk": AttentionParams(scaling=0.25, attention_chunk=10),
    "chunk of one": AttentionParams(scaling=0.25, attention_chunk=1),
    "wide chunk": AttentionParams(scaling=0.25, attention_chunk=10_000),
    "chunk and window": AttentionParams(scaling=0.25, attention_chunk=16, sliding_window=5),
    "chunk, softcap and sinks": AttentionParams(
        scaling=1.0, softcap=3.0, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0]), attention_chunk=12
    ),
}


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_cpu_equals_reference_on_mixed_steps(params: AttentionParams, block_size: int) -> None:
    for seed in range(4):
        step = make_step(*random_lengths(seed), block_size=block_size, seed=seed)
        expected = step.run("reference", params)
        assert expected.isfinite().all()
        torch.testing.assert_close(step.run("cpu", params), expected, rtol=2e-5, atol=2e-6)


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 24)), min_size=1, max_size=6),
    window=st.none() | st.integers(1, 30),
    chunk=st.none() | st.integers(1, 30),
    softcap=st.none() | st.just(3.0),
    sinks=st.booleans(),
    block_size=st.sampled_from([1, 3, 8]),
)
def test_cpu_equals_reference_whatever_the_layer_asks_for(
    requests: list[tuple[int, int]],
    window: int | None,
    chunk: int | None,
    softcap: float | None,
    sinks: bool,
    block_size: int,
) -> None:
    step = make_step([new for _, new in requests], [cached + new for cached, new in requests], block_size=block_size)
    params = AttentionParams(
        scaling=0.25,
        sliding_window=window,
        softcap=softcap,
        sinks=torch.tensor([0.5, -1.0, 2.0, 0.0]) if sinks else None,
        attention_chunk=chunk,
    )
    expected = step.run("reference", params)
    assert expected.isfinite().all()
    torch.testing.assert_close(step.run("cpu", params), expected, rtol=2e-5, atol=2e-6)


def test_the_reference_sees_the_query_s_own_chunk_only() -> None:
    whole = make_step([10], [10], block_size=4)
    output = whole.run("reference", AttentionParams(scaling=0.25, attention_chunk=4))
    for start, end in ((0, 4), (4, 8), (8, 10)):
        q, k, v = (x[start:end].transpose(0, 1)[None] for x in (whole.query, whole.key, whole.value))
        expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.25, enable_gqa=True)
        torch.testing.assert_close(output[start:end], expected[0].transpose(0, 1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("params", [PARAMS["window"], PARAMS["chunk"]], ids=["window", "chunk"])
def test_cpu_does_not_read_keys_out_of_reach(params: AttentionParams) -> None:
    step = make_step([1, 3], [35, 38], block_size=4)
    expected = step.run("cpu", params)
    # Both requests have more than 30 tokens, so the keys of the first 16 tokens may have been freed.
    gone = torch.from_numpy(np.concatenate([step.metadata.slots(request, 0, 16) for request in (0, 1)]))
    step.cache.keys[gone] = step.cache.values[gone] = torch.nan
    assert torch.equal(step.run("cpu", params), expected)


def test_positions_of_a_step_are_those_in_each_request() -> None:
    step = make_step([1, 3, 2], [5, 3, 9], block_size=4)
    assert StepPlan(step.metadata, CPU).positions.tolist() == [4, 0, 1, 2, 7, 8]


@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (6, 1)])
@pytest.mark.parametrize("head_sizes", [(16, 16), (24, 8)])
def test_cpu_equals_reference_for_head_counts_and_sizes(heads: tuple[int, int], head_sizes: tuple[int, int]) -> None:
    step = make_step(*random_lengths(7), block_size=4, heads=heads, head_size=head_sizes[0], head_size_v=head_sizes[1])
    params = AttentionParams(scaling=0.2)
    torch.testing.assert_close(step.run("cpu", params), step.run("reference", params), rtol=2e-5, atol=2e-6)


def test_cpu_is_close_to_reference_in_bfloat16() -> None:
    step = make_step(*random_lengths(3), block_size=4, dtype=torch.bfloat16)
    for params in (PARAMS["full"], PARAMS["softcap and window"]):
        torch.testing.assert_close(step.run("cpu", params), step.run("reference", params), rtol=3e-2, atol=3e-2)


def test_a_long_masked_prefill_is_computed_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_module, "_MAX_QUERIES", 8)
    step = make_step([30, 21], [45, 21], block_size=4)
    for params in PARAMS.values():
        torch.testing.assert_close(step.run("cpu", params), step.run("reference", params), rtol=2e-5, atol=2e-6)


def test_many_decodes_of_very_different_lengths() -> None:
    seq_lens = [1, 2, 3, 40, 41, 300, 310, 700, 5, 1]
    step = make_step([1] * len(seq_lens), seq_lens, block_size=16)
    for params in PARAMS.values():
        torch.testing.assert_close(step.run("cpu", params), step.run("reference", params), rtol=2e-5, atol=2e-6)


def test_the_reference_equals_attention_without_a_cache() -> None:
    step = make_step([12], [12], block_size=4)
    q, k, v = (x.transpose(0, 1)[None] for x in (step.query, step.key, step.value))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.25, enable_gqa=True)[0].transpose(0, 1)
    torch.testing.assert_close(step.run("reference", PARAMS["full"]), expected, rtol=1e-5, atol=1e-6)


def test_written_tokens_are_read_back_where_they_were_written() -> None:
    step = make_step([5], [5], block_size=2)
    cache = KVCache(torch.zeros(20, 32), torch.zeros(20, 32), 2)
    slots = torch.tensor([11, 3, 7, 2, 19])
    cache.write(slots, step.key, step.value)
    keys, values = cache.gather(slots)
    assert torch.equal(keys, step.key)
    assert torch.equal(values, step.value)


def test_an_unknown_backend_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"attention_backend is 'refrence'.*did you mean 'reference'"):
        create_backend("refrence", CPU)


def test_the_cpu_backend_is_refused_on_a_gpu() -> None:
    with pytest.raises(ConfigError, match="'cpu' but the device is cuda"):
        create_backend("cpu", torch.device("cuda"))


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_backends_of_a_cpu_keep_slots(name: str) -> None:
    step, backend = make_step([1], [5], block_size=4), create_backend(name, CPU)
    assert step.layout(backend) is SLOTS
    assert backend.plan(step.metadata, CPU).slot_mapping.tolist() == step.metadata.slot_mapping.tolist()
