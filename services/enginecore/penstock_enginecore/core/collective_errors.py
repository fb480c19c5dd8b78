"""Errors of collectives in a data-parallel group."""

from penstock_common.errors import PenstockError


class CollectiveBroken(PenstockError):  # noqa: N818 - it says what happened
    """A collective failed, because a peer was lost or this rank left the group. Later collectives of the group fail as
    well.
    """


class UnpreparedError(PenstockError):
    """This rank cannot join the group. The message gives the reason. The other ranks may continue without this rank."""
