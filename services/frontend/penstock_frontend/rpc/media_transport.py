"""Shared memory and counters for sending tensors to engines. All sessions of a frontend share them."""

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
"""Maximum number of bytes per request in shared memory. Writing them blocks the frontend's event loop for about 3 ms,
and reading them blocks the engine's event loop for as long. Larger tensors are sent in chunks, so that other work can
run between two chunks.
"""


class Probe(NamedTuple):
    """Shared memory segment with a nonce.

    If an engine returns the nonce, the engine can read this frontend's shared memory.
    """

    name: str
    nonce: bytes


class MediaCounts:
    """Counters since the start of the frontend.

    Attributes:
        num_queries: number of media items in requests that were sent to engines.
        num_hits: number of these items that the engine had cached.
        num_resent: number of times that a request was sent again to the same engine. Reasons are that the engine did
            not have omitted data, or could not read shared memory.
        num_bytes: number of bytes of media tensors and prompt embeddings, by transport.
    """

    def __init__(self) -> None:
        self.num_queries = 0
        self.num_hits = 0
        self.num_resent = 0
        self.num_bytes: Counter[Transport] = Counter()


class MediaTransport:
    """Shared memory and counters of all engine sessions. Must be used on the event loop."""

    def __init__(self, incarnation: str, *, memory_id: str | None = None, root: Path = ROOT) -> None:
        """Args:
        incarnation: incarnation of the frontend.
        memory_id: identity of the frontend's shared memory. Empty means no shared memory. None means to detect the
            identity.
        root: directory of the shared memory.
        """
        self.counts = MediaCounts()
        self._memory_id = shared_memory_id(root) if memory_id is None else memory_id
        self._segments = SegmentWriter(incarnation, root=root)

    def probe(self) -> Probe | None:
        """Return a segment that an engine must read before it gets other segments, or None without shared memory.

        The caller must call ``withdraw`` later.
        """
        nonce = secrets.token_bytes(PROBE_BYTES)
        ref = self._segments.write(nonce) if self._memory_id else None
        return None if ref is None else Probe(ref.name, nonce)

    def withdraw(self, probe: Probe) -> None:
        """Remove a probe, because the engine has read it, or will not read it. Idempotent."""
        self._segments.remove(probe.name)

    def session(self, ready: EngineReady, probe: Probe | None = None) -> "SessionSegments | None":
        """Return the shared memory for a session with this engine, or None if the engine cannot read this frontend's
        memory. ``probe`` is the probe that was sent to the engine.
        """
        if ready.shared_memory_nonce:
            proved = probe is not None and secrets.compare_digest(ready.shared_memory_nonce, probe.nonce)
            return SessionSegments(self._segments, takes_vectors=True) if proved else None
        if not self._memory_id or ready.shared_memory_id != self._memory_id:
            return None
        return SessionSegments(self._segments, takes_vectors=False)  # an engine of an earlier version

    def close(self) -> None:
        """Remove all remaining shared memory."""
        self._segments.close()


class SessionSegments:
    """Shared memory segments for the engine of one session."""

    def __init__(self, segments: SegmentWriter, *, takes_vectors: bool) -> None:
        """``takes_vectors`` is True if the engine accepts prompt embeddings in shared memory, in addition to media."""
        self.takes_vectors = takes_vectors
        self._segments = segments
        self._names: set[str] = set()
        self._refused = False

    @property
    def usable(self) -> bool:
        """True if the engine can read the segments."""
        return not (self._refused or self._segments.broken)

    def has_room(self, num_bytes: int) -> bool:
        """Return True if ``num_bytes`` bytes of one request may be written to shared memory now."""
        return num_bytes <= MAX_SHARED_BYTES and self.usable and self._segments.has_room(num_bytes)

    def write(self, data: Buffer) -> SegmentRef | None:
        """Write a segment with these bytes, and return a reference to the segment. Return None if writing fails."""
        ref = self._segments.write(data)
        if ref is not None:
            self._names.add(ref.name)
        return ref

    def give_up(self) -> None:
        """Stop using shared memory, because the engine cannot read it."""
        self._refused = True

    def remove(self, ref: SegmentRef) -> None:
        """Remove a segment, because no message with its reference is sent to the engine."""
        self._names.discard(ref.name)
        self._segments.remove(ref.name)

    def remove_old(self) -> None:
        """Forget segments that the engine has read, and remove segments that the engine has not read in time."""
        self._segments.remove_old()
        self._names = {name for name in self._names if name in self._segments}

    def close(self) -> None:
        """Remove all segments at the end of the session."""
        for name in self._names:
            self._segments.remove(name)
        self._names.clear()
