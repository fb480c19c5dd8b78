"""What the ranks of a group share of a model, as the rank's driver sees it."""

from collections.abc import Callable
from typing import Protocol

from penstock_enginecore.data_parallel.core.group_channel import GroupLink


class SharedExperts(Protocol):
    """The experts of a rank, from group to group. ``prepare`` is called on the links' threads, all else on the busy loop's.

    Steps go wrong alone as well: ``EngineCore.step_together`` raises CollectiveBroken for any that does, since others wait for
    what this rank was to compute.
    """

    def prepare(self, epoch: int, link: GroupLink, given_up: Callable[[], bool]) -> None:
        """All ranks of the epoch call it, once they have met: they agree on who holds which experts, and each gets those that it
        lacks. Where a group serves meanwhile, that goes on with what it has. Raises CollectiveBroken, also soon after
        ``given_up`` says so, and UnpreparedError.
        """

    def leave(self) -> None:
        """No step of the group so far follows."""

    def join(self, epoch: int, link: GroupLink) -> None:
        """Steps are those of this epoch, which is prepared, from now on. Raises UnpreparedError."""

    def after_step(self) -> None:
        """All ranks call it behind the same steps. Raises CollectiveBroken."""

    @property
    def balance(self) -> float:
        """The mean of the ranks' tokens over the highest, when they were last counted; 1 before."""

    @property
    def num_moved(self) -> int:
        """Experts that have come to this rank from others, for the sake of balance, in all layers."""

    @property
    def num_experts(self) -> int:
        """Of a layer: no group has more ranks."""

    @property
    def layout(self) -> str:
        """What must be the same on all ranks: how many experts each has room for, and how their weights lie in memory."""
