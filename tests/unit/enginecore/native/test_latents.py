"""Attention over latents (MLA): kernels and torch against attention over the same keys, with the latents as values."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from penstock_enginecore.attention.base import AttentionBackend, AttentionMetadata, AttentionParams, StepPlan
from penstock_enginecore.attention.factory import create_backend
from penstock_enginecore.attention.kv_cache import LATENTS, KVCache
from penstock_enginecore.lora.adapter import Addition, LowRankUpdate
from penstock_enginecore.models.latent_hook import LatentHeads
from penstock_enginecore.native.attention import NativeAttention, takes_latents
from penstock_enginecore.native.latents import PackedLatentHeads
from penstock_enginecore.native.library import NativeLibrary, open_library
from tests.fakes.engines.instruction_sets import runnable
from tests.fakes.engines.rounding import ROUNDING, open_rounding
from tests.unit.enginecore.attention.test_backends import CPU, Step, make_step, random_lengths
from tests.unit.enginecore.native.test_kernels import native

PARAMS = AttentionParams(scaling=0.2)
MIXED = [1, 40, 1, 5, 90], [77, 40, 200, 131, 99]


@pytest.fixture(scope="module", params=runnable())
def library(request: pytest.FixtureRequest) -> NativeLibrary:
    return open_library(request.param, 2)


def latent_step(
    lengths: tuple[list[int], list[int]], *, heads: int = 4, width: int = 96, latent: int = 64, block_size: int = 16
) -> Step:
    """Return a step whose values are the first elements of its keys."""
    step = make_step(*lengths, block_size=block_size, heads=(heads, 1), head_size=width, head_size_v=latent)
    cache = replace(step.cache, values=step.cache.keys[:, :latent])
    return replace(step, value=step.key[..., :latent], cache=cache)


def attend(backend: AttentionBackend, step: Step, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    rows = step.cache.keys.to(dtype)
    cache = KVCache(rows, rows[:, :0], 1, LATENTS)
    return backend.attend_latents(step.query, cache, StepPlan(step.metadata, CPU), PARAMS, step.value.shape[2])


@pytest.mark.parametrize("block_size", [1, 5, 16])
def test_torch_equals_attention_over_keys(block_size: int) -> None:
    for name in ("cpu", "reference"):
        step = latent_step(MIXED, block_size=block_size)
        torch.testing.assert_close(
            attend(create_backend(name, CPU), step), step.run("reference", PARAMS), rtol=2e-5, atol=4e-6
        )


@pytest.mark.parametrize(
    ("heads", "width", "latent"), [(1, 16, 16), (3, 48, 32), (16, 96, 64), (71, 80, 48), (20, 576, 512)]
)
@pytest.mark.parametrize("block_size", [5, 16])
def test_kernels_equal_attention_over_keys(
    library: NativeLibrary, heads: int, width: int, latent: int, block_size: int
) -> None:
    assert takes_latents(library, torch.float32, width, latent)
    for lengths in (MIXED, random_lengths(heads)):
        step = latent_step(lengths, heads=heads, width=width, latent=latent, block_size=block_size)
        torch.testing.assert_close(attend(native(library), step), step.run("reference", PARAMS), rtol=2e-5, atol=4e-5)


def test_odd_widths_are_computed_by_torch_over_the_same_memory(library: NativeLibrary) -> None:
    step = latent_step(MIXED, width=26, latent=18)
    assert torch.equal(attend(native(library), step), attend(create_backend("cpu", CPU), step))


@pytest.mark.parametrize(("isa", "kind"), ROUNDING)
def test_rounding_kernels_round_queries_and_weights(isa: str, kind: str) -> None:
    library = open_rounding(isa, kind)
    for heads, width, latent in ((3, 64, 48), (16, 576, 512)):
        step = latent_step(MIXED, heads=heads, width=width, latent=latent)
        half = replace(step.cache, keys=step.cache.keys.bfloat16().float())
        half = replace(half, values=half.keys[:, :latent])
        known = replace(step, query=step.query.bfloat16().float(), cache=half)
        error = (attend(native(library), known, torch.bfloat16) - known.run("reference", PARAMS)).abs()
        sizes = replace(known, cache=replace(half, values=half.values.abs()))
        bound = sizes.run("reference", PARAMS) * 2.0**-8 * 1.001 + 1e-5
        assert (error <= bound).all(), float((error / bound).max())


def part_of(step: Step, part: slice) -> Step:
    """Return a part of the first request's queries as a step of its own."""
    metadata = AttentionMetadata(
        np.array([0, part.stop - part.start]),
        np.array([part.stop]),
        step.metadata.block_table[:1],
        step.metadata.slot_mapping[part],
        step.metadata.block_size,
    )
    return replace(step, query=step.query[part], metadata=metadata)


