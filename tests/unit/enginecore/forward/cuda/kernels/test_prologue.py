"""The prologue of attention, compared with plain torch and with the expected contents of fp8 caches."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_enginecore.attention.kv_cache import UNSCALED, KVScales
from penstock_enginecore.forward.cuda.kernel_api import Norm, RotaryTable
from tests.fakes.models.interpreted_kernels import interpreted
from tests.fakes.models.torch_kernels import TorchKernels

prologue = interpreted("prologue")

BLOCKS, LAYERS, MAX_LEN = 5, 2, 40
FP8 = torch.float8_e4m3fn


@dataclass
class Case:
    """Inputs of a prologue, and memory that holds NaN wherever nothing is to be written."""

    tokens: int
    heads: int
    kv_heads: int
    size: int
    half: int
    block_size: int = 4
    bias: bool = False
    norms: bool = False
    offset: float = 0.0
    dtype: torch.dtype = torch.float32
    seed: int = 0

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        width = (self.heads + 2 * self.kv_heads) * self.size
        self.qkv = random(self.tokens, width).to(self.dtype)
        self.added = random(width).to(self.dtype) if self.bias else None
        self.normed = None
        if self.norms:
            weights = [torch.nn.Parameter(random(self.size).to(self.dtype), requires_grad=False) for _ in range(2)]
            self.normed = Norm(weights[0], 1e-2, self.offset), Norm(weights[1], 3e-1, self.offset)
        angles = torch.arange(MAX_LEN)[:, None] * (0.3 + torch.arange(self.half))
        self.rotary = RotaryTable(1.1 * angles.cos(), 1.1 * angles.sin())
        self.positions = torch.randint(0, MAX_LEN, (self.tokens,), generator=generator, dtype=torch.int32)
        free = torch.randperm((BLOCKS - 1) * self.block_size, generator=generator) + self.block_size
        self.slots = free[: self.tokens].clone()
        self.slots[torch.rand(self.tokens, generator=generator) < 0.2] = -1

    def memory(self, dtype: torch.dtype | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the arena, the keys and values of one of its layers, and queries."""
        shape = (BLOCKS, LAYERS, 2, self.kv_heads, self.block_size, self.size)
        arena = torch.full(shape, torch.nan).to(dtype or self.dtype)
        query = torch.full((self.tokens, self.heads, self.size), torch.nan, dtype=self.dtype)
        return arena, arena[:, 1, 0], arena[:, 1, 1], query

    def run(self, keys: torch.Tensor, values: torch.Tensor, query: torch.Tensor, scales: KVScales = UNSCALED) -> None:
        inputs = (self.qkv, self.added, self.normed, self.rotary, self.positions, self.slots)
        prologue.prologue(*inputs, keys, values, query, scales)

    def oracle(self, keys: torch.Tensor, values: torch.Tensor, query: torch.Tensor) -> None:
        inputs = (self.qkv, self.added, self.normed, self.rotary, self.positions, self.slots)
        TorchKernels().prologue(*inputs, keys, values, query)


def check(case: Case) -> None:
    arena, keys, values, query = case.memory()
    case.run(keys, values, query)
    wanted_arena, wanted_keys, wanted_values, wanted_query = case.memory(torch.float32)
    wanted_query = wanted_query.float()
    case.oracle(wanted_keys, wanted_values, wanted_query)
    tolerance = 2e-6 if case.dtype == torch.float32 else 4e-3
    torch.testing.assert_close(arena.float(), wanted_arena, rtol=tolerance, atol=tolerance, equal_nan=True)
    torch.testing.assert_close(query.float(), wanted_query, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.slow
@settings(max_examples=25)
@given(data=st.data())
def test_any_shape(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 40))
    check(
        Case(
            tokens=data.draw(st.integers(1, 5)),
            heads=data.draw(st.integers(1, 9)),
            kv_heads=data.draw(st.integers(1, 5)),
            size=size,
            half=data.draw(st.integers(0, size // 2)),
            block_size=data.draw(st.integers(2, 17)),
            bias=data.draw(st.booleans()),
            norms=data.draw(st.booleans()),
            offset=data.draw(st.sampled_from([0.0, 1.0])),
            dtype=data.draw(st.sampled_from([torch.float32, torch.float16])),
            seed=data.draw(st.integers(0, 1000)),
        )
    )


@pytest.mark.parametrize(("size", "half"), [(80, 40), (96, 48), (96, 24), (64, 32)])
def test_head_sizes_of_models(size: int, half: int) -> None:
    check(Case(tokens=3, heads=6, kv_heads=2, size=size, half=half, bias=True, norms=True, offset=1.0, seed=size))


def test_fp8_caches_hold_numbers_over_their_scales_and_end_at_the_largest() -> None:
    """Uses numbers that e4m3 can represent: the interpreter rounds others wrongly at the next power of two."""
    case = Case(tokens=4, heads=5, kv_heads=3, size=16, half=8)
    case.qkv = case.qkv.mul(4).round().clamp(-15, 15)
    case.qkv[:, ::7] *= 64
    case.rotary = RotaryTable(torch.ones(MAX_LEN, 8), torch.zeros(MAX_LEN, 8))
    arena, keys, values, query = case.memory(FP8)
    case.run(keys, values, query, scales=KVScales(0.25, 2.0))
    wanted_arena, *wanted, wanted_query = case.memory()
    case.oracle(*wanted, wanted_query)
    assert torch.equal(query.nan_to_num(99), wanted_query.nan_to_num(99))
    for cache, exact, scale in zip((keys, values), wanted, (0.25, 2.0), strict=True):
        stored = (exact / scale).clamp(-448, 448)
        assert bool((stored.abs() == 448).any())
        assert torch.equal(cache.float().nan_to_num(99), stored.nan_to_num(99))
    assert torch.equal(arena.float().isnan(), wanted_arena.isnan())


def test_no_tokens() -> None:
    case = Case(tokens=0, heads=2, kv_heads=1, size=8, half=4)
    arena, keys, values, query = case.memory()
    case.run(keys, values, query)
    assert bool(arena.isnan().all())


def test_what_does_not_fit_together_is_refused() -> None:
    case = Case(tokens=2, heads=2, kv_heads=2, size=8, half=4)
    _, keys, values, query = case.memory()
    with pytest.raises(
        ValueError,
        match=r"KVScales\(key=2\.0, value=1\.0\) requires caches of float8_e4m3fn, but the caches have dtypes torch.float32",
    ):
        case.run(keys, values, query, scales=KVScales(2.0, 1.0))
    with pytest.raises(ValueError, match=r"the product has shape \[2, 48\], which does not match queries \[2, 1, 8\]"):
        case.run(keys, values, query[:, :1])
    with pytest.raises(ValueError, match="each block must be contiguous"):
        case.run(keys.transpose(1, 2).contiguous().transpose(1, 2), values, query)
    with pytest.raises(ValueError, match="16 rotated elements do not fit heads of size 8"):
        case.rotary = RotaryTable(torch.ones(4, 8), torch.ones(4, 8))
        case.run(keys, values, query)
