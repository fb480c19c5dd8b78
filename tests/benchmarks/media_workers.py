"""What media workers cost, and what the event loop feels of them: ``python -m tests.benchmarks.media_workers``.

Photographs of noise and gradients as JPEG files, one after the other and many at once, through a frontend's MediaService with
CLIP's processor of transformers; beside it the same work in this process, which is what a service would do without workers.
"""

import argparse
import asyncio
import base64
import json
import tempfile
import time
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image

from penstock_common.config.settings import Reread
from penstock_frontend.call_types import EncodedFile, MediaPart, Url
from penstock_frontend.config import LimitsConfig, MaxMediaConfig, MediaConfig
from penstock_frontend.metrics import FrontendMetrics, MediaMetrics
from penstock_frontend.processing.media.decode import decode_image, open_image
from penstock_frontend.processing.media.service import MediaService
from penstock_frontend.processing.media.worker_messages import DecodeLimits
from tests.fakes.clip_family import ClipFamily

_CONFIG = {
    "image_processor_type": "CLIPImageProcessor",
    "size": {"shortest_edge": 336},
    "crop_size": {"height": 336, "width": 336},
}
_LIMITS = DecodeLimits(max_pixels=64_000_000, max_frames=1, max_audio_seconds=1.0)


def photograph(width: int, height: int, seed: int) -> bytes:
    """A JPEG file with as much detail as a photograph has."""
    dice = np.random.default_rng(seed)
    coarse = dice.integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), np.uint8)
    image = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
    file = BytesIO()
    image.save(file, "JPEG", quality=90)
    return file.getvalue()


class Gaps:
    """The longest that the event loop did not come round, in seconds."""

    def __init__(self) -> None:
        self.longest = 0.0

    async def run(self) -> None:
        """Until it is cancelled."""
        before = time.perf_counter()
        while True:
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            self.longest = max(self.longest, now - before - 0.001)
            before = now


async def measure(folder: str, size: tuple[int, int], count: int) -> None:
    """Print a line for images of that size."""
    family = ClipFamily(folder)
    processor = family.make_processor()()
    files = [photograph(*size, seed) for seed in range(count)]
    direct = []
    for file in files:
        began = time.perf_counter()
        processor.image(decode_image(open_image(file, _LIMITS)), {})
        direct.append(time.perf_counter() - began)
    service = MediaService(
        family,
        MediaConfig(workers=1, store_bytes=0),
        Reread(LimitsConfig(max_media=MaxMediaConfig(image=count))),
        MediaMetrics(FrontendMetrics("m").registry, "m"),
    )
    urls = [Url("data:image/jpeg;base64," + base64.b64encode(file).decode()) for file in files]
    parts = [MediaPart(modality="image", source=url, field="f") for url in urls]
    await service.start()
    gaps = Gaps()
    watching = asyncio.create_task(gaps.run())
    one_by_one = []
    for file in files:
        part = MediaPart(modality="image", source=EncodedFile(file), field="f")
        began = time.perf_counter()
        await service.prepare([part], cache_salt="", deadline=None)
        one_by_one.append(time.perf_counter() - began)
    began = time.perf_counter()
    await service.prepare(parts, cache_salt="a", deadline=None)
    together = time.perf_counter() - began
    watching.cancel()
    await service.close()
    print(
        f"{size[0]} x {size[1]} ({sum(map(len, files)) // count} bytes): here {np.median(direct) * 1e3:.1f} ms, in a worker "
        f"{np.median(one_by_one) * 1e3:.1f} ms; {count} as data URLs at once {count / together:.1f} images/s; "
        f"longest gap of the loop {gaps.longest * 1e3:.1f} ms"
    )


def main() -> None:
    """Sizes from a thumbnail to a photograph."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--count", type=int, default=16, help="images of each size")
    count = arguments.parse_args().count
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "preprocessor_config.json").write_text(json.dumps(_CONFIG))
        for size in ((64, 64), (640, 480), (1920, 1080), (4032, 3024)):
            asyncio.run(measure(folder, size, count))


if __name__ == "__main__":
    main()
