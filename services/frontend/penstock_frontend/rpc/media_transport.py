"""Transport of tensors to engines, shared by all sessions of a frontend: shared memory and counters."""

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
"""Maximum bytes per request in shared memory. Reading or writing this much blocks either event loop for about 3 ms.
Larger tensors go in chunks, which leave time for other work in between.
"""


class Probe(NamedTuple):
    """Shared memory segment with a nonce. An engine that returns the nonce has proved that it can read this frontend's
    memory.
    """

    name: str
    nonce: bytes


class MediaCounts:
    """Counters since the start of the frontend.

    Attributes:
        num_queries: media items of requests sent to engines.
        num_hits: items among these that the engine had cached.
        num_resent: requests sent again to the same engine, because it lacked omitted data or could not read shared memory.
        num_bytes: bytes of tensors of media and prompt embeddings, by transport.
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
        memory_id: identity of its shared memory; empty: none; None: detect it.
        root: directory of the shared memory.
        """
        self.counts = MediaCounts()
        self._memory_id = shared_memory_id(root) if memory_id is None else memory_id
        self._segments = SegmentWriter(incarnation, root=root)

    def probe(self) -> Probe | None:
        """Return a segment that an engine must read first, or None without shared memory. Call ``withdraw`` afterwards."""
        nonce = secrets.token_bytes(PROBE_BYTES)
        ref = self._segments.write(nonce) if self._memory_id else None
        return None if ref is None else Probe(ref.name, nonce)

    def withdraw(self, probe: Probe) -> None:
        """Remove a probe that the engine has read, or will not read. Idempotent."""
        self._segments.remove(probe.name)

    def session(self, ready: EngineReady, probe: Probe | None = None) -> "SessionSegments | None":
        """Return the shared memory for a session with this engine, or None if they share none. ``probe``: the probe it
        was given.
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
    """Shared memory segments announced to the engine of one session."""

    def __init__(self, segments: SegmentWriter, *, takes_vectors: bool) -> None:
        """``takes_vectors``: whether prompt embeddings may go in shared memory, in addition to media."""
        self.takes_vectors = takes_vectors
        self._segments = segments
        self._names: set[str] = set()
        self._refused = False

    @property
    def usable(self) -> bool:
        """True if the engine can read segments."""
        return not (self._refused or self._segments.broken)

    def has_room(self, num_bytes: int) -> bool:
        """Return True if ``num_bytes`` of one request may be written now."""
        return num_bytes <= MAX_SHARED_BYTES and self.usable and self._segments.has_room(num_bytes)

    def write(self, data: Buffer) -> SegmentRef | None:
        """Write a segment with these bytes. Return None if that fails."""
        ref = self._segments.write(data)
        if ref is not None:
            self._names.add(ref.name)
        return ref

    def give_up(self) -> None:
        """Stop using shared memory, because the engine cannot read it."""
        self._refused = True

    def remove(self, ref: SegmentRef) -> None:
        """Remove a segment that the engine will not be told about."""
        self._names.discard(ref.name)
        self._segments.remove(ref.name)

    def remove_old(self) -> None:
        """Forget segments that were read, and remove those that were not read in time."""
        self._segments.remove_old()
        self._names = {name for name in self._names if name in self._segments}

    def close(self) -> None:
        """Remove all segments at the end of the session."""
        for name in self._names:
            self._segments.remove(name)
        self._names.clear()
