"""What ends a collective without its result, or keeps a rank from being in any."""

from penstock_common.errors import PenstockError


class CollectiveBroken(PenstockError):  # noqa: N818 - it says what happened
    """A collective ended without its result: a peer is gone, or the group was given up. No collective of this group follows."""


class UnpreparedError(PenstockError):
    """This rank cannot be in the group; the message says why. Others may go on without it."""
