"""Images that nobody has seen: soft spots of colour, as JPEG files."""

import io
import random
from collections.abc import Iterator

from penstock_local.bench.options import BenchOptions

_SPOTS = 16
"""Spots of colour on a side: enough that no two images are alike, and that files are about as large as those of photographs."""


def random_images(options: BenchOptions) -> Iterator[tuple[bytes, ...]]:
    """The files of each request's images without end, the same for ``image_repeat`` requests one after the other."""
    rng = random.Random(f"images {options.bench_seed}")
    width, height = options.image_pixels
    while True:
        files = tuple(image_file(rng, width, height) for _ in range(options.images))
        for _ in range(options.image_repeat):
            yield files


def image_file(rng: random.Random, width: int, height: int) -> bytes:
    """A JPEG file of that size in pixels."""
    from PIL import Image  # slow to import, for those who ask for no images

    spots = Image.frombytes("RGB", (_SPOTS, _SPOTS), rng.randbytes(3 * _SPOTS * _SPOTS))
    file = io.BytesIO()
    spots.resize((width, height), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
    return file.getvalue()
