"""Requests of a step with a NaN or infinity in their recurrent states."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from penstock_enginecore.states.base import StateMetadata
from penstock_enginecore.worker.device_thread import Arrival, BeginCopy


@dataclass(frozen=True, slots=True)
class BrokenStates:
    """Requests of a step with a NaN or infinity in their recurrent states. Thread-safe.

    Attributes:
        request_ids: IDs of all requests of the step.
        known: Indices of these requests, as far as the host itself has found them.
        coming: Copies, not yet complete, of device tensors with a flag for each request of the step.
    """

    request_ids: Sequence[str] = ()
    known: Collection[int] = ()
    coming: Sequence[Arrival] = ()

    @classmethod
    def of(cls, request_ids: Sequence[str], states: StateMetadata | None, begin_copy: BeginCopy) -> "BrokenStates":
        """Begin to copy the flags of ``states`` to the host. After this call, later steps may overwrite the flags."""
        if states is None:
            return cls()
        return cls(request_ids, states.broken, [begin_copy(flags) for flags in states.flags])

    def wait(self) -> list[str]:
        """Wait until the step's work is complete, and return the IDs of the requests with a NaN or infinity in their
        states.
        """
        broken = set(self.known)
        for flags in self.coming:
            broken.update(flags.wait().nonzero()[0].tolist())
        return [self.request_ids[index] for index in sorted(broken)]


NO_BROKEN_STATES = BrokenStates()
