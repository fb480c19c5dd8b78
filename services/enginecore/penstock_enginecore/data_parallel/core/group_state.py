"""Where a rank and its group are, for metrics."""

import msgspec


class GroupState(msgspec.Struct, frozen=True, kw_only=True):
    """``recovery_seconds``: from the loss of a group to the first exchange of the next, all of them together. ``switch_seconds``:
    from the last step in a group to the end of the first exchange of the next, of planned changes. ``exchange_seconds``: in
    exchanges, waiting for other ranks among them. ``expert_balance`` and ``num_experts_moved``: None where no experts are shared.
    """

    epoch: int = 0
    num_ranks: int = 0
    rank: int | None = None
    suspended: bool = True
    num_dummy_steps: int = 0
    num_recoveries: int = 0
    recovery_seconds: float = 0.0
    num_switches: int = 0
    switch_seconds: float = 0.0
    num_exchanges: int = 0
    exchange_seconds: float = 0.0
    expert_balance: float | None = None
    num_experts_moved: int | None = None
