"""Experts on the ranks of successive groups, and the experts that each rank reads for a new group."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from penstock_common.errors import ConfigError
from penstock_enginecore.config import ExpertParallelConfig
from penstock_enginecore.core.collective_errors import CollectiveBroken, UnpreparedError
from penstock_enginecore.experts.balancer import ExpertMoves
from penstock_enginecore.experts.group_experts import GroupExperts, regrouped
from penstock_enginecore.experts.layer import EMPTY, DispatchedExperts, SpreadExperts
from penstock_enginecore.experts.placement import Placement
from penstock_enginecore.models.errors import ModelLoadError
from tests.fakes.engines.thread_group import thread_group
from tests.fakes.patience import PATIENCE

EXPERTS, TOP, HIDDEN, LAYERS = 8, 2, 6, 2
SCALES = torch.randn(LAYERS, EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(5))


class Experts(torch.nn.Module):
    """Experts that multiply by one vector each."""

    def __init__(self, slots: int) -> None:
        super().__init__()
        self.scales = torch.nn.Parameter(torch.zeros(slots, HIDDEN), requires_grad=False)

    def forward(self, states: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return (self.scales[chosen] * states[:, None] * weights[..., None]).sum(1)


class Checkpoint:
    """A checkpoint that counts its reads.

    Attributes:
        read_experts: Layer and number of each expert read since the list was cleared.
        gone: Whether the files have been deleted.
    """

    def __init__(self) -> None:
        self.read_experts: list[tuple[int, int]] = []
        self.gone = False

    def read(self, layer: int, experts: Sequence[int]) -> dict[str, torch.Tensor]:
        if self.gone:
            raise ModelLoadError("the files are gone")
        self.read_experts += [(layer, expert) for expert in experts]
        return {"scales": SCALES[layer, list(experts)]}

    def take(self) -> set[tuple[int, int]]:
        taken, self.read_experts = self.read_experts, []
        assert len(set(taken)) == len(taken)
        return set(taken)


class Rank:
    def __init__(self, slots: int) -> None:
        self.files = Checkpoint()
        layers = [DispatchedExperts(layer, EXPERTS, Experts(slots), [0] * slots) for layer in range(LAYERS)]
        for layer in layers:
            layer(*tokens(1, 0))
        self.spread = SpreadExperts(layers, "allgather")
        self.experts = GroupExperts(self.spread, self.files, ExpertParallelConfig())  # type: ignore[arg-type]

    def held(self, layer: int = 0) -> tuple[int, ...]:
        return self.spread.layers[layer].held


def tokens(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP] for _ in range(count)])
    return torch.randn(count, HIDDEN, generator=generator), chosen, torch.rand(count, TOP, generator=generator)


def together(ranks: Sequence[Rank], work: Any) -> list[Any]:
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(work, range(len(ranks))))


def prepare(epoch: int, ranks: Sequence[Rank]) -> list[Any]:
    links = [SimpleNamespace(collectives=group) for group in thread_group(len(ranks))]
    together(ranks, lambda rank: ranks[rank].experts.prepare(epoch, links[rank], lambda: False))
    return links


def join(epoch: int, ranks: Sequence[Rank], links: list[Any]) -> None:
    for rank, link in zip(ranks, links, strict=True):
        rank.experts.leave()
        rank.experts.join(epoch, link)


def check_outputs(ranks: Sequence[Rank]) -> None:
    """Check that every rank's output equals that of all experts in one place."""

    def work(number: int) -> list[torch.Tensor]:
        step = tokens(9, number)
        ranks[number].spread.begin_step(9)
        return [layer(*step) for layer in ranks[number].spread.layers]

    for number, found in enumerate(together(ranks, work)):
        states, chosen, weights = tokens(9, number)
        for layer, each in enumerate(found):
            expected = (SCALES[layer][chosen] * states[:, None] * weights[..., None]).sum(1)
            torch.testing.assert_close(each, expected)


def everything(held: Sequence[int]) -> set[tuple[int, int]]:
    return {(layer, expert) for layer in range(LAYERS) for expert in held}


def test_first_ranks_read_their_experts_and_survivors_those_lost_with_a_dead_rank() -> None:
    ranks = [Rank(4) for _ in range(3)]
    assert (ranks[0].held(), ranks[0].experts.num_experts) == ((EMPTY,) * 4, EXPERTS)
    join(1, ranks, prepare(1, ranks))
    assert [rank.held() for rank in ranks] == [(0, 1, 2, 3), (4, 5, 6, 7), (0, 1, 2, 3)]
    assert [rank.files.take() for rank in ranks] == [everything(rank.held()) for rank in ranks]
    check_outputs(ranks)

    survivors = [ranks[0], ranks[2]]
    for rank in survivors:
        rank.experts.leave()
    join(2, survivors, prepare(2, survivors))
    read = [rank.files.take() for rank in survivors]
    assert read[0] | read[1] == everything([4, 5, 6, 7])
    assert len(read[0]) == len(read[1]) == 2 * LAYERS
    check_outputs(survivors)


