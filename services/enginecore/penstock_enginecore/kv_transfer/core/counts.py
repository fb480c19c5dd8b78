"""What is counted of blocks that come and go."""

from collections import Counter
from collections.abc import Mapping

from penstock_common.observability.histogram import BucketCounts, Buckets
from penstock_common.types.kv_transfer import KvMedium
from penstock_enginecore.kv_transfer.core.transfers import Transfer

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class TransferCounts:
    """Since the start. Those of other engines are counted on the transfer thread, those of the engine's own media on the busy
    loop's; any thread may read.
    """

    def __init__(self) -> None:
        self.num_bytes: Counter[tuple[str, str]] = Counter()
        """Of blocks, by direction ("in", "out") and transport."""
        self.num_blocks: Counter[tuple[str, str]] = Counter()
        """Likewise."""
        self.failures: Counter[str] = Counter()
        """What did not come, or was not sent, by reason."""
        self._seconds: dict[str, Buckets] = {}

    def moved(self, direction: str, transport: str, num_bytes: int) -> None:
        """A block was sent, or has come."""
        self.num_bytes[direction, transport] += num_bytes
        self.num_blocks[direction, transport] += 1

    def ended(self, transfer: Transfer) -> None:
        """Blocks have come, or have not. How long it took counts where any came."""
        if transfer.num_blocks:
            if (seconds := self._seconds.get(transfer.way)) is None:
                seconds = self._seconds[transfer.way] = Buckets(_SECONDS)
            seconds.observe(transfer.ended - transfer.began)
        if transfer.medium is not KvMedium.PEER and (lost := transfer.num_wanted - transfer.num_blocks):
            self.failures[transfer.medium.name.lower()] += lost

    @property
    def seconds(self) -> Mapping[str, BucketCounts]:
        """From asking for blocks to the last of them, by transport or medium."""
        return {way: seconds.counts() for way, seconds in sorted(self._seconds.copy().items())}
