"""Decode steps that are captured before there are requests."""

import logging
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
import torch

from penstock_enginecore.config import EngineCoreConfig, KernelsConfig, ModelConfig, SchedulerConfig
from penstock_enginecore.executor.generation.graph_capture import GraphCapture, NewestTokens, sizes_to_capture
from penstock_enginecore.forward.cuda.decoder import FusedForward
from penstock_enginecore.forward.cuda.graphs import StepGraphs
from tests.fakes.models.fused_models import load_probed, save_varied_model
from tests.fakes.models.recorded_launches import RecordedGraph, RecordedKernels, RecordedSampling

CPU = torch.device("cpu")


class Full(RecordedGraph):
    """A graph for which there is no memory."""

    def capture(self, launch: Callable[[], torch.Tensor]) -> torch.Tensor:
        raise RuntimeError("out of memory")


def fused(path: Path, graph: type[RecordedGraph] = RecordedGraph) -> FusedForward:
    save_varied_model("qwen3", path)
    kernels = RecordedKernels()
    forward = FusedForward(load_probed(path), kernels, StepGraphs(lambda: graph(kernels)))
    forward.choose_by(RecordedSampling(512, 320, CPU))
    return forward


def config(**kernels: object) -> EngineCoreConfig:
    return EngineCoreConfig(model=ModelConfig(path="m"), kernels=KernelsConfig(**kernels))


def test_all_sizes_are_captured_that_steps_of_decodes_can_have() -> None:
    assert sizes_to_capture(config())[:3] == [256, 240, 224]
    assert sizes_to_capture(config())[-5:] == [16, 8, 4, 2, 1]
    few = EngineCoreConfig(model=ModelConfig(path="m"), scheduler=SchedulerConfig(max_num_seqs=20))
    assert sizes_to_capture(few) == [32, 16, 8, 4, 2, 1]
    many = EngineCoreConfig(model=ModelConfig(path="m"), scheduler=SchedulerConfig(max_num_seqs=9000))
    assert len(sizes_to_capture(many)) == 28
    narrow = SchedulerConfig(max_num_seqs=9000, max_num_batched_tokens=3)
    assert sizes_to_capture(EngineCoreConfig(model=ModelConfig(path="m"), scheduler=narrow)) == [4, 2, 1]


def test_those_are_captured_that_the_configuration_names() -> None:
    assert sizes_to_capture(config(graph_sizes=(1, 7, 8, 100))) == [112, 8, 1]
    assert sizes_to_capture(config(graph_sizes=(512,))) == []  # no step has so many requests
    assert sizes_to_capture(config(capture_at_start=False)) == []


@torch.inference_mode()
def test_steps_are_captured_and_nothing_is_written_to_the_cache(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    forward, newest, seconds = fused(tmp_path), NewestTokens(CPU), count(step=1.5)
    caches = forward.memory.throwaway(16, 5)
    parts = [part for layer in caches.values() for part in (layer.cache.keys, layer.cache.values)]
    for part in parts:
        part.normal_()
    before = [part.clone() for part in parts]
    forward.bind(caches)
    left = iter([5 * 2**20, 2 * 2**20])
    capture = GraphCapture(forward, newest, forward.graph_stats, lambda: next(seconds))
    with caplog.at_level(logging.INFO):
        capture.run([4, 2, 1], 1, 16, lambda: next(left))
    assert forward.graph_stats().captured == 3
    assert forward.graph_stats().replays == 0
    for part, kept in zip(parts, before, strict=True):
        assert torch.equal(part, kept)
    assert not newest.room_for(torch.zeros(1).numpy())[:-1].any()
    assert caplog.messages == [
        "capturing decode steps as CUDA graphs (one graph for each step size) count=3",
        "captured CUDA graphs for 2 of 3 step sizes in 3.0 s",
        "captured CUDA graphs for all 3 step sizes in 6.0 s; the graphs use 3.0 MiB",
    ]


@torch.inference_mode()
def test_where_none_can_be_captured_it_is_tried_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    forward = fused(tmp_path, Full)
    forward.bind(forward.memory.throwaway(16, 5))
    GraphCapture(forward, NewestTokens(CPU), forward.graph_stats).run([4, 2, 1], 1, 16, lambda: 0)
    [line] = caplog.messages
    assert "cannot capture a step of this shape as a CUDA graph" in line
    assert "shape=StepShape(tokens=4, requests=4) reason=out of memory" in line


def test_what_all_graphs_take_is_reckoned_from_two(tmp_path: Path) -> None:
    forward = fused(tmp_path)
    capture = GraphCapture(forward, NewestTokens(CPU), forward.graph_stats)
    for sizes, left, expected in (
        ([8, 4, 2, 1], [100, 70, 70, 65], 30 + 5 * 3),
        ([4, 2], [100, 70, 70, 65], 35),
        ([2], [100, 70], 30),
        ([4, 2, 1], [100, 110, 110, 112], 0),  # other code freed memory
    ):
        answers = iter(left)
        assert capture.measure(sizes, 16, lambda answers=answers: next(answers)) == expected
        assert next(answers, None) is None
        assert forward.graph_stats().captured == 0  # none is left
