"""Choice of experts, order of rows and weighted sums of mixtures, against plain torch."""

import dataclasses
from typing import Any

import pytest
import torch

from penstock_enginecore.forward.cuda.kernel_api import Norm, Routing, WeightedRows
from tests.fakes.models.interpreted_kernels import interpreted
from tests.fakes.models.torch_kernels import TorchKernels

mixture, norm = interpreted("mixture"), interpreted("norm")
TOKENS, PADDING = 6, 2
PLAIN = Routing(4, renormalize=True, scale=1.0)
V2 = Routing(6, renormalize=False, scale=16.0, groups=8, kept=3)
V3 = Routing(8, renormalize=True, scale=2.5, sigmoid=True, groups=8, kept=4, counted=2)


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def routed(kernels: Any, logits: torch.Tensor, correction: torch.Tensor | None, routing: Routing) -> Any:
    """Return the weights and the experts of ``logits``. The last tokens are padding, unless there is one token."""
    tokens = len(logits)
    starts = torch.tensor([0, 1, max(1, tokens - PADDING)], dtype=torch.int32)
    weights = torch.full((tokens, routing.top_k), torch.nan)
    chosen = torch.full((tokens, routing.top_k), -1, dtype=torch.int32)
    kernels.route(logits, correction, starts, routing, weights, chosen)
    return weights, chosen


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("routing", "experts"),
    [
        (PLAIN, 8),
        (dataclasses.replace(PLAIN, renormalize=False, top_k=1, scale=0.5), 5),
        (dataclasses.replace(PLAIN, top_k=8), 128),
        (dataclasses.replace(PLAIN, top_k=10), 512),
        (V2, 160),
        (dataclasses.replace(V2, groups=1, kept=1), 64),
        (V3, 256),
        (dataclasses.replace(V3, groups=1, kept=1, top_k=6), 48),
    ],
)
def test_experts_and_weights_are_those_of_torch(routing: Routing, experts: int, dtype: torch.dtype) -> None:
    logits = numbers(TOKENS, experts).to(dtype)
    correction = numbers(experts) if routing.sigmoid else None
    weights, chosen = routed(mixture, logits, correction, routing)
    expected, by_torch = routed(TorchKernels(), logits, correction, routing)
    assert chosen.tolist() == by_torch.tolist()
    assert set(chosen[-PADDING:].flatten().tolist()) == {experts}
    torch.testing.assert_close(weights, expected)


@pytest.mark.parametrize("routing", [PLAIN, V3])
def test_equal_scores_choose_the_lower_index(routing: Routing) -> None:
    _, chosen = routed(mixture, torch.zeros(1, 64), None, routing)
    assert chosen[0].tolist() == list(range(routing.top_k))


@pytest.mark.parametrize("routing", [PLAIN, V2, V3])
def test_a_token_has_the_same_bits_alone_and_in_a_batch(routing: Routing) -> None:
    logits = numbers(TOKENS, 160)
    weights, chosen = routed(mixture, logits, None, routing)
    for token in range(TOKENS - PADDING):
        alone, own = routed(mixture, logits[token : token + 1], None, routing)
        assert torch.equal(alone[0], weights[token])
        assert torch.equal(own[0], chosen[token])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_token_without_numbers_has_no_expert_and_no_weight() -> None:
    logits = numbers(TOKENS, 8)
    logits[1] = torch.nan
    weights, chosen = routed(mixture, logits, None, PLAIN)
    assert chosen[1].tolist() == [8] * 4
    assert weights[1].isnan().all()
    assert not weights[0].isnan().any()


@pytest.mark.parametrize("tokens", [1, 7, 400])
@pytest.mark.parametrize("top_k", [1, 3])
def test_pairs_are_ordered_by_expert_and_then_by_token(tokens: int, top_k: int) -> None:
    random = torch.Generator().manual_seed(tokens)
    chosen = torch.randint(7, (tokens, top_k), generator=random, dtype=torch.int32)
    chosen[chosen == 3] = 4
    found = torch.full((6,), -1, dtype=torch.int32), torch.full((tokens * top_k,), -1, dtype=torch.int32)
    expected = torch.empty_like(found[0]), torch.empty_like(found[1])
    TorchKernels().align(chosen, *expected)
    mixture.align(chosen, *found)
    assert found[0].tolist() == expected[0].tolist()
    assert found[1].tolist() == expected[1].tolist()


