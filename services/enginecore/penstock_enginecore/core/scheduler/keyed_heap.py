"""A heap whose members can leave it, and change their rank."""

import heapq
from typing import Any, Generic, TypeVar

K = TypeVar("K", str, int)


class KeyedHeap(Generic[K]):
    """Keys by rank, the lowest first; equal ranks by key. Every operation costs O(log n) amortized.

    What is out of date stays in the heap until it gets to the head, or outnumbers the living; then the heap is rebuilt.
    """

    def __init__(self) -> None:
        self._ranks: dict[K, Any] = {}
        self._heap: list[tuple[Any, K]] = []

    def __len__(self) -> int:
        return len(self._ranks)

    def set(self, key: K, rank: Any) -> None:
        """Add a key, or give it another rank. Ranks must be comparable with each other."""
        if self._ranks.get(key) == rank:
            return
        self._ranks[key] = rank
        if len(self._heap) > 2 * len(self._ranks) + 64:
            self._heap = [(rank, key) for key, rank in self._ranks.items()]
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, (rank, key))

    def remove(self, key: K) -> None:
        """Take out a key that is in the heap."""
        del self._ranks[key]

    def peek(self) -> K:
        """The key with the lowest rank. The heap must not be empty."""
        while True:
            rank, key = self._heap[0]
            if key in self._ranks and self._ranks[key] == rank:
                return key
            heapq.heappop(self._heap)

    def rank(self, key: K) -> Any:
        """The rank of a key; None for one that is not in the heap."""
        return self._ranks.get(key)
