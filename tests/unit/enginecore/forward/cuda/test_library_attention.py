"""Attention of long prompts by a library, against the reference, and beside the kernels in Triton's interpreter."""

from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from penstock_enginecore.attention.base import AttentionMetadata, AttentionParams
from penstock_enginecore.attention.kv_cache import KVScales
from penstock_enginecore.forward.cuda.library_attention import SIZES, Geometry, LibraryAttention, Sizes, StepPrompts
from tests.fakes.models.interpreted_kernels import interpreted
from tests.fakes.models.recorded_launches import Reads
from tests.fakes.models.torch_kernels import TorchKernels
from tests.fakes.models.torch_library import SMALL, attend
from tests.unit.enginecore.attention.test_backends import PARAMS, Step, make_step
from tests.unit.enginecore.forward.cuda.kernels.paged import Paged, expected

interpreted("attention")
from penstock_enginecore.forward.cuda.triton_kernels import TritonKernels  # noqa: E402 - settled above how it runs

PLAIN = AttentionParams(scaling=0.25)
MIXED = ([1, 40, 3, 9, 1, 12], [90, 40, 50, 133, 1, 12])
"""New tokens and lengths: decodes, a first chunk, a draft, a chunk behind a prefix, and a prompt with few keys."""


class Calls:
    """Library that records the sizes and strides of its calls."""

    def __init__(self) -> None:
        self.seen: dict[tuple[int, int, bool], set[Any]] = defaultdict(set)

    def __call__(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        shape = query.shape[2], keys.shape[2], causal
        self.seen[shape].add((query.stride(), keys.stride(), values.stride()))
        return attend(query, keys, values, scaling, causal)


def library_for(step: Step, library: Any = attend, sizes: Sizes = SMALL) -> LibraryAttention:
    heads, size = step.query.shape[1:]
    geometry = Geometry(heads, step.cache.num_kv_heads, size, step.value.shape[2])
    return LibraryAttention(library, [geometry], step.query.dtype, sizes)


def run(
    step: Step,
    params: AttentionParams,
    library: LibraryAttention,
    kernels: TritonKernels | TorchKernels | None = None,
    **padding: int,
) -> torch.Tensor:
    """Return the output of the kernels and the library. The output holds NaN before."""
    paged = Paged.of(step, **padding)
    prompts = library.chosen([step.metadata], paged.group.seq_lens)
    out = step.query.new_full((*step.query.shape[:2], step.value.shape[2]), torch.nan)
    group = replace(paged.group, prompts=prompts)
    (kernels or TritonKernels()).attend(step.query, paged.keys, paged.values, group, params, out)
    return out


@pytest.mark.parametrize(("heads", "size", "block_size"), [((4, 2), 64, 16), ((2, 1), 16, 48)])
def test_mixed_steps_equal_the_reference(heads: tuple[int, int], size: int, block_size: int) -> None:
    """The second block table has so many columns that keys may be split, so results are also merged."""
    step = make_step(*MIXED, block_size=block_size, heads=heads, head_size=size, head_size_v=size)
    calls = Calls()
    found = run(step, PLAIN, library_for(step, calls), requests=8, blocks=12)
    torch.testing.assert_close(found, expected(step, PLAIN))
    assert sum(causal for _, _, causal in calls.seen) == 3  # 32 and 8 rows of one request, 16 rows of the other


@pytest.mark.parametrize(
    ("heads", "size", "block_size"),
    [((4, 2), 64, 16), ((4, 1), 128, 32), ((2, 2), 256, 64), ((6, 2), 24, 48), ((1, 1), 8, 256)],
)
def test_ragged_prompts_without_other_requests_equal_the_reference(
    heads: tuple[int, int], size: int, block_size: int
) -> None:
    generator = np.random.default_rng(size)
    new = generator.integers(8, 70, 3)
    lengths = new + generator.integers(12, 200, 3)
    step = make_step(
        new.tolist(), lengths.tolist(), block_size=block_size, heads=heads, head_size=size, head_size_v=size
    )
    library = library_for(step)
    prompts = library.chosen([step.metadata], torch.from_numpy(lengths).int())
    assert prompts is not None
    assert prompts.other_lens is None
    torch.testing.assert_close(run(step, PLAIN, library), expected(step, PLAIN))


@pytest.mark.parametrize("name", PARAMS)
def test_layers_that_the_library_does_not_support_use_the_kernels(name: str) -> None:
    step, params, calls = make_step(*MIXED, block_size=16), PARAMS[name], Calls()
    torch.testing.assert_close(run(step, params, library_for(step, calls), TorchKernels()), expected(step, params))
    assert any(causal for _, _, causal in calls.seen) == (name in ("full", "wide window", "wide chunk"))


def test_other_dtypes_and_scales_use_the_kernels() -> None:
    step = make_step([20], [40], block_size=16)
    paged, library = Paged.of(step), library_for(step)
    prompts = library.chosen([step.metadata], paged.group.seq_lens)
    assert prompts is not None
    given = step.query, paged.keys, paged.values, paged.group, PLAIN, torch.empty_like(step.query)
    assert prompts.attend(*given, KVScales(2.0, 1.0)) == paged.group
    assert not library.supports(prompts.prompts, PLAIN, step.query.half(), paged.keys)
    assert not library.supports(prompts.prompts, PLAIN, step.query, paged.keys.half())


def test_only_few_shapes_and_strides_reach_the_library() -> None:
    """A library such as cuDNN builds a plan for each of them."""
    calls = Calls()
    library: LibraryAttention | None = None
    for length in range(20, 300, 7):
        for new in {8, length // 2, length}:
            step = make_step([new], [length], block_size=16, head_size=8, head_size_v=8, heads=(2, 1))
            library = library or library_for(step, calls)
            run(step, PLAIN, library)
    shapes = {(rows, rows, True) for rows in SMALL.rows}
    shapes |= {(rows, keys, False) for rows in SMALL.rows for keys in SMALL.pieces}
    assert set(calls.seen) == shapes
    assert all(len(strides) == 1 for strides in calls.seen.values())


@pytest.mark.parametrize(("before", "length"), [(0, 4096), (100, 5000), (511, 1023), (2048, 4096), (9000, 131_072)])
def test_calls_include_each_position_once(before: int, length: int) -> None:
    position = before // 512 * 512
    for start, rows in SIZES.blocks(before, length):
        assert start == position
        assert rows in SIZES.rows
        position += rows
        keys = list(SIZES.keys(start))
        assert [0, *(first + count for first, count in keys)] == [*(first for first, _ in keys), start]
        assert {count for _, count in keys} <= set(SIZES.pieces)
    assert length <= position < length + 512


def test_prompts_are_chosen_by_lengths_on_the_host() -> None:
    step = make_step(*MIXED, block_size=16)
    metadata, lengths = step.metadata, torch.from_numpy(step.metadata.seq_lens).int()
    with Reads(AssertionError):
        prompts = library_for(step).chosen([metadata, metadata], lengths)
    assert isinstance(prompts, StepPrompts)
    assert [tuple(prompt) for prompt in prompts.prompts] == [(1, 1, 40, 40), (3, 44, 9, 133)]
    assert prompts.other_lens is not None
    assert prompts.other_lens.tolist() == [90, 0, 50, 0, 1, 12]
    assert lengths.tolist() == MIXED[1]
    library = library_for(step)
    assert library.has_prompts([metadata])
    windowed = LibraryAttention(attend, [], torch.float32, SMALL, most_keys=40)
    prompts = windowed.chosen([metadata], lengths)
    assert prompts is not None
    assert [prompt.length for prompt in prompts.prompts] == [40]
    ends = replace(metadata, key_ends=metadata.positions() + 1)
    for other in (ends, make_step([7, 1], [90, 30], block_size=16).metadata):
        assert library.chosen([other], lengths) is None
        assert not library.has_prompts([other])


def test_computing_reads_nothing_on_the_host() -> None:
    step = make_step([30], [90], block_size=16)
    library, paged = library_for(step), Paged.of(step)
    prompts = library.chosen([step.metadata], paged.group.seq_lens)
    assert prompts is not None
    with Reads(AssertionError):
        prompts.attend(
            step.query, paged.keys, paged.values, paged.group, PLAIN, torch.empty_like(step.query), KVScales()
        )


def test_scratch_memory_is_allocated_at_the_first_step_with_many_new_tokens() -> None:
    def metadata(new: int, length: int) -> AttentionMetadata:
        return make_step([new], [length], block_size=16).metadata

    step, calls = make_step([1], [1], block_size=16), Calls()
    library = library_for(step, calls)
    lengths = torch.ones(1, dtype=torch.int32)
    library.chosen([metadata(7, 300)], lengths)
    assert not library._scratch
    assert library.chosen([metadata(8, 8)], lengths) is None  # too few keys
    assert set(calls.seen) == {(32, 64, False)}  # the largest call ran, so its memory is counted
    (before,) = library._scratch.values()
    run(make_step([80], [900], block_size=16), PLAIN, library)
    assert list(library._scratch.values()) == [before]
    library.release()
    assert not library._scratch
