"""Which layers each stage of a pipeline computes."""

import itertools
from collections.abc import Sequence

from penstock_enginecore.models.errors import ModelLoadError


def deal_layers(
    model: str, layers: Sequence[int], *, behind: int, num_stages: int, stage_layers: Sequence[int] = ()
) -> list[range]:
    """The layers of each stage, in order. Without ``stage_layers``, which gives their numbers, the largest stage has as few bytes
    as can be.

    ``layers``: bytes of each; ``behind`` those of what the last stage has besides. The first has an embedding, of which a step
    reads a few rows: that takes memory and no time, and does not count. Raises ModelLoadError, naming ``model``, for more stages
    than layers and for numbers that do not sum up.
    """
    if num_stages > len(layers):
        raise ModelLoadError(
            f"executor.pipeline_parallel_size is {num_stages}; {model} has {len(layers)} layers, and a stage needs one; use at "
            f"most {len(layers)}"
        )
    if stage_layers and sum(stage_layers) != len(layers):
        raise ModelLoadError(
            f"executor.stage_layers are {sum(stage_layers)} layers in all; {model} has {len(layers)}; change one of them by "
            f"{abs(sum(stage_layers) - len(layers))}, or leave executor.stage_layers out"
        )
    bounds = list(itertools.accumulate(stage_layers or _even(layers, behind, num_stages), initial=0))
    return [range(start, stop) for start, stop in itertools.pairwise(bounds)]


def _even(layers: Sequence[int], behind: int, num_stages: int) -> list[int]:
    """Numbers of layers: the least bytes for the largest stage, then the least sum of squares."""
    sums = list(itertools.accumulate(layers, initial=0))
    count = len(layers)
    # best[n]: cost and numbers of layers of the stages so far, which have the first n layers.
    best: dict[int, tuple[int, int, list[int]]] = {0: (0, 0, [])}
    for stage in range(num_stages):
        extra = behind * (stage == num_stages - 1)
        left = num_stages - stage - 1
        found: dict[int, tuple[int, int, list[int]]] = {}
        for stop in range(stage + 1, count - left + 1):
            if not left and stop < count:
                continue
            for start, (largest, squares, numbers) in best.items():
                if start >= stop:
                    continue
                size = sums[stop] - sums[start] + extra
                cost = max(largest, size), squares + size * size, [*numbers, stop - start]
                if stop not in found or cost < found[stop]:
                    found[stop] = cost
        best = found
    return best[count][2]
