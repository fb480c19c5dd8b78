"""Ranks agree that all have met: nobody takes the group for formed while another one may still give up."""

import itertools

import pytest

from penstock_enginecore.parallel.rendezvous import CONFIRMED, READY, Confirmation


def test_a_rank_confirms_when_all_are_ready_and_is_over_when_all_have_confirmed() -> None:
    rank = Confirmation([0, 2])
    assert rank.next_word() == READY
    assert rank.next_word() == b""
    rank.hear(0, READY)
    assert (rank.next_word(), rank.waits_for(), rank.confirmed) == (b"", [2], False)
    rank.hear(2, READY)
    assert rank.next_word() == CONFIRMED
    assert rank.confirmed
    assert not rank.over
    rank.hear(2, CONFIRMED)
    assert rank.waits_for() == [0]
    rank.hear(0, CONFIRMED)
    assert (rank.over, rank.next_word(), rank.missing_from(0)) == (True, b"", 0)


def test_both_words_may_come_before_a_rank_is_ready_itself() -> None:
    rank = Confirmation([1])
    rank.hear(1, READY)
    rank.hear(1, CONFIRMED)
    assert not rank.over
    assert [rank.next_word(), rank.next_word(), rank.next_word()] == [READY, CONFIRMED, b""]
    assert rank.over


@pytest.mark.parametrize("said", [[CONFIRMED], [READY, READY], [READY, CONFIRMED, b"x"], [b"collective"]])
def test_another_word_is_refused(said: list[bytes]) -> None:
    rank = Confirmation([1])
    with pytest.raises(ValueError, match="rank 1 says"):
        for each in said:
            rank.hear(1, each)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_no_rank_is_over_while_one_that_has_not_confirmed_may_give_up(order: tuple[int, ...]) -> None:
    """One rank is never ready: the others wait for it in whatever order they hear each other."""
    ranks = {rank: Confirmation(peer for peer in range(3) if peer != rank) for rank in range(3)}
    missing, *present = order
    for _ in range(3):
        for rank in present:
            while word := ranks[rank].next_word():
                for peer in present:
                    if peer != rank:
                        ranks[peer].hear(rank, word)
    assert not any(ranks[rank].over or ranks[rank].confirmed for rank in present)
    assert all(ranks[rank].waits_for() == [missing] for rank in present)
