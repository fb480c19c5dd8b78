"""Index tensors of a step's recurrent states: which token reads and writes which rows and slots."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from penstock_enginecore.states.base import StateMetadata

NOBODY = -1
"""Owner of padding tokens, and the slot after tokens whose state is not written."""
_ALIGNED = 64
"""Numbers to which vectors are padded. Triton would compile kernels again for vectors of another alignment."""


@dataclass(frozen=True, slots=True)
class StateIndices:
    """Index tensors of a step, int32 on the device. Kernels take every index from these tensors.

    Padding requests have no tokens, and padding tokens have no owner. Kernels neither read nor write states for them.
    Therefore padding needs no slot and no ring.

    Attributes:
        firsts: First token of each request in the flat batch, ``[requests]``.
        starts: Position of that token, ``[requests]``.
        counts: Number of tokens, ``[requests]``.
        rings: Ring of open rows, ``[requests]``.
        slots: Slot of the closed state before the first token, ``[requests]``.
        owners: Request of each token, ``[tokens]``.
        writes: Slot of the state after each token, or ``NOBODY``, ``[tokens]``.
        broken: Receives 1 for requests whose written states have a number that is not finite, ``[requests]``.
        decodes: Whether every request has at most one token.
        padded: Whether the step may have padding.
    """

    firsts: torch.Tensor
    starts: torch.Tensor
    counts: torch.Tensor
    rings: torch.Tensor
    slots: torch.Tensor
    owners: torch.Tensor
    writes: torch.Tensor
    broken: torch.Tensor
    decodes: bool
    padded: bool

    @classmethod
    def of(cls, step: StateMetadata, num_tokens: int, device: torch.device) -> "StateIndices":
        """Return the indices of a step that is not padded. They reach the device in one copy, which starts here."""
        vectors = index_vectors(step, num_tokens)
        padded = [np.pad(vector, (0, -len(vector) % _ALIGNED)) for vector in vectors]
        host = torch.from_numpy(np.concatenate(padded))
        flat = host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)
        parts = torch.split(flat, [len(each) for each in padded])
        tensors = [part[: len(vector)] for part, vector in zip(parts, vectors, strict=True)]
        firsts, starts, counts, rings, slots, owners, writes = tensors
        broken = torch.zeros(len(step.sequences), dtype=torch.int32, device=device)
        decodes = is_decode(step)
        return cls(firsts, starts, counts, rings, slots, owners, writes, broken, decodes=decodes, padded=False)


def is_decode(step: StateMetadata) -> bool:
    """Return whether every request of ``step`` has at most one token."""
    return all(sequence.count <= 1 for sequence in step.sequences)


def index_vectors(step: StateMetadata, num_tokens: int) -> list[npt.NDArray[Any]]:
    """Return the vectors of ``StateIndices`` on the host, int32, in the order of its attributes up to ``writes``."""
    sequences = step.sequences
    requests = np.array(
        [(each.first, each.start, each.count, each.state.rows, each.state.closed) for each in sequences], dtype=np.int32
    ).reshape(-1, 5)
    owners = np.full(num_tokens, NOBODY, dtype=np.int32)
    writes = np.full(num_tokens, NOBODY, dtype=np.int32)
    for index, each in enumerate(sequences):
        owners[each.first : each.first + each.count] = index
        for end, slot in each.state.writes:
            writes[each.first + end - 1 - each.start] = slot
    return [*requests.T, owners, writes]
