"""What an adapter is known by: its content, wherever it lies and however it was written down."""

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass

from penstock_enginecore.lora.tensor_file import StoredTensor

_PERSON = b"penstock.lora.1"
"""Another number wherever the same adapter would get another digest."""
DIGEST_SIZE = 16


@dataclass(frozen=True, slots=True)
class StoredUpdate:
    """Of the layer called ``module``: ``scale * b @ a``, as it is stored."""

    module: str
    scale: float
    a: StoredTensor
    b: StoredTensor


def adapter_digest(updates: Iterable[StoredUpdate]) -> bytes:
    """BLAKE2b-128 of what the updates are: layers, scales, tensors. Their order, what they are called in files, and settings that
    come to the same do not matter.
    """
    state = hashlib.blake2b(digest_size=DIGEST_SIZE, person=_PERSON)
    for update in sorted(updates, key=lambda each: each.module):
        name = update.module.encode()
        state.update(struct.pack("<I", len(name)) + name + struct.pack("<d", update.scale))
        for tensor in (update.a, update.b):
            state.update(tensor.dtype_name.ljust(8).encode() + struct.pack("<QQ", *tensor.shape))
            state.update(tensor.bytes())
    return state.digest()
