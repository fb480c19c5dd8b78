"""Index tensors that tell kernels which memory of recurrent states each request and token of a step reads and writes."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from penstock_enginecore.states.base import StateMetadata

NOBODY = -1
"""Value in ``StateIndices.owners`` for padding tokens, and in ``StateIndices.writes`` for tokens after which no state
is written.
"""
_ALIGNED = 64
"""Number of elements to whose next multiple vectors are padded. Triton would compile kernels again for vectors with
another alignment.
"""


@dataclass(frozen=True, slots=True)
class StateIndices:
    """Index tensors of a step, int32 on the device. The kernels of recurrent layers take every index from these
    tensors.

    Padding requests have no tokens, and padding tokens belong to no request. Kernels neither read nor write states for
    padding. Therefore padding needs no memory for states.

    Attributes:
        firsts: Index of the first token of each request in the flat batch, ``[requests]``.
        starts: Position of this first token in the request, ``[requests]``.
        counts: Number of tokens of each request in the step, ``[requests]``.
        rings: Index of each request's ring buffer of open rows, ``[requests]``. Open rows are the data of the tokens
            after the last span.
        slots: Slot of the last closed state before each request's first token, ``[requests]``. A closed state is the
            state at the end of a span of 16 tokens.
        owners: Index of the request of each token, or ``NOBODY``, ``[tokens]``.
        writes: Slot into which the state after each token is written, or ``NOBODY``, ``[tokens]``.
        broken: Receives 1 for each request with a NaN or infinity in a state that the step writes, ``[requests]``.
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
        """Return the indices of a step that is not padded. This call starts one copy of all indices to the device."""
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
    """Return the vectors for ``StateIndices`` on the host, int32, in the order of the attributes from ``firsts`` to
    ``writes``.
    """
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
