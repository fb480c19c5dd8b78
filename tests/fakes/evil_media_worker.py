"""Media worker that a malicious file controls. It sends answers that no correct worker sends."""

import socket
import sys
from typing import Any

import msgspec

from penstock_frontend.processing.media.worker_messages import LENGTH, Ready, decode_job, framed


def answer_of(kind: str) -> bytes:
    """Return the answer of the worker to an item with this kind in its arguments."""
    head: dict[str, Any] = {
        "type": "Processed",
        "modality": "image",
        "tensors": [],
        "num_embeds": 1,
        "layout": [],
        "seconds": 0.0,
    }
    good = [_tensor("uint8", [2, 2], 4)]
    changed: dict[str, dict[str, Any]] = {
        "good": {"tensors": good},
        "another modality": {"modality": "audio", "tensors": good},
        "another size": {"tensors": [_tensor("uint8", [2, 2], 5)]},
        "negative shape": {"tensors": [_tensor("uint8", [-2, -2], 4)]},
        "negative rows": {"tensors": good, "num_embeds": -1},
        "rows without end": {"tensors": good, "num_embeds": 2**40},
        "unknown dtype": {"tensors": [_tensor("complex128", [2, 2], 64)]},
        "all memory": {"tensors": [_tensor("uint8", [2**40], 2**40)]},
        "bytes that do not come": {"tensors": [_tensor("uint8", [9], 9)]},
    }
    if kind == "no msgpack":
        return LENGTH.pack(4) + b"\xc1\xc1\xc1\xc1"
    if kind == "endless head":
        return LENGTH.pack(2**32 - 1)
    if kind == "nothing":
        return b""
    encoded = msgspec.msgpack.encode(head | changed[kind])
    return LENGTH.pack(len(encoded)) + encoded + b"\0\1\2\3"


def _tensor(dtype: str, shape: list[int], size: int) -> dict[str, Any]:
    return {"name": "pixel_values", "dtype": dtype, "shape": shape, "size": size}


def main(number: int) -> None:
    """Send one answer and end."""
    with socket.socket(fileno=number) as channel, channel.makefile("rb") as reading:
        reading.read(*LENGTH.unpack(reading.read(LENGTH.size)))
        channel.sendall(framed(Ready()))
        while head := reading.read(LENGTH.size):
            job = decode_job(reading.read(*LENGTH.unpack(head)))
            reading.read(sum(job.sizes))
            kind = msgspec.json.decode(job.arguments)["answer"]
            channel.sendall(answer_of(kind))
            if kind != "good":
                return


if __name__ == "__main__":
    main(int(sys.argv[1]))
