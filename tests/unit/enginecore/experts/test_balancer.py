"""Experts that move while a group computes: results stay the same, in every step of the way."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from penstock_enginecore.config import ExpertParallelConfig
from penstock_enginecore.experts.balancer import ExpertBalancer, ExpertMoves, balance
from penstock_enginecore.experts.layer import DispatchedExperts, SpreadExperts
from penstock_enginecore.experts.placement import Placement
from penstock_enginecore.native.backend import PackedLayers
from penstock_enginecore.native.library import open_library
from tests.fakes.engines.instruction_sets import runnable
from tests.fakes.engines.thread_group import thread_group

EXPERTS, TOP, HIDDEN, SIZE, SLOTS, LAYERS = 6, 2, 32, 2, 4, 2


def whole(layer: int) -> Any:
    """Return all experts of the layer."""
    config = MixtralConfig(hidden_size=HIDDEN, intermediate_size=32, num_local_experts=EXPERTS, num_experts_per_tok=TOP)
    config._experts_implementation = "eager"
    experts = MixtralExperts(config).requires_grad_(requires_grad=False)
    generator = torch.Generator().manual_seed(layer)
    for parameter in experts.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    return experts


def some(layer: int, held: tuple[int, ...]) -> Any:
    experts = whole(layer)
    for name, parameter in list(experts.named_parameters()):
        setattr(experts, name, torch.nn.Parameter(parameter[list(held)], requires_grad=False))
    experts.num_experts = len(held)
    return experts


def tokens(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens with their experts. Most tokens go to the first two experts."""
    generator = torch.Generator().manual_seed(seed)
    odds = torch.tensor([9.0, 9.0, 1.0, 1.0, 1.0, 1.0]).expand(count, -1)
    chosen = torch.multinomial(odds, TOP, generator=generator)
    return torch.randn(count, HIDDEN, generator=generator), chosen, torch.rand(count, TOP, generator=generator)


@pytest.fixture(params=["packed", "torch"])
def ranks(request: pytest.FixtureRequest) -> list[SpreadExperts]:
    placement = Placement.even(LAYERS, EXPERTS, SIZE, SLOTS)
    made = []
    for group in thread_group(SIZE):
        layers = []
        for layer in range(LAYERS):
            held = placement.held(group.rank, layer)
            layers.append(DispatchedExperts(layer, EXPERTS, some(layer, held), held))
        if request.param == "packed":
            PackedLayers(torch.nn.ModuleList(layers), open_library(runnable()[-1], 1))
        made.append(SpreadExperts(layers, "allgather"))
        made[-1].join(group, placement)
    return made


def run(ranks: list[SpreadExperts], work: Callable[[int, SpreadExperts], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(work, range(len(ranks)), ranks))


def outputs(experts: SpreadExperts, rank: int, step: int = 0) -> list[torch.Tensor]:
    experts.begin_step(20)
    return [layer(*tokens(20, 10 * step + rank)) for layer in experts.layers]


def test_a_step_gives_the_same_after_every_piece_of_a_move(ranks: list[SpreadExperts]) -> None:
    after = Placement(EXPERTS, SIZE, SLOTS, ((5, 4, 3, 0, 1, 2, 3, 4), (0, 1, 5, 3, 4, 2, 0, 1)))

    def work(rank: int, experts: SpreadExperts) -> tuple[list[list[torch.Tensor]], int]:
        found = [outputs(experts, rank)]
        moves = ExpertMoves(experts, after, bytes_per_step=1)  # moves one expert per step
        while not moves.done:
            moves.step()
            found.append(outputs(experts, rank))
        return found, moves.num_moves

    for rank, (found, num_moves) in enumerate(run(ranks, work)):
        assert len(found) == num_moves + 1 > 5
        for later in found[1:]:
            for one, other, layer in zip(found[0], later, range(LAYERS), strict=True):
                torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5)
                torch.testing.assert_close(other, whole(layer)(*tokens(20, rank)), rtol=1e-4, atol=1e-5)
    assert all(experts.placement == after for experts in ranks)
    assert [layer.held for layer in ranks[1].layers] == [(1, 2, 3, 4), (4, 2, 0, 1)]


def test_a_piece_is_as_large_as_is_allowed(ranks: list[SpreadExperts]) -> None:
    after = Placement(EXPERTS, SIZE, SLOTS, ((5, 4, 3, 0, 1, 2, 3, 4), ranks[0].placement.physical[1]))
    size = sum(map(len, ranks[0].layers[0].slot_memory(0)))

    def work(rank: int, experts: SpreadExperts) -> tuple[int, list[int]]:
        moves, come = ExpertMoves(experts, after, bytes_per_step=3 * size), []
        while not moves.done:
            come.append(moves.step())
        return moves.num_moves, come

    found = run(ranks, work)
    for num_moves, come in found:
        assert len(come) == -(-num_moves // 3)
        assert not any(come[:-1])  # all experts become active together, when the last one has arrived
        assert sum(sum(each) for _, each in found) == num_moves


def test_hot_experts_are_replicated_and_every_step_gives_the_same(ranks: list[SpreadExperts]) -> None:
    config = ExpertParallelConfig(slots=SLOTS, window=3, move_bytes_per_step=1)

    def work(rank: int, experts: SpreadExperts) -> ExpertBalancer:
        for layer in experts.layers:
            layer.hold(experts.placement.held(rank, layer.layer))
        balancer = ExpertBalancer(experts, config)
        for step in range(30):
            found = outputs(experts, rank, step)
            for layer, each in enumerate(found):
                expected = whole(layer)(*tokens(20, 10 * step + rank))
                torch.testing.assert_close(each, expected, rtol=1e-4, atol=1e-5)
            balancer.after_step()
        return balancer

    first, second = run(ranks, work)
    assert ranks[0].placement == ranks[1].placement
    assert first.balance == second.balance >= 0.9
    counts = torch.bincount(
        torch.cat([tokens(20, seed)[1].flatten() for seed in range(20)]), minlength=EXPERTS
    ).tolist()
    for layer in ranks[0].placement.physical:
        assert balance(counts, layer, SIZE) >= 0.9


def test_without_a_window_experts_stay(ranks: list[SpreadExperts]) -> None:
    before = ranks[0].placement

    def work(rank: int, experts: SpreadExperts) -> None:
        balancer = ExpertBalancer(experts, ExpertParallelConfig())
        for step in range(5):
            outputs(experts, rank, step)
            balancer.after_step()

    run(ranks, work)
    assert ranks[0].placement == before


def test_ranks_whose_weights_lie_differently_are_told(
    ranks: list[SpreadExperts], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DispatchedExperts, "layout", property(lambda layer: str(layer.held)))

    def work(rank: int, experts: SpreadExperts) -> str:
        with pytest.raises(ValueError, match=f"different layouts; rank {rank}") as raised:
            ExpertMoves(experts, experts.placement, 1)
        return str(raised.value)

    assert len(set(run(ranks, work))) == SIZE
