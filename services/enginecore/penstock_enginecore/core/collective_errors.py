"""Errors of collectives in a data-parallel group."""

from penstock_common.errors import PenstockError


class CollectiveBroken(PenstockError):  # noqa: N818 - it says what happened
    """Raised if a collective failed, because another rank was lost or this rank left the group. Later collectives of
    the group fail as well.
    """


class UnpreparedError(PenstockError):
    """Raised if this rank cannot join the group. The error message gives the reason. The other ranks may continue
    without this rank.
    """
