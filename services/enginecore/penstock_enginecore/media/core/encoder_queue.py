"""Which item the workers' towers are at. It follows ``MediaEncoder.advance`` without asking anybody."""


class _Item:
    __slots__ = ("num_blocks_left", "num_embeds")

    def __init__(self, num_embeds: int, num_blocks: int) -> None:
        self.num_embeds = num_embeds
        self.num_blocks_left = num_blocks


class EncoderQueue:
    """Items that are being encoded, in order. A step computes at least one block of the first, and more while the next block
    costs no more than what is left of ``budget``: a block of an item costs its embeddings.

    Workers may be ahead, where an item has failed, or was taken out after blocks of it had been counted. They are never
    behind: who is ahead when a step begins is not behind when it ends.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.num_pending = 0
        """Embeddings of the items in the queue."""
        self.num_encoded = 0
        """Embeddings of the items that are done, since the start."""
        self.is_used = False
        """Whether the step that was begun last computes anything."""
        self._items: dict[str, _Item] = {}
        self._left = 0
        self._waits = False

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, identifier: str) -> bool:
        return identifier in self._items

    def begin_step(self, *, waits: bool = False) -> list[str]:
        """Compute for a step; nothing at all if it ``waits``. Returns the items that are done before its forward pass."""
        self._left = self.budget
        self.is_used = False
        self._waits = waits
        return self._advance() if self._items else []

    def add(self, identifier: str, num_embeds: int, num_blocks: int) -> bool:
        """Put an item behind the others, in the step that was begun. Returns whether it is done before that step's forward
        pass.
        """
        if identifier in self._items:
            raise ValueError(f"item {identifier} is being encoded already")
        self._items[identifier] = _Item(num_embeds, num_blocks)
        self.num_pending += num_embeds
        return identifier in self._advance()

    def remove(self, identifier: str) -> None:
        """Take an item out; one that is not there is passed over."""
        if (item := self._items.pop(identifier, None)) is not None:
            self.num_pending -= item.num_embeds

    def _advance(self) -> list[str]:
        done: list[str] = []
        while self._items and not self._waits:
            identifier, item = next(iter(self._items.items()))
            count = min(max(self._left // item.num_embeds, 0 if self.is_used else 1), item.num_blocks_left)
            if count:
                self.is_used = True
                self._left = max(self._left - count * item.num_embeds, 0)
                item.num_blocks_left -= count
            if item.num_blocks_left:
                break
            self.remove(identifier)
            self.num_encoded += item.num_embeds
            done.append(identifier)
        return done
