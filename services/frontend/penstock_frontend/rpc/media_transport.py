"""Shared memory for sending tensors to engines, and counters of the sent media. All sessions of a frontend share both."""

import secrets
from collections import Counter
from pathlib import Path
from typing import Literal, NamedTuple

from penstock_common.tensors.chunks import Buffer
from penstock_common.tensors.shared_memory import PROBE_BYTES, ROOT, SegmentRef, SegmentWriter, shared_memory_id
from penstock_common.types.outputs import EngineReady

Transport = Literal["inline", "chunks", "shared_memory"]
TRANSPORTS: tuple[Transport, ...] = ("inline", "chunks", "shared_memory")

MAX_SHARED_BYTES = 8 * 1024 * 1024
"""Maximum number of bytes in shared memory for one request.

Writing this many bytes blocks the frontend's event loop for about 3 ms, and reading them blocks the engine's event loop
for about as long. Larger tensors are sent in chunks, so that other work can run between two chunks.
"""


class Probe(NamedTuple):
    """Shared memory segment that contains a random value.

    If an engine returns this value, the engine can read the frontend's shared memory.
    """

    name: str
    nonce: bytes


class MediaCounts:
    """Counters of sent media since the start of the frontend.

    Attributes:
        num_queries: number of media items in requests that were sent to engines.
        num_hits: number of these media items that the engine had already cached.
        num_resent: number of times that a request was sent to the same engine again. The reason is that the engine
            lacked data that the frontend had left out, or could not read shared memory.
        num_bytes: size of the sent media tensors and prompt embeddings in bytes, by transport.
    """

    def __init__(self) -> None:
        self.num_queries = 0
        self.num_hits = 0
        self.num_resent = 0
        self.num_bytes: Counter[Transport] = Counter()


class MediaTransport:
    """Shared memory and counters for all engine sessions. All methods must be called on the event loop."""

    def __init__(self, incarnation: str, *, memory_id: str | None = None, root: Path = ROOT) -> None:
        """Args:
        incarnation: id of this run of the frontend process.
        memory_id: identity of the frontend's shared memory. Empty means that no shared memory is used. None means that
            the class detects the identity.
        root: directory in which the shared memory segments are created.
        """
        self.counts = MediaCounts()
        self._memory_id = shared_memory_id(root) if memory_id is None else memory_id
        self._segments = SegmentWriter(incarnation, root=root)

    def probe(self) -> Probe | None:
        """Return a segment that an engine must read before the frontend sends it other segments. Return None if no
        shared memory is used.

        The caller must call ``withdraw`` with the segment later.
        """
        nonce = secrets.token_bytes(PROBE_BYTES)
        ref = self._segments.write(nonce) if self._memory_id else None
        return None if ref is None else Probe(ref.name, nonce)

    def withdraw(self, probe: Probe) -> None:
        """Remove the segment of a probe, because the engine has read it, or will not read it. Idempotent."""
        self._segments.remove(probe.name)

    def session(self, ready: EngineReady, probe: Probe | None = None) -> "SessionSegments | None":
        """Return the shared memory for a session with an engine. Return None if the engine cannot read this frontend's
        memory. ``probe`` is the probe that was sent to the engine.
        """
        if ready.shared_memory_nonce:
            proved = probe is not None and secrets.compare_digest(ready.shared_memory_nonce, probe.nonce)
            return SessionSegments(self._segments, takes_vectors=True) if proved else None
        if not self._memory_id or ready.shared_memory_id != self._memory_id:
            return None
        # an engine of an earlier version does not report the identity of its memory
        return SessionSegments(self._segments, takes_vectors=False)

    def close(self) -> None:
        """Remove all shared memory segments that still exist."""
        self._segments.close()


class SessionSegments:
    """Shared memory segments for the engine of one session."""

    def __init__(self, segments: SegmentWriter, *, takes_vectors: bool) -> None:
        """Create the segments of one session. ``takes_vectors`` is True if the engine accepts not only media but also
        prompt embeddings in shared memory.
        """
        self.takes_vectors = takes_vectors
        self._segments = segments
        self._names: set[str] = set()
        self._refused = False

    @property
    def usable(self) -> bool:
        """True if the engine can read the segments in shared memory."""
        return not (self._refused or self._segments.broken)

    def has_room(self, num_bytes: int) -> bool:
        """Return True if ``num_bytes`` bytes of a request may be written to shared memory now."""
        return num_bytes <= MAX_SHARED_BYTES and self.usable and self._segments.has_room(num_bytes)

    def write(self, data: Buffer) -> SegmentRef | None:
        """Write these bytes to a new segment, and return a reference to the segment. Return None if the segment cannot
        be written.
        """
        ref = self._segments.write(data)
        if ref is not None:
            self._names.add(ref.name)
        return ref

    def give_up(self) -> None:
        """Stop using shared memory in this session, because the engine cannot read it."""
        self._refused = True

    def remove(self, ref: SegmentRef) -> None:
        """Remove a segment, because no message with a reference to it will be sent to the engine."""
        self._names.discard(ref.name)
        self._segments.remove(ref.name)

    def remove_old(self) -> None:
        """Forget the segments that the engine has read. Remove the segments that the engine has not read before their
        time limit.
        """
        self._segments.remove_old()
        self._names = {name for name in self._names if name in self._segments}

    def close(self) -> None:
        """Remove all segments of the session, because the session ends."""
        for name in self._names:
            self._segments.remove(name)
        self._names.clear()
