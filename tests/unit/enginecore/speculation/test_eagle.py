"""Pending hidden states: only those of final positions are kept, and they use no other memory."""

import torch

from penstock_enginecore.speculation.eagle import PendingStates


def states(*positions: int) -> torch.Tensor:
    """Return hidden states that contain their position."""
    return torch.tensor([[float(position)] * 3 for position in positions])


def test_they_are_taken_in_order_and_once() -> None:
    pending = PendingStates(4)
    pending.add(4, states(4, 5))
    pending.add(6, states(6))
    assert (pending.start, pending.end, len(pending)) == (4, 7, 3)
    assert torch.equal(pending.take(2), states(4, 5))
    assert torch.equal(pending.take(1), states(6))
    assert (pending.start, len(pending)) == (7, 0)


def test_rejected_tokens_are_overwritten() -> None:
    pending = PendingStates(0)
    pending.add(0, states(0, 1, 2, 3))
    pending.add(2, 10 * states(2))
    assert len(pending) == 3
    assert torch.equal(pending.take(3), torch.cat([states(0, 1), 10 * states(2)]))


def test_behind_a_gap_or_before_the_start_they_begin_anew() -> None:
    pending = PendingStates(8)
    pending.add(8, states(8))
    pending.add(11, states(11, 12))
    assert (pending.start, pending.end) == (11, 13)
    pending.add(3, states(3))
    assert (pending.start, pending.end) == (3, 4)
    assert torch.equal(pending.take(1), states(3))


def test_a_few_rows_do_not_hold_a_whole_step() -> None:
    step = torch.zeros(512, 3)
    pending = PendingStates(0)
    pending.add(0, step[7:8])
    assert pending.take(1).untyped_storage().nbytes() == 12
    pending.add(1, step)
    assert pending.take(512).data_ptr() == step.data_ptr()
