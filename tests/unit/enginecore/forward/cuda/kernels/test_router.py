"""Routers of few tokens in one kernel, against plain torch, in any order of programs."""

import dataclasses
from typing import Any

import pytest
import torch

from penstock_enginecore.forward.cuda.kernel_api import Routing
from tests.fakes.models.interpreted_kernels import interpreted, sum_in_order
from tests.fakes.models.torch_kernels import TorchKernels

router = interpreted("router")
PLAIN = Routing(3, renormalize=True, scale=1.0)
V2 = Routing(6, renormalize=False, scale=16.0, groups=8, kept=3, float32=True)
V3 = Routing(8, renormalize=True, scale=2.5, sigmoid=True, groups=8, kept=4, counted=2, float32=True)
Found = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def assigned(
    kernels: Any, x: torch.Tensor, experts: int, routing: Routing, *, biased: bool = False, weight: Any = None
) -> Found:
    """Return the weights, ends and order of the rows. The last of several tokens is padding."""
    tokens = len(x)
    weight = 0.2 * numbers(experts, x.shape[1]).to(x.dtype) if weight is None else weight
    bias, correction = numbers(experts).to(x.dtype) if biased else None, numbers(experts) if routing.sigmoid else None
    weights = torch.full((tokens, routing.top_k), torch.nan)
    ends, order = torch.full((experts,), -1).int(), torch.full((tokens * routing.top_k,), -1).int()
    starts = torch.tensor([0, 1, max(1, tokens - 1)], dtype=torch.int32)
    counters = [torch.zeros(router.COUNTERS, dtype=torch.int32)] if kernels is router else []
    kernels.assign(x, weight, bias, correction, starts, routing, weights, ends, order, *counters)
    assert all(int(each.sum()) == 0 for each in counters)
    return weights, ends, order


@pytest.fixture
def backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the programs of a launch in the reverse order."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    place = builder.set_grid_idx
    monkeypatch.setattr(
        builder,
        "set_grid_idx",
        lambda *at: place(*(size - 1 - i for size, i in zip(builder.grid_dim, at, strict=True))),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("tokens", "experts", "width", "routing", "biased"),
    [
        (1, 8, 48, dataclasses.replace(PLAIN, top_k=2), False),
        (17, 5, 200, dataclasses.replace(PLAIN, top_k=1, renormalize=False, scale=0.5), True),
        (64, 40, 1200, dataclasses.replace(PLAIN, top_k=8), True),
        (5, 160, 144, V2, False),
        (3, 256, 300, V3, False),
    ],
)
def test_experts_weights_and_rows_are_those_of_torch(
    tokens: int, experts: int, width: int, routing: Routing, biased: bool, dtype: torch.dtype
) -> None:
    x = numbers(tokens, width).to(dtype)
    weights, ends, order = assigned(router, x, experts, routing, biased=biased)
    expected = assigned(TorchKernels(), x, experts, routing, biased=biased)
    torch.testing.assert_close(weights, expected[0], rtol=1e-3 if dtype == torch.float16 else 1e-4, atol=1e-5)
    assert ends.tolist() == expected[1].tolist()
    assert order.tolist() == expected[2].tolist()


def test_a_router_of_float32_in_a_model_of_16_bits() -> None:
    x, weight = numbers(4, 64).half(), numbers(64, 64)
    found, expected = (assigned(each, x, 64, V3, weight=weight) for each in (router, TorchKernels()))
    torch.testing.assert_close(found[0], expected[0])
    assert found[2].tolist() == expected[2].tolist()


@pytest.mark.parametrize("routing", [PLAIN, V3])
def test_a_token_has_the_same_bits_alone_and_in_a_batch(routing: Routing, monkeypatch: pytest.MonkeyPatch) -> None:
    sum_in_order(monkeypatch)
    x = numbers(19, 300)
    weights = assigned(router, x, 64, routing)[0]
    for token in (0, 16):
        assert torch.equal(assigned(router, x[token : token + 1], 64, routing)[0][0], weights[token])


def test_the_order_of_programs_changes_no_bit(request: pytest.FixtureRequest) -> None:
    x = numbers(40, 300)
    forwards = assigned(router, x, 64, PLAIN)
    request.getfixturevalue("backwards")
    for found, expected in zip(assigned(router, x, 64, PLAIN), forwards, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_token_without_numbers_has_no_expert_and_no_weight() -> None:
    x = numbers(4, 64)
    x[1] = torch.nan
    weights, ends, _ = assigned(router, x, 8, PLAIN)
    assert weights[1].isnan().all()
    assert not weights[0].isnan().any()
    assert int(ends[-1]) == 2 * PLAIN.top_k


def test_no_tokens() -> None:
    _, ends, _ = assigned(router, numbers(0, 64), 8, PLAIN)
    assert ends.tolist() == [0] * 8


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"input \[3, 64\], router \[8, 32\], weights \[3, 3\], ends \[8\]"):
        assigned(router, numbers(3, 64), 8, PLAIN, weight=numbers(8, 32))
    with pytest.raises(ValueError, match="65 tokens with 3 experts each are more than 64 tokens or 512 pairs"):
        assigned(router, numbers(65, 64), 8, PLAIN)
    with pytest.raises(ValueError, match="8 experts have no 3 equal groups"):
        assigned(router, numbers(3, 64), 8, dataclasses.replace(PLAIN, groups=3))
    with pytest.raises(ValueError, match="contiguous"):
        assigned(router, numbers(64, 3).t(), 8, PLAIN)
