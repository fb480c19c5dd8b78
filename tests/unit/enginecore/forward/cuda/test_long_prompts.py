"""Whole steps with long prompts, whose attention a library computes: equal logits, and no graphs for these steps."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock_enginecore.attention.base import AttentionMetadata
from penstock_enginecore.attention.kv_cache import LayerCaches
from penstock_enginecore.forward.base import ForwardBatch
from penstock_enginecore.forward.cuda.attention import TritonAttention
from penstock_enginecore.forward.cuda.decoder import FusedForward
from penstock_enginecore.forward.cuda.graphs import StepGraphs
from penstock_enginecore.forward.cuda.library_attention import Geometry, LibraryAttention
from penstock_enginecore.forward.cuda.replayed_modules import ReplayedModules
from tests.fakes.models.fused_models import load_probed
from tests.fakes.models.recorded_launches import RecordedGraph, RecordedKernels
from tests.fakes.models.tiny_models import save_tiny_model
from tests.fakes.models.torch_library import SMALL, attend

BLOCK_SIZE, BLOCKS = 16, 5
Forward = FusedForward | ReplayedModules
STEPS = [
    [(0, 0, 40)],
    [(0, 40, 1), (1, 0, 30)],
    [(1, 30, 15), (0, 41, 1), (2, 0, 7)],
    [(2, 7, 1), (1, 45, 1)],
]
"""Number of the request, cached tokens and new tokens, for each request of each step."""
LONG = 3
"""Number of steps with long prompts."""


def fused(path: Path, library: LibraryAttention | None) -> Forward:
    kernels = RecordedKernels()
    graphs = StepGraphs(lambda: RecordedGraph(kernels))
    return FusedForward(load_probed(path), kernels, graphs, None, library)


def replayed(path: Path, library: LibraryAttention | None) -> Forward:
    kernels = RecordedKernels()
    graphs = StepGraphs(lambda: RecordedGraph(kernels, of_modules=True))
    return ReplayedModules(load_probed(path), TritonAttention(kernels, library), graphs)


def batch(requests: list[tuple[int, int, int]]) -> ForwardBatch:
    """Return a step with two KV cache groups, which have different blocks."""
    new = [count for _, _, count in requests]
    lengths = [before + count for _, before, count in requests]
    starts, groups = np.cumsum([0, *new]), []
    for group in range(2):
        table = [[1 + BLOCKS * (2 * i + group) + block for block in range(BLOCKS)] for i, _, _ in requests]
        found = AttentionMetadata(
            starts, np.array(lengths), np.array(table, dtype=np.int32), np.zeros(0, dtype=np.int64), BLOCK_SIZE
        )
        slots = [found.slots(i, before, before + count) for i, (_, before, count) in enumerate(requests)]
        groups.append(replace(found, slot_mapping=np.concatenate(slots)))
    tokens = np.random.default_rng(sum(lengths)).integers(0, 320, starts[-1])
    return ForwardBatch(tokens, groups[0].positions(), groups)


def two_groups(forward: Forward) -> LayerCaches:
    caches = forward.memory.throwaway(BLOCK_SIZE, 1 + 6 * BLOCKS)
    for layer in caches.values():
        layer.cache.keys.zero_()
        layer.cache.values.zero_()
    return {name: replace(layer, group=i % 2) for i, (name, layer) in enumerate(caches.items())}


@torch.inference_mode()
def logits(forward: Forward) -> list[torch.Tensor]:
    forward.bind(two_groups(forward))
    return [forward.run(step, np.arange(len(step.token_ids))).logits.clone() for step in map(batch, STEPS)]


@pytest.mark.parametrize("build", [fused, replayed])
@pytest.mark.parametrize("architecture", ["llama", "gemma3", "qwen3"])
def test_steps_have_the_same_logits_with_a_library(
    architecture: str, build: Callable[[Path, LibraryAttention | None], Forward], tmp_path: Path
) -> None:
    changes = {"layer_types": ["sliding_attention", "full_attention"]} if architecture == "gemma3" else {}
    save_tiny_model(architecture, tmp_path, **changes)
    query = load_probed(tmp_path).calls[0]
    geometry = Geometry(query.query.shape[1], query.key.shape[1], query.query.shape[2], query.value.shape[2])
    calls = []

    def counted(
        query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(causal)
        return attend(query, keys, values, scaling, causal)

    without, found = build(tmp_path, None), build(tmp_path, LibraryAttention(counted, [geometry], torch.float32, SMALL))
    for expected, got in zip(logits(without), logits(found), strict=True):
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    assert sum(calls) >= LONG
    assert without.graph_stats().captures + without.graph_stats().replays == len(STEPS)
    assert found.graph_stats().captures == len(STEPS) - LONG
    found.to(torch.device("cpu"))
