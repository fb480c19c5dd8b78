"""Hostile audio files, and a campaign that sends them through real media workers: ``python -m tests.fuzz.sounds COUNT
SEED``.
"""

import asyncio
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from random import Random
from typing import NamedTuple

from penstock_common.config.settings import Reread
from penstock_common.errors import InvalidArgument
from penstock_frontend.call_types import EncodedFile, MediaPart
from penstock_frontend.config import LimitsConfig, MediaConfig
from penstock_frontend.metrics import FrontendMetrics, MediaMetrics
from penstock_frontend.processing.media.service import MediaService
from tests.fakes.media_family import PlainFamily
from tests.fakes.media_files import container_file, image_file, silent_film, sound_file
from tests.fakes.patience import PATIENCE

REASONS = ("MEDIA_UNREADABLE", "MEDIA_TOO_LARGE")
MAX_SECONDS = 5.0
_LENGTHS = (0, 1, 2, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 0x7FFF_FFFF, 0x8000_0000, 0xFFFF_FFFF)
_STARTS = (
    b"RIFF\xff\xff\xff\xffWAVE",
    b"fLaC",
    b"OggS\0\2",
    b"ID3\4\0\0\x7f\x7f\x7f\x7f",
    b"\xff\xfb\x90\x00",
    b"\xff\xf1L@\x1a\x7f\xfc",
    b"\0\0\0\x18ftypM4A ",
    b"\0\0\0\x18ftypisom",
    b"\x1aE\xdf\xa3\x9fB\x82\x84webm",
    b"\x1aE\xdf\xa3\xa3B\x82\x88matroska",
)


@cache
def seeds() -> Sequence[bytes]:
    """Return small valid files of all formats and of several codecs."""
    wavs = [sound_file("WAV", rate=rate, channels=channels) for rate, channels in ((16_000, 1), (44_100, 2))]
    wavs += [sound_file("WAV", subtype=subtype) for subtype in ("PCM_U8", "FLOAT", "ULAW", "IMA_ADPCM", "GSM610")]
    others = [sound_file(kind, rate=rate) for kind in ("FLAC", "OGG", "MP3") for rate in (8000, 44_100)]
    opus = sound_file("OGG", rate=48_000, subtype="OPUS")
    containers = [container_file(kind, rate=48_000) for kind in ("MP4", "ALAC", "WEBM", "AAC")]
    return [*wavs, *others, opus, *containers, *containers, silent_film("mp4"), silent_film("webm")]


def hostile(number: int, seed: int = 0) -> bytes:
    """Return hostile audio file ``number``."""
    dice = Random(f"{seed} {number}")
    return dice.choice(_KINDS)(dice)


def _flipped(dice: Random) -> bytes:
    made = bytearray(dice.choice(seeds()))
    for _ in range(dice.choice((1, 1, 2, 8, 64, 512))):
        made[dice.randrange(len(made))] = dice.randrange(256)
    return bytes(made)


def _flipped_header(dice: Random) -> bytes:
    made = bytearray(dice.choice(seeds()))
    for _ in range(dice.choice((1, 2, 4, 16))):
        made[dice.randrange(min(len(made), 256))] = dice.choice((0, 1, 0x7F, 0x80, 0xFF, dice.randrange(256)))
    return bytes(made)


def _lying(dice: Random) -> bytes:
    """Return a file in which a number of 1 to 8 bytes is replaced by an extreme number."""
    made = bytearray(dice.choice(seeds()))
    width = dice.choice((1, 2, 4, 4, 4, 8))
    place = dice.randrange(min(len(made) - width, dice.choice((64, 512, 10_000))))
    number = dice.choice(_LENGTHS) if width < 8 else dice.choice((2**63 - 1, 2**63, 2**64 - 1, 0))
    made[place : place + width] = (number % 256**width).to_bytes(width, dice.choice(("little", "big")))
    return bytes(made)


def _cut(dice: Random) -> bytes:
    data = dice.choice(seeds())
    return data[: dice.randrange(len(data))]


def _without_middle(dice: Random) -> bytes:
    data = dice.choice(seeds())
    start, end = sorted(dice.randrange(len(data)) for _ in range(2))
    return data[:start] + data[end:]


def _repeated(dice: Random) -> bytes:
    """Return a file in which a part is repeated, as in Ogg files that never end."""
    data = dice.choice(seeds())
    start, end = sorted(dice.randrange(len(data)) for _ in range(2))
    return data[:end] + data[start:end] * dice.choice((1, 10, 200)) + data[end:]


def _joined(dice: Random) -> bytes:
    one, other = dice.choice(seeds()), dice.choice(seeds())
    return one[: dice.randrange(len(one))] + other[dice.randrange(len(other)) :]


