"""Which layers each stage of a pipeline computes, and which KV cache groups they belong to."""

import itertools
from collections.abc import Mapping, Sequence

import msgspec

from penstock_enginecore.core.kv_cache.spec import KVCacheConfig, KVCacheGroup, KVCacheSpec
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


# A block's id means the same in every stage, and so does a group's block table. What a block takes differs: a stage
# keeps its own layers.

_Kind = tuple[int | None, int | None]
"""Sliding window and attention chunk."""


def largest_stage(stages: Sequence[Mapping[str, KVCacheSpec]]) -> dict[str, KVCacheSpec]:
    """Layers of a stage that would have as many of each kind as the one that has the most of it: who can hold a block of these
    can hold one of its own. ``stages``: layers of each, by name in execution order. Raises ModelLoadError where layers of one
    kind differ in size.
    """
    most: dict[_Kind, dict[str, KVCacheSpec]] = {}
    for specs in stages:
        kinds: dict[_Kind, dict[str, KVCacheSpec]] = {}
        for name, spec in specs.items():
            kinds.setdefault(_kind(spec), {})[name] = spec
        for kind, layers in kinds.items():
            most[kind] = max(most.get(kind, {}), layers, key=len)
    for specs in stages:
        for name, spec in specs.items():
            other, expected = next(iter(most[_kind(spec)].items()))
            if spec != expected:
                raise ModelLoadError(
                    f"executor.pipeline_parallel_size: the keys and values of '{name}' and '{other}' differ in size, which is "
                    "not served in stages; use 1"
                )
    return {name: spec for layers in most.values() for name, spec in layers.items()}


def own_groups(config: KVCacheConfig, specs: Mapping[str, KVCacheSpec]) -> KVCacheConfig:
    """``config``, made for ``largest_stage``, with the layers of ``specs`` dealt out evenly to the groups of their kinds."""
    groups = list(config.groups)
    dealt: dict[tuple[int, ...], list[str]] = {}
    for name, spec in specs.items():
        dealt.setdefault(_groups_of(groups, spec), []).append(name)
    names: list[tuple[str, ...]] = [()] * len(groups)
    for indices, layers in dealt.items():
        each = -(-len(layers) // len(indices))
        for i, group in enumerate(indices):
            names[group] = tuple(layers[i * each : (i + 1) * each])
    return msgspec.structs.replace(
        config,
        groups=tuple(msgspec.structs.replace(group, layer_names=own) for group, own in zip(groups, names, strict=True)),
    )


def _kind(spec: KVCacheSpec) -> _Kind:
    return spec.sliding_window, spec.attention_chunk


def _groups_of(groups: Sequence[KVCacheGroup], spec: KVCacheSpec) -> tuple[int, ...]:
    """The groups of a layer's kind. A window that no sequence leaves, or that saves nothing, is none for its group."""
    fitting: dict[_Kind, list[int]] = {}
    for i, group in enumerate(groups):
        if group.sliding_window in (None, spec.sliding_window) and group.attention_chunk in (
            None,
            spec.attention_chunk,
        ):
            fitting.setdefault((group.sliding_window, group.attention_chunk), []).append(i)
    kind = min(fitting, key=lambda found: found.count(None))
    return tuple(fitting[kind])
