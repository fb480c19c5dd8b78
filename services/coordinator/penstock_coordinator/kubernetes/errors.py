"""How requests to the API server fail."""

from penstock_common.errors import PenstockError
from penstock_coordinator.kubernetes.rights import Right


class KubernetesError(PenstockError):
    """The API server refused, did not answer, or could not be reached.

    ``reason`` is one word: ``Forbidden``, ``NotFound``, ``Conflict`` and others of the API, ``Timeout`` or ``Unreachable``.
    """

    def __init__(self, right: Right, reason: str, message: str) -> None:
        super().__init__(f"{right.value}: {message}")
        self.right = right
        self.reason = reason
