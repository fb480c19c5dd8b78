"""Which of many engines a frontend keeps to. Does no I/O."""

import hashlib
from collections.abc import Sequence

from penstock_common.types.cluster import EngineState, EngineStatus


class Subset:
    """At most ``max_engines`` of a view's engines: those that serve before others, and of these the ones with the highest hashes
    of frontend and engine. So every engine is used by about as many frontends, and one that joins or leaves changes one place of
    some subsets (rendezvous hashing, Thaler and Ravishankar 1998).
    """

    def __init__(self, frontend: str, max_engines: int) -> None:
        self._key = hashlib.blake2b(frontend.encode(), digest_size=16).digest()
        self._max_engines = max_engines
        self._weights: dict[str, bytes] = {}

    def of(self, engines: Sequence[EngineStatus]) -> Sequence[EngineStatus]:
        """The engines to keep to; all, where they are not too many."""
        if len(engines) <= self._max_engines:
            return engines
        known = self._weights
        self._weights = {e.engine_id: known.get(e.engine_id) or self._weight(e.engine_id) for e in engines}
        serving_first = sorted(
            engines, key=lambda e: (e.state is EngineState.SERVING, self._weights[e.engine_id]), reverse=True
        )
        return serving_first[: self._max_engines]

    def _weight(self, engine_id: str) -> bytes:
        return hashlib.blake2b(engine_id.encode(), key=self._key, digest_size=8).digest()
