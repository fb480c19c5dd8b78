"""What is counted of pulls, at both ends."""

from collections import Counter

from penstock_common.observability.histogram import Buckets

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class TransferCounts:
    """Since the start. Counted on the transfer thread; any thread may read."""

    def __init__(self) -> None:
        self.num_bytes: Counter[tuple[str, str]] = Counter()
        """Of blocks, by direction ("in", "out") and transport."""
        self.num_blocks: Counter[tuple[str, str]] = Counter()
        """Likewise."""
        self.failures: Counter[str] = Counter()
        """What did not come, or was not sent, by reason."""
        self.seconds = Buckets(_SECONDS)
        """From asking for blocks to the last of them."""

    def moved(self, direction: str, transport: str, num_bytes: int) -> None:
        """A block was sent, or has come."""
        self.num_bytes[direction, transport] += num_bytes
        self.num_blocks[direction, transport] += 1
