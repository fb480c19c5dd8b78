"""What all sessions of a frontend share to bring tensors to engines: shared memory, and what is counted."""

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
"""Of one request: writing or reading so much keeps either end's loop busy for some 3 ms. What is larger goes in chunks, between
which others have their turns.
"""


class Probe(NamedTuple):
    """A segment that proves that an engine reads this frontend's memory, when it says what that holds."""

    name: str
    nonce: bytes


class MediaCounts:
    """Since the start of the frontend. ``num_queries``: items of requests that were sent to engines, ``num_hits`` those of them
    that their engine had; ``num_bytes``: of tensors of media, and of prompts as vectors, by transport; ``num_resent``: requests
    that were sent again to the same engine, which had not had what they left out or could not read it.
    """

    def __init__(self) -> None:
        self.num_queries = 0
        self.num_hits = 0
        self.num_resent = 0
        self.num_bytes: Counter[Transport] = Counter()


class MediaTransport:
    """Belongs to the event loop."""

    def __init__(self, incarnation: str, *, memory_id: str | None = None, root: Path = ROOT) -> None:
        """``incarnation``: the frontend's. ``memory_id``: names its shared memory, empty for none; None: it is looked up.
        ``root``: where that is.
        """
        self.counts = MediaCounts()
        self._memory_id = shared_memory_id(root) if memory_id is None else memory_id
        self._segments = SegmentWriter(incarnation, root=root)

    def probe(self) -> Probe | None:
        """What an engine is to read before anything else; None where there is no memory to share. ``withdraw`` it."""
        nonce = secrets.token_bytes(PROBE_BYTES)
        ref = self._segments.write(nonce) if self._memory_id else None
        return None if ref is None else Probe(ref.name, nonce)

    def withdraw(self, probe: Probe) -> None:
        """The engine has read it, or will not. Idempotent."""
        self._segments.remove(probe.name)

    def session(self, ready: EngineReady, probe: Probe | None = None) -> "SessionSegments | None":
        """What a session with this engine, which was given ``probe``, writes into; None where they share no memory."""
        if ready.shared_memory_nonce:
            proved = probe is not None and secrets.compare_digest(ready.shared_memory_nonce, probe.nonce)
            return SessionSegments(self._segments, takes_vectors=True) if proved else None
        if not self._memory_id or ready.shared_memory_id != self._memory_id:
            return None
        return SessionSegments(self._segments, takes_vectors=False)  # an engine of an earlier version

    def close(self) -> None:
        """Remove what is left in shared memory."""
        self._segments.close()


class SessionSegments:
    """The segments that one session's engine is told of."""

    def __init__(self, segments: SegmentWriter, *, takes_vectors: bool) -> None:
        """``takes_vectors``: whether prompts as vectors may lie there, beside media."""
        self.takes_vectors = takes_vectors
        self._segments = segments
        self._names: set[str] = set()
        self._refused = False

    @property
    def usable(self) -> bool:
        """Whether the engine can read what is written."""
        return not (self._refused or self._segments.broken)

    def has_room(self, num_bytes: int) -> bool:
        """Whether so many bytes, of one request, may be written now."""
        return num_bytes <= MAX_SHARED_BYTES and self.usable and self._segments.has_room(num_bytes)

    def write(self, data: Buffer) -> SegmentRef | None:
        """A segment with these bytes; None where none can be made."""
        ref = self._segments.write(data)
        if ref is not None:
            self._names.add(ref.name)
        return ref

    def give_up(self) -> None:
        """The engine cannot read them."""
        self._refused = True

    def remove(self, ref: SegmentRef) -> None:
        """The engine will not be told of it."""
        self._names.discard(ref.name)
        self._segments.remove(ref.name)

    def remove_old(self) -> None:
        """Forget what was read, and remove what nobody has read for too long."""
        self._segments.remove_old()
        self._names = {name for name in self._names if name in self._segments}

    def close(self) -> None:
        """The session is over."""
        for name in self._names:
            self._segments.remove(name)
        self._names.clear()
