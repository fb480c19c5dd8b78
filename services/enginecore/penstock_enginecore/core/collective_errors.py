"""Errors of collectives in a data-parallel group."""

from penstock_common.errors import PenstockError


class CollectiveBroken(PenstockError):  # noqa: N818 - it says what happened
    """A collective ended without a result: a peer was lost, or the group was given up. The group's later collectives
    fail as well.
    """


class UnpreparedError(PenstockError):
    """This rank cannot join the group. The message gives the reason. The other ranks may continue without it."""
