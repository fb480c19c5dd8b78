"""Images in tiles that a grid of them fits best, and what is left of their rows without padding (LLaVA-NeXT, LLaVA-OneVision)."""

import math
from collections.abc import Sequence

from penstock_common.errors import ConfigError
from penstock_frontend.processing.media.families.checkpoint import Checkpoint

Size = tuple[int, int]
"""Height and width."""


def pinpoints(checkpoint: Checkpoint) -> tuple[Size, ...]:
    """Resolutions of grids of tiles. Raises ConfigError."""
    given = checkpoint.image_processor.get("image_grid_pinpoints") or checkpoint.config.get("image_grid_pinpoints")
    if not isinstance(given, list) or not given:
        raise ConfigError(f"{checkpoint.folder}: image_grid_pinpoints is missing")
    return tuple((int(height), int(width)) for height, width in given)


def best_resolution(size: Size, resolutions: Sequence[Size]) -> Size:
    """The resolution that keeps most of an image of ``size``, of those the one that wastes least."""
    height, width = size
    best, most, least_wasted = resolutions[0], 0, math.inf
    for candidate in resolutions:
        scale = min(candidate[1] / width, candidate[0] / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        wasted = candidate[0] * candidate[1] - kept
        if kept > most or (kept == most and wasted < least_wasted):
            best, most, least_wasted = candidate, kept, wasted
    return best


def unpadded(size: Size, grid: Size) -> Size:
    """Rows and columns of a grid of features that show an image of ``size``, and not what was put around it."""
    (height, width), (rows, columns) = size, grid
    if width / height > columns / rows:
        shown = int(round(height * (columns / width), 7))
        return rows - (rows - shown) // 2 * 2, columns
    shown = int(round(width * (rows / height), 7))
    return rows, columns - (columns - shown) // 2 * 2
