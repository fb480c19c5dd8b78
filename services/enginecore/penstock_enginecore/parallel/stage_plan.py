"""Assignment of layers and KV cache groups to pipeline stages."""

import itertools
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from penstock_enginecore.core.kv_cache.spec import KVCacheConfig, KVCacheGroup, KVCacheSpec
from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.states.core.spec import StateNeeds


def deal_layers(
    model: str, layers: Sequence[int], *, behind: int, num_stages: int, stage_layers: Sequence[int] = ()
) -> list[range]:
    """Return the range of layer indices of each pipeline stage, in order of the stages.

    If ``stage_layers`` is empty, the layers are assigned such that the weights of the largest stage have as few bytes
    as possible. The embedding of the first stage is not counted, because a step reads only a few rows of the embedding.

    Args:
        model: Name of the model for error messages.
        layers: Size of each layer's weights in bytes.
        behind: Size in bytes of the weights after the last layer, such as the head, which the last stage also has.
        num_stages: Number of stages.
        stage_layers: Configured number of layers of each stage, or empty.

    Raises:
        ModelLoadError: There are more stages than layers, or the sum of ``stage_layers`` is not the number of layers.
    """
    if num_stages > len(layers):
        raise ModelLoadError(
            f"executor.pipeline_parallel_size is {num_stages}, but {model} has {len(layers)} layers, and each stage needs "
            f"at least one; set executor.pipeline_parallel_size to at most {len(layers)}"
        )
    if stage_layers and sum(stage_layers) != len(layers):
        raise ModelLoadError(
            f"executor.stage_layers has a sum of {sum(stage_layers)}, but {model} has {len(layers)} layers; change one value by "
            f"{abs(sum(stage_layers) - len(layers))}, or leave executor.stage_layers out"
        )
    bounds = list(itertools.accumulate(stage_layers or _even(layers, behind, num_stages), initial=0))
    return [range(start, stop) for start, stop in itertools.pairwise(bounds)]


def _even(layers: Sequence[int], behind: int, num_stages: int) -> list[int]:
    """Return the number of layers of each stage. The numbers minimize the size in bytes of the largest stage, then the
    sum of the squares of the sizes.
    """
    sums = list(itertools.accumulate(layers, initial=0))
    count = len(layers)
    # best[n]: the cost, and the number of layers of each stage, if the stages so far have the first n layers.
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


# Block IDs and block tables are the same in every stage. The size of a block in bytes differs between stages, because a
# stage stores only the keys and values of its own layers.

_Kind = tuple[int | None, int | None]
"""Kind of an attention layer: its sliding window and its attention chunk."""


def largest_stage(stages: Sequence[Mapping[str, KVCacheSpec]]) -> dict[str, KVCacheSpec]:
    """Return the layers of a hypothetical stage that has as many layers of each kind as the stage with the most layers
    of this kind.

    If a worker has enough memory for a block of this hypothetical stage, it has enough memory for a block of its own
    stage. Raises ModelLoadError if the keys and values of layers of the same kind differ in size.

    Args:
        stages: KV cache needs of each stage, by layer name in execution order.
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
                    "not supported with pipeline stages; set executor.pipeline_parallel_size to 1"
                )
    return {name: spec for layers in most.values() for name, spec in layers.items()}


def largest_states(stages: Iterable[StateNeeds | None]) -> StateNeeds | None:
    """Return the memory needs for recurrent states of a hypothetical stage that needs as much as the largest stage, or
    None if no stage has recurrent layers. Every stage has the same number of slots.
    """
    needs = [each for each in stages if each is not None]
    if not needs:
        return None
    return StateNeeds(
        num_layers=max(each.num_layers for each in needs),
        slot_bytes=max(each.slot_bytes for each in needs),
        row_bytes=max(each.row_bytes for each in needs),
    )


def own_groups(config: KVCacheConfig, specs: Mapping[str, KVCacheSpec]) -> KVCacheConfig:
    """Return ``config``, which was made for the layers of ``largest_stage``, with a stage's own layers ``specs``
    instead. The layers of each kind are distributed evenly to the KV cache groups of this kind.
    """
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
    """Return the indices of the KV cache groups for layers of the same kind as ``spec``. If a layer's sliding window
    saves no memory, its group may have no window.
    """
    fitting: dict[_Kind, list[int]] = {}
    for i, group in enumerate(groups):
        if group.sliding_window in (None, spec.sliding_window) and group.attention_chunk in (
            None,
            spec.attention_chunk,
        ):
            fitting.setdefault((group.sliding_window, group.attention_chunk), []).append(i)
    kind = min(fitting, key=lambda found: found.count(None))
    return tuple(fitting[kind])
