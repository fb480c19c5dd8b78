"""Computations before and after the products of latent attention, compared with plain torch."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_enginecore.forward.cuda.kernel_api import Norm, RotaryTable
from tests.fakes.models.interpreted_kernels import interpreted
from tests.fakes.models.torch_kernels import TorchKernels

kernels = interpreted("latent_attention")
BLOCK_SIZE, BLOCKS = 16, 3


def drawn(
    tokens: int, rank: int, latent: int, half: int, dtype: torch.dtype, *, biased: bool, low: bool
) -> dict[str, Any]:
    """Return arguments of ``latent_prologue``. The last token is padding, and unwritten slots are NaN."""
    generator = torch.Generator().manual_seed(tokens + rank + latent)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    width, size = rank + latent + 2 * half, latent + 2 * half
    slots = torch.randperm(BLOCKS * BLOCK_SIZE, generator=generator)[:tokens]
    slots[-1] = -1
    arena = torch.full((BLOCKS, 2, 1, BLOCK_SIZE, size), torch.nan, dtype=dtype)
    return {
        "product": numbers(tokens, width),
        "bias": numbers(width) if biased else None,
        "norms": (Norm(torch.nn.Parameter(numbers(rank)), 1e-5, 0.0) if low else None,
                  Norm(torch.nn.Parameter(numbers(latent)), 1e-6, 0.0)),
        "rotary": RotaryTable(torch.rand(64, half, generator=generator), torch.rand(64, half, generator=generator)),
        "positions": torch.randint(64, (tokens,), generator=generator, dtype=torch.int32),
        "slots": slots,
        "cache": arena[:, 1],
        "low": torch.full((tokens, rank), torch.nan, dtype=dtype) if low else None,
    }  # fmt: skip


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = 1e-5 if found.dtype == torch.float32 else 4e-3
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def check(arguments: dict[str, Any], *, interleaved: bool) -> None:
    copy = {**arguments, "cache": arguments["cache"].clone()}
    copy["low"] = None if copy["low"] is None else copy["low"].clone()
    TorchKernels().latent_prologue(**copy, interleaved=interleaved)
    kernels.latent_prologue(**arguments, interleaved=interleaved)
    same(arguments["cache"], copy["cache"])
    if copy["low"] is not None:
        same(arguments["low"], copy["low"])


@settings(max_examples=10)
@given(
    tokens=st.integers(1, 4),
    rank=st.sampled_from([12, 40]),
    latent=st.sampled_from([16, 24]),
    half=st.sampled_from([1, 4, 6]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    biased=st.booleans(),
    low=st.booleans(),
    interleaved=st.booleans(),
)
def test_a_token_is_normed_turned_and_cached(interleaved: bool, **shape: Any) -> None:
    check(drawn(**shape), interleaved=interleaved)


@settings(max_examples=10)
@given(
    tokens=st.integers(1, 3),
    heads=st.integers(1, 6),
    half=st.sampled_from([1, 4, 6]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    interleaved=st.booleans(),
)
def test_queries_are_turned_and_stand_behind_the_latent(
    tokens: int, heads: int, half: int, dtype: torch.dtype, interleaved: bool
) -> None:
    generator = torch.Generator().manual_seed(tokens + heads)
    size, latent = 10 + 2 * half, 16
    rows = torch.randn(tokens, heads * size + 5, generator=generator).to(dtype)  # rows with gaps between them
    product = rows[:, : heads * size].unflatten(1, (heads, size))
    rotary = RotaryTable(torch.rand(64, half, generator=generator), torch.rand(64, half, generator=generator))
    positions = torch.randint(64, (tokens,), generator=generator, dtype=torch.int32)
    slots = torch.arange(tokens) - int(tokens > 1)
    found, expected = torch.full((2, tokens, heads, latent + 2 * half), torch.nan, dtype=dtype).unbind()
    TorchKernels().turn_queries(product, rotary, positions, slots, expected, interleaved=interleaved)
    kernels.turn_queries(product, rotary, positions, slots, found, interleaved=interleaved)
    same(found, expected)
    assert bool(found[..., :latent].isnan().all())


def without_norm(row: Any, bias: Any, weight: Any, columns: Any, inside: Any, *_: Any) -> Any:
    return kernels.tl.load(row + columns, mask=inside, other=0.0).to(kernels.tl.float32)


def test_a_norm_that_is_left_out_and_pairs_that_are_others_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = drawn(3, 12, 16, 4, torch.float32, biased=False, low=True)
    expected = arguments["cache"].clone()
    TorchKernels().latent_prologue(**{**arguments, "cache": expected}, interleaved=True)
    kernels.latent_prologue(**arguments, interleaved=False)
    with pytest.raises(AssertionError, match="not close"):
        same(arguments["cache"], expected)
    monkeypatch.setattr(kernels, "_normed", without_norm)
    with pytest.raises(AssertionError, match="not close"):
        check(arguments, interleaved=True)


def test_the_decoder_launches_them() -> None:
    from penstock_enginecore.forward.cuda.triton_kernels import TritonKernels  # after the interpreter is set

    arguments = drawn(2, 12, 16, 4, torch.float32, biased=True, low=True)
    expected = arguments["cache"].clone()
    kernels.latent_prologue(**{**arguments, "cache": expected}, interleaved=True)
    TritonKernels().latent_prologue(**arguments, interleaved=True)
    same(arguments["cache"], expected)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"product": torch.zeros(2, 30)},
            r"the product has shape \[2, 30\], which does not match a cache of \[3, 1, 16, 24\], a latent of 16, 8 rotated",
        ),
        (
            {"positions": torch.zeros(3, dtype=torch.int32)},
            r"`positions` has shape \[3\] and `slots` has shape \[2\]",
        ),
        ({"low": None}, "or only one of `low` and the norm"),
        ({"product": torch.zeros(36, 2).t()}, "contiguous"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(change: dict[str, Any], said: str) -> None:
    arguments = drawn(2, 12, 16, 4, torch.float32, biased=False, low=True)
    with pytest.raises(ValueError, match=said):
        kernels.latent_prologue(**{**arguments, **change}, interleaved=True)


def test_queries_of_other_shapes_are_refused() -> None:
    rotary = RotaryTable(torch.zeros(4, 4), torch.zeros(4, 4))
    positions, slots = torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(
        ValueError, match=r"the product has shape \[2, 3, 6\], the queries \[2, 3, 24\], with 8 rotated elements"
    ):
        kernels.turn_queries(torch.zeros(2, 3, 6), rotary, positions, slots, torch.zeros(2, 3, 24), interleaved=False)
    with pytest.raises(ValueError, match=r"positions have shape \[2\] and slots \[1\] for 2 tokens"):
        kernels.turn_queries(
            torch.zeros(2, 3, 12), rotary, positions, slots[:1], torch.zeros(2, 3, 24), interleaved=False
        )
