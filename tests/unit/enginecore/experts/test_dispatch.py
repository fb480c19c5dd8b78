"""Tokens to the ranks of their experts and back, against the same computed in one place."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import patch

import pytest
import torch

from penstock_common.errors import ConfigError
from penstock_enginecore.experts import dispatch as dispatch_module
from penstock_enginecore.experts import layer as layer_module
from penstock_enginecore.experts.dispatch import AllGather, make_dispatch, register_dispatch
from penstock_enginecore.experts.layer import DispatchedExperts, SpreadExperts
from penstock_enginecore.experts.placement import Placement
from penstock_enginecore.native.experts import weighted_sum
from tests.fakes.engines.thread_group import thread_group

EXPERTS, TOP, HIDDEN = 8, 3, 6
SCALES = torch.randn(EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(5))


class Experts(torch.nn.Module):
    """A rank's experts. Each multiplies by its own vector. ``pairs`` counts the computed pairs of token and expert."""

    def __init__(self, held: Sequence[int]) -> None:
        super().__init__()
        self.scales = torch.nn.Parameter(SCALES[list(held)], requires_grad=False)
        self.pairs = 0

    def forward(self, states: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        self.pairs += chosen.numel()
        return weighted_sum(self.scales[chosen] * states[:, None], weights)


def tokens(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    chosen = [torch.randperm(EXPERTS, generator=generator)[:TOP] for _ in range(count)]
    return (
        torch.randn(count, HIDDEN, generator=generator),
        torch.stack(chosen) if chosen else torch.empty(0, TOP, dtype=torch.int64),
        torch.rand(count, TOP, generator=generator),
    )


def spread(size: int, slots: int, dispatch: str, num_layers: int = 1) -> list[SpreadExperts]:
    placement = Placement.even(num_layers, EXPERTS, size, slots)
    made = []
    for group in thread_group(size):
        held = [placement.held(group.rank, layer) for layer in range(num_layers)]
        layers = [DispatchedExperts(layer, EXPERTS, Experts(each), each) for layer, each in enumerate(held)]
        made.append(SpreadExperts(layers, dispatch))
        for layer in layers:
            layer(*tokens(1, 0))  # the same check that a loaded model gets
        made[-1].join(group, placement)
    return made


def compute(experts: SpreadExperts, step: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Compute a step of the first layer."""
    experts.begin_step(len(step[0]))
    return experts.layers[0](*step)  # type: ignore[no-any-return]


def run(ranks: list[SpreadExperts], work: Callable[[int, SpreadExperts], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(work, range(len(ranks)), ranks))


@pytest.mark.parametrize(("size", "slots"), [(1, 8), (2, 4), (3, 3), (4, 5)])
@pytest.mark.parametrize("dispatch", ["allgather", "alltoall", "reduce_scatter"])
def test_each_rank_gets_the_sums_of_its_tokens(dispatch: str, size: int, slots: int) -> None:
    ranks = spread(size, slots, dispatch)
    counts = [7, 0, 1, 13][:size]
    steps = [tokens(count, seed) for seed, count in enumerate(counts)]
    whole = Experts(range(EXPERTS))

    def work(rank: int, experts: SpreadExperts) -> torch.Tensor:
        assert experts.begin_step(len(steps[rank][0])) == counts
        return experts.layers[0](*steps[rank])  # type: ignore[no-any-return]

    for step, found in zip(steps, run(ranks, work), strict=True):
        expected = whole(*step)
        if dispatch == "reduce_scatter":
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(found, expected)


def test_a_rank_without_tokens_takes_part_in_every_layer() -> None:
    ranks = spread(2, 4, "allgather", num_layers=3)
    step = tokens(5, 1)

    def work(rank: int, experts: SpreadExperts) -> list[torch.Tensor]:
        if rank == 0:
            assert experts.take_part() == [0, 5]
            return []
        experts.begin_step(5)
        return [layer(*step) for layer in experts.layers]

    _, found = run(ranks, work)
    assert all(torch.equal(each, Experts(range(EXPERTS))(*step)) for each in found)


def test_long_steps_go_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_module, "MAX_TOKENS", 4)
    ranks = spread(2, 4, "alltoall")
    steps = [tokens(11, 1), tokens(3, 2)]
    for step, found in zip(steps, run(ranks, lambda rank, experts: compute(experts, steps[rank])), strict=True):
        assert torch.equal(found, Experts(range(EXPERTS))(*step))


def test_tokens_of_one_expert_take_turns_at_its_replicas() -> None:
    ranks = spread(2, 8, "allgather")  # both ranks have all experts
    run(ranks, lambda rank, experts: compute(experts, tokens(20, 1)))
    pairs = [experts.layers[0].experts.pairs for experts in ranks]
    assert min(pairs) > 20 * TOP * 0.8


def test_tokens_are_counted_by_expert() -> None:
    ranks = spread(2, 4, "allgather")
    steps = [tokens(9, 1), tokens(4, 2)]
    run(ranks, lambda rank, experts: compute(experts, steps[rank]))
    for (_, chosen, _), experts in zip(steps, ranks, strict=True):
        assert torch.equal(experts.routed()[0], torch.bincount(chosen.flatten(), minlength=EXPERTS))
        assert not experts.routed().any()


def test_alone_a_rank_computes_what_it_holds() -> None:
    layer = DispatchedExperts(0, EXPERTS, Experts([6, 1]), [6, 1])
    states, chosen, weights = tokens(5, 3)
    held = (chosen == 6) | (chosen == 1)
    expected = weighted_sum(SCALES[chosen] * states[:, None], weights.masked_fill(~held, 0.0))
    assert torch.equal(layer(states, chosen, weights), expected)


def test_a_rank_that_has_other_tokens_than_it_told_of_is_named() -> None:
    [alone] = spread(1, 8, "allgather")
    alone.begin_step(4)
    with pytest.raises(RuntimeError, match="rank 0 announced 4 tokens for this step, but has 5"):
        alone.layers[0](*tokens(5, 1))


def test_a_placement_that_is_not_what_a_rank_holds_is_refused() -> None:
    [alone] = spread(1, 8, "allgather")
    [group] = thread_group(1)
    with pytest.raises(ValueError, match=r"layer 0 of rank 0 has the experts .* but the placement assigns the experts"):
        alone.join(group, Placement(EXPERTS, 1, EXPERTS, (tuple(reversed(range(EXPERTS))),)))


def test_steps_before_a_group_or_before_a_model_was_looked_at_are_errors() -> None:
    layer = DispatchedExperts(0, EXPERTS, Experts([6, 1]), [6, 1])
    experts = SpreadExperts([layer], "allgather")
    with pytest.raises(RuntimeError, match="this rank is in no data-parallel group"):
        experts.begin_step(1)
    with pytest.raises(RuntimeError, match="expert layer 0 has not run yet"):
        layer.take_part()


def test_a_dispatch_goes_by_its_name_and_an_unknown_one_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="expert_parallel.dispatch is 'deepep'; registered methods: allgather, alltoall"
    ):
        make_dispatch("deepep")
    with patch.dict(dispatch_module._DISPATCHES):
        register_dispatch("of-a-plugin", AllGather)
        assert isinstance(make_dispatch("of-a-plugin"), AllGather)