def check_bits(library: NativeLibrary, length: int, dtype: torch.dtype) -> None:
    step = latent_step(([length, 40], [length, 170]), heads=5, width=64, latent=32)
    whole = attend(native(library), step, dtype)
    parts = ((0, 1), (1, 2), (63, 70), (127, 129), (65, 150), (length - 2, length), (length - 1, length))
    for start, end in parts:
        part = slice(start, end)
        assert torch.equal(attend(native(library), part_of(step, part), dtype), whole[part])


def check_nan(library: NativeLibrary, number: float, dtype: torch.dtype) -> None:
    step = latent_step(([30, 1], [50, 20]), heads=3, width=64, latent=32)
    expected = attend(native(library), step, dtype)
    slot = int(step.metadata.slots(0, 37, 38)[0])
    step.cache.keys[slot] = number
    got = attend(native(library), step, dtype)
    assert torch.equal(got[:17], expected[:17])
    assert got[17:30].isnan().all()
    assert torch.equal(got[30:], expected[30:])


def test_a_querys_bits_depend_on_nothing_else_in_the_step(library: NativeLibrary) -> None:
    check_bits(library, 2100, torch.float32)


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_only_queries_that_see_a_latent_get_its_nan(library: NativeLibrary, number: float) -> None:
    check_nan(library, number, torch.float32)


@pytest.mark.parametrize(("isa", "kind"), ROUNDING)
def test_both_hold_for_rounding_kernels(isa: str, kind: str) -> None:
    library = open_rounding(isa, kind)
    check_bits(library, 200, torch.bfloat16)
    for number in (torch.nan, torch.inf):
        check_nan(library, number, torch.bfloat16)


@pytest.mark.parametrize("half", [False, True])
def test_packed_projections_equal_torch(library: NativeLibrary, half: bool) -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(64, 3 * (32 + 64), bias=False)
    if half:
        linear.weight.data = linear.weight.data.bfloat16().float()
    heads = LatentHeads(linear, 64, 32, 64)
    packed = PackedLatentHeads(library, heads)
    assert packed.num_bytes == linear.weight.nbytes // (2 if half else 1)
    query, seen = torch.randn(7, 3, 32 + 8), torch.randn(7, 3, 64)
    with torch.inference_mode():
        torch.testing.assert_close(packed.absorbed(query), heads.absorbed(query), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(packed.expanded(seen), heads.expanded(seen), rtol=1e-5, atol=1e-5)
        assert packed.absorbed(query[:0]).shape == (0, 3, 64 + 8)


def added_by(add: Addition) -> Callable[..., None]:
    return lambda _, args, out: add(args[0], out)


def test_projections_give_the_scores_and_outputs_of_full_keys_and_values() -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(48, 3 * (16 + 32), bias=False)
    update = LowRankUpdate(torch.randn(2, 48), torch.randn(3 * (16 + 32), 2))
    heads = LatentHeads(linear, 48, 16, 32)
    query, latents = torch.randn(5, 3, 16), torch.randn(7, 48)
    weights = torch.rand(5, 3, 7)
    with torch.inference_mode():
        for adapted in (False, True):
            rows = linear.weight + update.b @ update.a if adapted else linear.weight
            keys, values = (latents @ rows.T).view(7, 3, 48).split([16, 32], dim=-1)
            if adapted:
                heads.register_forward_hook(added_by(heads.addition(update)))
            scores = torch.einsum("thl,kl->thk", heads.absorbed(query), latents)
            torch.testing.assert_close(scores, torch.einsum("thp,khp->thk", query, keys), rtol=1e-4, atol=1e-4)
            got = heads.expanded(torch.einsum("thk,kl->thl", weights, latents))
            torch.testing.assert_close(got, torch.einsum("thk,khv->thv", weights, values), rtol=1e-4, atol=1e-4)


def test_backends_say_whether_they_keep_latents() -> None:
    class Other(AttentionBackend):
        """Backend without attention over latents."""

    assert create_backend("cpu", CPU).keeps_latents
    assert not NativeAttention(open_library("baseline", 1), Other()).keeps_latents
