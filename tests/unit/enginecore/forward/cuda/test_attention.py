"""Attention for the modules by the kernels, interpreted, against the reference, over an arena full of NaN."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_enginecore.attention.base import AttentionParams, StepPlan
from penstock_enginecore.attention.kv_cache import HEADS, KVCache
from penstock_enginecore.attention.reference import ReferenceAttention
from penstock_enginecore.core.kv_cache.spec import KVCacheSpec
from penstock_enginecore.forward.cuda.attention import TritonAttention, why_not
from tests.fakes.models.interpreted_kernels import interpreted
from tests.fakes.models.torch_kernels import TorchKernels
from tests.unit.enginecore.attention.test_backends import CPU, PARAMS, Step, make_step
from tests.unit.enginecore.attention.test_key_ends import dense, spanned

interpreted("attention")
from penstock_enginecore.forward.cuda.triton_kernels import TritonKernels  # noqa: E402 - settled above how it runs

KERNELS = TritonKernels()
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])


def spec_of(step: Step) -> KVCacheSpec:
    heads, keys, values = step.cache.num_kv_heads, step.cache.keys, step.cache.values
    return KVCacheSpec(
        block_size=step.metadata.block_size,
        num_kv_heads=heads,
        head_size=keys.shape[1] // heads,
        head_size_v=values.shape[1] // heads,
        dtype_size=keys.element_size(),
    )


def arena(backend: TritonAttention, step: Step) -> KVCache:
    """Return the second of two layers. Unwritten slots are NaN, also in the null block and in the other layer."""
    spec = spec_of(step)
    num_blocks = len(step.cache.keys) // spec.block_size
    layers = backend.memory({"other": spec, "this": spec}, step.cache.keys.dtype, CPU).throwaway(
        spec.block_size, num_blocks
    )
    for layer in layers.values():
        layer.cache.keys.fill_(torch.nan)
        layer.cache.values.fill_(torch.nan)
    return layers["this"].cache


def attend(backend: TritonAttention, step: Step, params: AttentionParams) -> torch.Tensor:
    """Write earlier tokens as one step and new ones as another. Tensors have heads before tokens."""
    cache, metadata = arena(backend, step), step.metadata
    new = np.diff(metadata.query_start_loc)
    earlier = [
        metadata.slots(i, 0, int(end - n)) for i, (end, n) in enumerate(zip(metadata.seq_lens, new, strict=True))
    ]
    slots = np.concatenate(earlier)
    if len(slots):
        before = replace(metadata, slot_mapping=slots, key_ends=None)
        backend.write(cache, backend.plan(before, CPU), *map(heads_first, step.cache.gather(torch.from_numpy(slots))))
    plan = backend.plan(metadata, CPU)
    query, key, value = map(heads_first, (step.query, step.key, step.value))
    backend.write(cache, plan, key, value)
    return backend.attend(query, key, value, cache, plan, params)


def heads_first(x: torch.Tensor) -> torch.Tensor:
    """Return the numbers in the layout of modules: ``[tokens, heads, size]``, with the tokens of a head adjacent in
    memory.
    """
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def expected(step: Step, params: AttentionParams) -> torch.Tensor:
    plan = StepPlan(step.metadata, CPU)
    return ReferenceAttention().attend(step.query, step.key, step.value, step.cache, plan, params)


@settings(max_examples=8, derandomize=True)
@given(
    requests=st.lists(st.tuples(st.integers(0, 60), st.sampled_from([1, 1, 2, 20])), min_size=1, max_size=3),
    window=st.none() | st.integers(1, 40),
    chunk=st.none() | st.integers(1, 40),
    softcap=st.none() | st.just(3.0),
    sinks=st.booleans(),
    shape=st.sampled_from([((4, 2), 16, 16), ((4, 1), 24, 16), ((4, 4), 16, 48)]),
    block_size=st.sampled_from([16, 17, 40]),
)
def test_steps_are_attended_as_by_the_reference(
    requests: list[tuple[int, int]],
    window: int | None,
    chunk: int | None,
    softcap: float | None,
    sinks: bool,
    shape: tuple[tuple[int, int], int, int],
    block_size: int,
) -> None:
    heads, head_size, head_size_v = shape
    new, all_tokens = [n for _, n in requests], [old + n for old, n in requests]
    step = make_step(new, all_tokens, block_size=block_size, heads=heads, head_size=head_size, head_size_v=head_size_v)
    params = AttentionParams(0.25, window, softcap, SINKS if sinks else None, chunk)
    kernels = TorchKernels() if why_not({"layer": spec_of(step)}, torch.float32) else KERNELS
    torch.testing.assert_close(
        attend(TritonAttention(kernels), step, params), expected(step, params), rtol=2e-5, atol=2e-6
    )


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_with_kernels_in_plain_torch_too(params: AttentionParams) -> None:
    step = make_step([1, 20, 1, 2], [130, 50, 7, 90], block_size=16)
    output = attend(TritonAttention(TorchKernels()), step, params)
    torch.testing.assert_close(output, expected(step, params), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_spans_see_keys_behind_themselves(params: AttentionParams) -> None:
    step = spanned(make_step([1, 20, 1, 2], [130, 50, 7, 90], block_size=16), 4)
    output = attend(TritonAttention(TorchKernels()), step, params)
    torch.testing.assert_close(output, dense(step, params), rtol=2e-5, atol=2e-6)


def test_kernels_are_told_of_spans() -> None:
    """kernels/test_attention.py checks the visible tokens for each kind of layer."""
    step, params = spanned(make_step([1, 20, 1, 2], [130, 50, 7, 90], block_size=16), 4), PARAMS["sinks and window"]
    output = attend(TritonAttention(KERNELS), step, params)
    torch.testing.assert_close(output, dense(step, params), rtol=2e-5, atol=2e-6)


def test_half_precision_is_close() -> None:
    step = make_step([1, 9], [40, 30], block_size=16, dtype=torch.float16)
    output = attend(TritonAttention(KERNELS), step, PARAMS["sinks and window"])
    assert output.dtype == torch.float16
    torch.testing.assert_close(output, expected(step, PARAMS["sinks and window"]), rtol=2e-2, atol=2e-3)


def test_layers_lie_in_one_arena() -> None:
    step, backend = make_step([1], [5], block_size=16), TritonAttention(TorchKernels())
    assert step.layout(backend) is HEADS
    spec = spec_of(step)
    layers = backend.memory({"a": spec, "b": spec}, torch.float32, CPU).throwaway(16, 3)
    assert len({layer.cache.keys.untyped_storage().data_ptr() for layer in layers.values()}) == 1


def test_a_plan_has_what_kernels_read_in_one_piece() -> None:
    step = make_step([1, 3], [40, 20], block_size=16)
    plan = TritonAttention(TorchKernels()).plan(step.metadata, CPU)
    group = plan.group
    assert group.block_table.shape == (2, 16)
    assert group.block_table[0, :3].tolist() == step.metadata.block_table[0].tolist()
    assert not group.block_table[:, 3:].any()
    assert group.query_start_loc.tolist() == [0, 1, 4]
    assert group.seq_lens.tolist() == [40, 20]
    assert group.slots.tolist() == plan.slot_mapping.tolist() == step.metadata.slot_mapping.tolist()
    told = (group.block_table, group.query_start_loc, group.seq_lens, group.slots)
    assert len({tensor.untyped_storage().data_ptr() for tensor in told}) == 1
    assert all(tensor.data_ptr() % 16 == 0 for tensor in told)


def test_a_plan_of_another_backend_is_refused() -> None:
    step, backend = make_step([1], [5], block_size=16), TritonAttention(TorchKernels())
    with pytest.raises(TypeError, match="the plan has type StepPlan, but this attention backend needs a PagedPlan"):
        backend.write(arena(backend, step), StepPlan(step.metadata, CPU), step.key, step.value)


SPEC = KVCacheSpec(block_size=16, num_kv_heads=2, head_size=64, head_size_v=64, dtype_size=2)


@pytest.mark.parametrize(
    ("changes", "dtype", "reason"),
    [
        ({}, torch.bfloat16, ""),
        ({"head_size": 192, "head_size_v": 128, "num_kv_heads": 16}, torch.bfloat16, ""),
        ({"block_size": 24}, torch.float32, ""),
        ({"block_size": 15}, torch.bfloat16, "its blocks have 15 tokens, but at least 16 are needed"),
        (
            {"block_size": 17, "num_kv_heads": 1, "head_size": 24},
            torch.bfloat16,
            "its blocks have 17 times 24 elements, which is not a multiple of 16",
        ),
        ({"head_size_v": 516}, torch.bfloat16, "no attention tiles for heads of 1024 elements of 2 bytes"),
        ({}, torch.float64, "its dtype is torch.float64"),
        ({}, torch.int32, "its dtype is torch.int32"),
    ],
    ids=lambda x: str(x),
)
def test_unsupported_parameters_are_named(changes: dict[str, int], dtype: torch.dtype, reason: str) -> None:
    taken = KVCacheSpec(block_size=32, num_kv_heads=1, head_size=16, head_size_v=16, dtype_size=2)
    odd = KVCacheSpec(**{name: getattr(SPEC, name) for name in SPEC.__struct_fields__} | changes)
    told = why_not({"first": taken, "second": odd}, dtype)
    if dtype in (torch.float64, torch.int32):
        assert told == f"first: {reason}"
    else:
        assert told == (f"second: {reason}" if reason else "")
