"""The write into the cache against the same in plain torch: NaN wherever nothing is to be written."""

import pytest
import torch

from penstock_enginecore.attention.kv_cache import KVScales
from tests.fakes.models.interpreted_kernels import interpreted
from tests.fakes.models.torch_kernels import TorchKernels

cache = interpreted("cache")

BLOCKS, BLOCK_SIZE = 4, 5


def caches(kv_heads: int, sizes: tuple[int, int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a layer's caches: views of memory with gaps between the blocks."""
    keys, values = (
        torch.full((BLOCKS, kv_heads * BLOCK_SIZE * size + 32), torch.nan, dtype=dtype)[:, 16:-16].unflatten(
            1, (kv_heads, BLOCK_SIZE, size)
        )
        for size in sizes
    )
    return keys, values


@pytest.mark.parametrize("kv_heads", [1, 6])
@pytest.mark.parametrize("sizes", [(16, 16), (24, 12)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_new_tokens_go_to_their_slots_and_nowhere_else(
    kv_heads: int, sizes: tuple[int, int], dtype: torch.dtype
) -> None:
    slots = torch.tensor([7, -1, 19, 5, 12])
    # The layout of modules: heads before tokens.
    new = [torch.randn(kv_heads, len(slots), size, dtype=torch.float32).to(dtype).transpose(0, 1) for size in sizes]
    written, expected = caches(kv_heads, sizes, dtype), caches(kv_heads, sizes, dtype)
    cache.write_cache(*new, slots, *written)
    TorchKernels().write(*new, slots, *expected)
    for one, other in zip(written, expected, strict=True):
        assert int(other.isfinite().sum()) == 4 * kv_heads * other.shape[3]
        torch.testing.assert_close(one._base, other._base, rtol=0, atol=0, equal_nan=True)


def test_fp8_caches_hold_numbers_over_their_scales_and_end_at_the_largest() -> None:
    """Uses numbers that e4m3 can represent, which the interpreter rounds as GPUs do."""
    new = torch.arange(-40, 40).view(5, 1, 16) / 4.0
    new[0, 0, :4] = torch.tensor([1e4, -1e4, 0.5, 448.0])
    new[1:] = new[1:].clamp(-3.75, 3.75)
    new[0, 0, 4:] = 0.25
    slots, scales = torch.tensor([7, -1, 19, 5, 12]), KVScales(0.25, 2.0)
    written, expected = (caches(1, (16, 16), torch.float8_e4m3fn) for _ in range(2))
    cache.write_cache(new, new, slots, *written, scales)
    TorchKernels().write(new, new, slots, *expected, scales)
    for one, other, scale in zip(written, expected, (0.25, 2.0), strict=True):
        wanted = [448, -448, 0.5 / scale, min(448 / scale, 448)]
        assert one[1, 0, 2, :4].tolist() == wanted
        assert torch.equal(one._base.float().nan_to_num(99), other._base.float().nan_to_num(99))


def test_a_step_without_tokens_writes_nothing() -> None:
    keys, values = caches(2, (16, 16), torch.float32)
    cache.write_cache(*torch.zeros(2, 0, 2, 16), torch.zeros(0, dtype=torch.int64), keys, values)
    assert keys.isnan().all()


def test_other_shapes_and_strides_are_refused() -> None:
    keys, values = caches(2, (16, 16), torch.float32)
    new, slots = torch.zeros(3, 2, 16), torch.arange(3)
    with pytest.raises(
        ValueError,
        match=r"values have shape \[3, 2, 8\], but there are 3 slots and the cache has shape \[4, 2, 5, 16\]",
    ):
        cache.write_cache(new, new[:, :, :8], slots, keys, values)
    with pytest.raises(ValueError, match=r"keys have shape \[3, 2, 16\], but there are 2 slots"):
        cache.write_cache(new, new, slots[:2], keys, values)
    with pytest.raises(ValueError, match=r"the strides of keys are \[1, "):
        cache.write_cache(torch.zeros(16, 2, 3).transpose(0, 2), new, slots, keys, values)
    with pytest.raises(
        ValueError,
        match=r"KVScales\(key=1\.0, value=2\.0\) requires caches of float8_e4m3fn, but the caches have dtypes torch.float32",
    ):
        cache.write_cache(new, new, slots, keys, values, KVScales(1.0, 2.0))
    with pytest.raises(ValueError, match="a block has 5 keys, but 4 values"):
        cache.write_cache(new, new, slots, keys, caches(2, (16, 16), torch.float32)[1].new_zeros(4, 2, 4, 16))