def test_a_group_that_serves_keeps_its_slots_until_all_join_the_next() -> None:
    ranks = [Rank(4) for _ in range(2)]
    join(1, ranks, prepare(1, ranks))
    # Pretend that no rank holds two of the experts: the next placement loads them to their old places.
    ranks[1].spread.layers[0].hold((4, 5, EMPTY, EMPTY))
    grown = [*ranks, Rank(4)]
    before = ranks[1].held()
    for rank in ranks:
        rank.files.take()
    links = prepare(2, grown)
    assert ranks[1].held() == before
    assert ranks[1].files.take() == {(0, 6), (0, 7)}
    join(2, grown, links)
    assert not ranks[1].files.take()
    check_outputs(grown)


def move(ranks: Sequence[Rank], layer: int, experts: Sequence[int]) -> None:
    """Put other experts into the slots of a layer."""

    def work(rank: int) -> None:
        moves = ExpertMoves(ranks[rank].spread, ranks[rank].spread.placement.with_layer(layer, experts), 1)
        while not moves.done:
            moves.step()

    together(ranks, work)


def test_experts_that_move_when_a_group_is_prepared_are_kept_until_it_is_joined() -> None:
    ranks = [Rank(4) for _ in range(2)]
    join(1, ranks, prepare(1, ranks))
    move(ranks, 1, (4, 1, 2, 3, 0, 5, 6, 7))
    grown = [*ranks, Rank(4)]
    links = prepare(2, grown)
    kept = [rank.spread.layers[0].slot_memory(0)[0].clone() for rank in ranks]
    for rank in ranks:
        rank.files.take()
        rank.files.gone = True
    move(ranks, 0, (4, 1, 2, 3, 0, 5, 6, 7))
    move(ranks, 0, (5, 1, 2, 3, 0, 4, 6, 7))
    check_outputs(ranks)
    join(2, grown, links)
    assert [rank.held() for rank in ranks] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert all(torch.equal(rank.spread.layers[0].slot_memory(0)[0], was) for rank, was in zip(ranks, kept, strict=True))
    check_outputs(grown)
    # Moves in the serving group set no expert's weights aside.
    move(grown, 0, (4, 1, 2, 3, 0, 5, 6, 7, *grown[2].held()))
    assert not any(prepared.aside for rank in grown for prepared in rank.experts._prepared.values())


def test_experts_that_move_before_a_group_has_read_their_layer_are_read_aside() -> None:
    ranks = [Rank(4) for _ in range(2)]
    join(1, ranks, prepare(1, ranks))
    for rank in ranks:
        rank.files.take()
    barrier = threading.Barrier(3)
    agree = GroupExperts._agree

    def agree_and_wait(experts: GroupExperts, group: Any) -> Placement:
        placement = agree(experts, group)
        for _ in range(2):  # after this, all ranks have agreed and some experts have moved
            barrier.wait(PATIENCE)
        return placement

    with patch.object(GroupExperts, "_agree", agree_and_wait), ThreadPoolExecutor(1) as pool:
        preparing = pool.submit(prepare, 2, ranks)
        barrier.wait(PATIENCE)
        move(ranks, 0, (4, 1, 2, 3, 0, 5, 6, 7))
        barrier.wait(PATIENCE)
        links = preparing.result(PATIENCE)
    assert [rank.files.take() for rank in ranks] == [{(0, 0)}, {(0, 4)}]
    for rank in ranks:
        rank.files.gone = True
    join(2, ranks, links)
    assert [rank.held() for rank in ranks] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    check_outputs(ranks)


def test_a_rank_that_cannot_read_is_not_prepared_and_says_why() -> None:
    ranks = [Rank(4) for _ in range(2)]
    ranks[1].files.gone = True
    links = [SimpleNamespace(collectives=group) for group in thread_group(2)]

    def work(rank: int) -> str:
        try:
            ranks[rank].experts.prepare(1, links[rank], lambda: False)  # type: ignore[arg-type]
        except UnpreparedError as e:
            return str(e)
        return ""

    assert together(ranks, work) == ["", "the files are gone"]
    assert ranks[1].held() == (EMPTY,) * 4


def test_reading_ends_soon_after_the_group_is_given_up() -> None:
    [rank] = [Rank(8)]
    [group] = thread_group(1)
    link: Any = SimpleNamespace(collectives=group)
    with pytest.raises(CollectiveBroken, match="given up while experts were read"):
        rank.experts.prepare(1, link, lambda: len(rank.files.read_experts) > 0)
    assert rank.files.take() == {(0, expert) for expert in range(8)}
    assert (rank.held(0), rank.held(1)) == (tuple(range(8)), (EMPTY,) * 8)


def test_a_placement_keeps_what_is_held_and_holds_everything() -> None:
    placement = regrouped([[[3, 3, 0]], [[EMPTY, 1, 3]], [[0, 3, EMPTY]]], 6)
    # Experts 2 and 4 get empty slots, and expert 5 gets the last slot. Afterwards, expert 1 has the fewest copies.
    assert placement.physical == ((3, 2, 0, 4, 1, 3, 0, 3, 5),)
    assert regrouped([[[0, 1, 2]], [[0, 1, 2]]], 4).physical == ((3, 1, 2, 0, 1, 2),)
    with pytest.raises(ConfigError, match="the group has 3 ranks; the limit is 2"):
        regrouped([[[0]], [[1]], [[EMPTY]]], 2)
    with pytest.raises(
        ConfigError, match="expert_parallel.slots is 1; 2 ranks need at least 2 slots each for the model's 4 experts"
    ):
        regrouped([[[0]], [[1]]], 4)