@pytest.mark.parametrize("shares", [False, True])
def test_rows_are_weighted_and_summed(shares: bool) -> None:
    rows = WeightedRows(numbers(12, 1030), numbers(4, 3), numbers(4, 1030) if shares else None)
    out, expected = torch.full((2, 4, 1030), torch.nan).unbind()
    mixture.weighted_sum(rows, out)
    TorchKernels().weighted_sum(rows, expected)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_norm_of_summed_rows_has_the_bits_of_two_kernels(dtype: torch.dtype, shares: bool) -> None:
    shared = numbers(4, 1030).to(dtype) if shares else None
    rows, weight = WeightedRows(numbers(12, 1030).to(dtype), numbers(4, 3), shared), Norm(numbers(1030), 1e-6, 1.0)
    total, found, expected = torch.full((3, 4, 1030), torch.nan, dtype=dtype).unbind()
    residuals = numbers(4, 1030).to(dtype).repeat(2, 1, 1)
    mixture.weighted_sum(rows, total)
    norm.add_rms_norm(total, residuals[0], weight, expected)
    norm.add_rms_norm(rows, residuals[1], weight, found)
    assert torch.equal(found, expected)
    assert torch.equal(residuals[0], residuals[1])
    assert not found.isnan().any()


def test_no_tokens() -> None:
    none = torch.empty(0, 4, dtype=torch.int32)
    mixture.route(torch.empty(0, 8), None, torch.zeros(2, dtype=torch.int32), PLAIN, torch.empty(0, 4), none)
    ends = torch.full((8,), 5, dtype=torch.int32)
    mixture.align(none, ends, none.flatten())
    assert ends.tolist() == [0] * 8
    mixture.weighted_sum(WeightedRows(torch.empty(0, 8), torch.empty(0, 2), None), torch.empty(0, 8))


def test_shapes_that_do_not_fit_are_refused() -> None:
    starts, chosen = torch.zeros(2, dtype=torch.int32), torch.zeros(3, 4, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"logits \[3, 8\], weights \[3, 2\], chosen \[3, 4\], 4 experts per token"):
        mixture.route(numbers(3, 8), None, starts, PLAIN, numbers(3, 2), chosen)
    with pytest.raises(ValueError, match="the correction has a wrong shape, or 8 experts have no 3 equal groups"):
        mixture.route(numbers(3, 8), None, starts, dataclasses.replace(PLAIN, groups=3), numbers(3, 4), chosen)
    with pytest.raises(ValueError, match="contiguous"):
        mixture.route(numbers(8, 3).t(), None, starts, PLAIN, numbers(3, 4), chosen)
    with pytest.raises(ValueError, match=r"chosen \[3, 4\], order \[2\]"):
        mixture.align(chosen, torch.zeros(8, dtype=torch.int32), starts)
    rows = WeightedRows(numbers(6, 8), numbers(3, 2), None)
    with pytest.raises(ValueError, match=r"shapes do not match: \[5, 8\], \[3, 2\]"):
        mixture.weighted_sum(dataclasses.replace(rows, rows=numbers(5, 8)), torch.empty(3, 8))
    with pytest.raises(ValueError, match=r"sum has shape \[3, 8\], but the output has shape \[3, 9\]"):
        mixture.weighted_sum(rows, torch.empty(3, 9))
    with pytest.raises(ValueError, match=r"shapes do not match: \[6, 8\], \[3, 2\], \[2, 8\]"):
        norm.add_rms_norm(dataclasses.replace(rows, shared=numbers(2, 8)), None, Norm(numbers(8), 0.0, 0.0), chosen)
    with pytest.raises(ValueError, match=r"norms need contiguous tensors of one shape, but got \[3, 9\] and \[3, 8\]"):
        norm.add_rms_norm(rows, None, Norm(numbers(8), 0.0, 0.0), numbers(3, 9))