def _chained(dice: Random) -> bytes:
    return b"".join(dice.choice(seeds()) for _ in range(dice.choice((2, 3, 50))))


def _only_start(dice: Random) -> bytes:
    return dice.choice(_STARTS) + dice.randbytes(dice.choice((0, 1, 10, 1000, 20_000)))


def _wav_header(dice: Random) -> bytes:
    """Return a WAV file with a random format chunk, of which each number may be extreme."""
    form = struct.pack(
        "<HHIIHH",
        dice.choice((0, 1, 2, 3, 6, 7, 17, 49, 85, 0xFFFE, 0xFFFF)),
        dice.choice((0, 1, 2, 64, 65, 0xFFFF)),
        dice.choice((0, 1, 999, 16_000, 384_000, 384_001, 2**31, 2**32 - 1)),
        dice.choice((0, 32_000, 2**32 - 1)),
        dice.choice((0, 1, 2, 4, 0xFFFF)),
        dice.choice((0, 1, 8, 16, 24, 32, 64, 255, 0xFFFF)),
    )
    data = dice.randbytes(dice.choice((0, 1, 7, 3200)))
    size = dice.choice((len(data), *_LENGTHS))
    chunks = struct.pack("<4sI", b"fmt ", dice.choice((16, 18, 0, 2**32 - 1))) + form
    return (
        b"RIFF"
        + struct.pack("<I", dice.choice(_LENGTHS))
        + b"WAVE"
        + chunks
        + struct.pack("<4sI", b"data", size)
        + data
    )


def _other(dice: Random) -> bytes:
    return dice.choice((b"", b"\0" * 1000, image_file(), dice.randbytes(dice.choice((1, 16, 4096))), b"#!/bin/sh\n"))


_KINDS: Sequence[Callable[[Random], bytes]] = (
    _flipped,
    _flipped,
    _flipped_header,
    _flipped_header,
    _lying,
    _lying,
    _lying,
    _cut,
    _without_middle,
    _repeated,
    _joined,
    _chained,
    _only_start,
    _wav_header,
    _wav_header,
    _other,
)


class Outcome(NamedTuple):
    """Results of a campaign.

    Attributes:
        counts: Number of files by error reason. Readable files count as ``taken``.
        workers_before: Process ids of the media workers at the start.
        workers_after: Process ids of the media workers at the end.
        longest: Seconds that the slowest file took in the pool, including its time in the queue.
    """

    counts: Counter[str]
    workers_before: Sequence[int]
    workers_after: Sequence[int]
    longest: float


async def campaign(count: int, seed: int = 0, workers: int = 1) -> Outcome:
    """Send ``count`` hostile files through media workers. Raises every error that is not an error of the client."""
    service = MediaService(
        PlainFamily(),
        MediaConfig(workers=workers, worker_timeout=PATIENCE, max_audio_seconds=MAX_SECONDS, store_bytes=0),
        Reread(LimitsConfig()),
        MediaMetrics(FrontendMetrics("m").registry, "m"),
    )
    counts: Counter[str] = Counter()
    longest = 0.0
    try:
        await service.start()
        before = list(service.worker_pids)
        numbers = iter(range(count))

        async def send() -> None:
            nonlocal longest
            for number in numbers:
                part = MediaPart(modality="audio", source=EncodedFile(hostile(number, seed)), field="file")
                started = time.perf_counter()
                try:
                    await service.prepare([part], cache_salt="", deadline=None)
                except InvalidArgument as e:
                    if e.reason not in REASONS or e.field != "file" or not e.message:
                        raise AssertionError(f"file {number} of seed {seed}: {e.reason} {e.field} {e.message}") from e
                    counts[e.reason] += 1
                else:
                    counts["taken"] += 1
                longest = max(longest, time.perf_counter() - started)

        await asyncio.gather(*(send() for _ in range(workers)))
        good = MediaPart(modality="audio", source=EncodedFile(sound_file()), field="good")
        await service.prepare([good], cache_salt="", deadline=None)
        assert service.in_flight.num_bytes == 0
        return Outcome(counts, before, list(service.worker_pids), longest)
    finally:
        await service.close()


def main(arguments: Sequence[str]) -> None:
    """Run a campaign, and print its results. Raises AssertionError if a worker died."""
    count, seed = (int(each) for each in arguments)
    started = time.perf_counter()
    outcome = asyncio.run(campaign(count, seed))
    seconds = time.perf_counter() - started
    print(f"{count} files in {seconds:.1f} s, slowest {outcome.longest:.2f} s: {dict(outcome.counts)}")
    assert outcome.workers_after == outcome.workers_before, "a media worker died"


if __name__ == "__main__":
    main(sys.argv[1:])
