"""Media state of a fake worker: a queue of items, processed exactly as in ``MediaEncoder.advance``, and embedding rows."""

from collections.abc import Callable, Iterator, Sequence

import xxhash

from penstock_common.types.media import EMBEDS, EmbedRun, Modality, MultiModalFeature, TensorData
from penstock_enginecore.core.model_info import MediaInfo
from penstock_enginecore.core.scheduler.output import SchedulerOutput

WIDTH = 4
"""Number of values in an embedding row."""


def identifier_of(number: int) -> str:
    """Return an identifier of 64 hexadecimal digits."""
    return f"{number:064x}"


def make_feature(
    number: int,
    offset: int,
    length: int,
    *,
    modality: Modality = "image",
    embed_runs: tuple[EmbedRun, ...] = (),
    embeds: bool = False,
    num_bytes: int = 2000,
) -> MultiModalFeature:
    """Return a media item with large data. ``embeds``: positions of its embeddings."""
    num_embeds = sum(run.count for run in embed_runs) or length
    given = {EMBEDS: TensorData("float32", (num_embeds, WIDTH), bytes(4 * WIDTH * num_embeds))}
    processed = {
        "pixel_values": TensorData("uint8", (num_bytes,), bytes(num_bytes)),
        "grid": TensorData("int64", (1,), bytes(8)),
    }
    return MultiModalFeature(
        modality=modality,
        identifier=identifier_of(number),
        offset=offset,
        length=length,
        embed_runs=embed_runs,
        data=given if embeds else processed,
    )


def embed_positions(feature: MultiModalFeature) -> Iterator[int]:
    """Yield the prompt positions that have embeddings of the item."""
    for run in feature.embed_runs or (EmbedRun(0, feature.length),):
        yield from range(feature.offset + run.start, feature.offset + run.start + run.count)


def value_of(feature: MultiModalFeature, position: int) -> int:
    """Return the value at a position. It depends only on the item and the position in the item."""
    return xxhash.xxh3_64_intdigest(f"{feature.identifier} {position - feature.offset}".encode())


class FakeEncoder:
    """Fake encoder. ``fails``: number of blocks after which an identifier fails, or None. Contract violations raise
    AssertionError.
    """

    def __init__(self, media: Sequence[MediaInfo], fails: Callable[[str], int | None]) -> None:
        self._infos = {info.modality: info for info in media}
        self.fails = fails
        self.capacity: int | None = None
        self.queue: dict[str, list[int]] = {}
        self.rows: dict[str, int] = {}
        """Number of rows by identifier. The numbers of failed items have no meaning."""
        self.failed: set[str] = set()
        self.encoded: list[str] = []
        self.largest_slice = 0

    @property
    def num_embeds(self) -> int:
        """Number of embeddings of all items that have memory."""
        return sum(self.rows.values()) + sum(item[0] for item in self.queue.values())

    def update(self, step: SchedulerOutput) -> dict[str, str]:
        """Apply the evictions, starts and computations of a step. Returns the failed items with their errors."""
        for identifier in step.freed_identifiers:
            self.rows.pop(identifier, None)
            self.queue.pop(identifier, None)
            self.failed.discard(identifier)
        for start in step.encoder_starts:
            assert start.identifier not in self.rows, f"{start.identifier} is there already"
            assert start.identifier not in self.queue, f"{start.identifier} is being encoded already"
            assert start.data, "an item without data"
            if EMBEDS in start.data:
                self.rows[start.identifier] = start.num_embeds
            else:
                num_blocks = self._infos[start.modality].num_blocks
                self.queue[start.identifier] = [start.num_embeds, num_blocks, 0]
        assert self.capacity is None or self.num_embeds <= self.capacity, "more rows than there may be"
        return self._advance(step.encoder_budget) if step.encoder_budget else {}

    def forget(self) -> None:
        """Drop all rows and all items that are not encoded yet."""
        self.queue.clear()
        self.rows.clear()
        self.failed.clear()

    def _advance(self, budget: int) -> dict[str, str]:
        failures: dict[str, str] = {}
        spent, first = 0, True
        while self.queue:
            identifier, item = next(iter(self.queue.items()))
            num_embeds, blocks_left, done = item
            if not first and spent + num_embeds > budget:
                break
            first = False
            spent += num_embeds
            item[1], item[2] = blocks_left - 1, done + 1
            failed = self.fails(identifier) == item[2]
            if failed or item[1] == 0:
                del self.queue[identifier]
                self.rows[identifier] = num_embeds
                if failed:
                    failures[identifier] = "the fake tower cannot read it"
                    self.failed.add(identifier)
                else:
                    self.encoded.append(identifier)
        self.largest_slice = max(self.largest_slice, spent)
        return failures
