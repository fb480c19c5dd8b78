"""Decode steps that are captured before there are requests."""

import logging
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
import torch

from penstock_enginecore.config import EngineCoreConfig, KernelsConfig, ModelConfig, SchedulerConfig
from penstock_enginecore.executor.generation.graph_capture import GraphCapture, NewestTokens, shapes_to_capture
from penstock_enginecore.forward.cuda.buffers import StepShape, padded_shape
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


def decodes(config: EngineCoreConfig) -> list[int]:
    return [shape.tokens for shape in shapes_to_capture(config, 0)]


def squares(*sizes: int) -> list[StepShape]:
    return [StepShape(size, size) for size in sizes]


def test_all_sizes_are_captured_that_steps_of_decodes_can_have() -> None:
    assert decodes(config())[:3] == [256, 240, 224]
    assert decodes(config())[-5:] == [16, 8, 4, 2, 1]
    few = EngineCoreConfig(model=ModelConfig(path="m"), scheduler=SchedulerConfig(max_num_seqs=20))
    assert decodes(few) == [32, 16, 8, 4, 2, 1]
    many = EngineCoreConfig(model=ModelConfig(path="m"), scheduler=SchedulerConfig(max_num_seqs=9000))
    assert len(decodes(many)) == 28
    narrow = SchedulerConfig(max_num_seqs=9000, max_num_batched_tokens=3)
    assert decodes(EngineCoreConfig(model=ModelConfig(path="m"), scheduler=narrow)) == [4, 2, 1]


def test_those_are_captured_that_the_configuration_names() -> None:
    assert decodes(config(graph_sizes=(1, 7, 8, 100))) == [112, 8, 1]
    assert decodes(config(graph_sizes=(512,))) == []  # no step has so many requests
    assert decodes(config(capture_at_start=False)) == []
    assert shapes_to_capture(config(graph_sizes=(8,)), 4096) == squares(8)
    assert shapes_to_capture(config(capture_at_start=False), 4096) == []


@pytest.mark.parametrize(("seqs", "tokens"), [(1, 2048), (20, 2048), (256, 2048), (256, 300), (9000, 9000)])
def test_every_padded_shape_that_a_step_can_have_is_captured_at_start(seqs: int, tokens: int) -> None:
    limits = SchedulerConfig(max_num_seqs=seqs, max_num_batched_tokens=tokens)
    found = shapes_to_capture(EngineCoreConfig(model=ModelConfig(path="m"), scheduler=limits), 4096)
    counts = {*range(1, 513), *range(960, 1025), *range(1950, 2049)}
    steps = [(count, rows) for count in counts if count <= tokens for rows in range(1, min(count, seqs) + 1)]
    shapes = {shape for shape in (padded_shape(*step) for step in steps) if not shape.is_large}
    assert {padded_shape(step.tokens, step.requests) for step in found} == shapes
    assert len(found) == len(set(found)) <= 80
    assert found[0] == max(found, key=lambda shape: (shape.tokens, shape.requests))


def test_no_dummy_request_is_longer_than_the_model_allows() -> None:
    mixed = {shape for shape in shapes_to_capture(config(), 8) if shape.tokens > shape.requests}
    assert mixed
    assert all(shape.tokens <= 8 * shape.requests for shape in mixed)


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
        capture.run([*squares(4, 2), StepShape(64, 16)], 1, 16, lambda: next(left))
    assert forward.graph_stats().captured == 3
    assert forward.graph_stats().replays == 0
    for part, kept in zip(parts, before, strict=True):
        assert torch.equal(part, kept)
    assert not newest.room_for(torch.zeros(1).numpy())[:-1].any()
    assert caplog.messages == [
        "capturing steps as CUDA graphs (one graph for each step shape) count=3",
        "captured CUDA graphs for 2 of 3 step shapes in 3.0 s",
        "captured CUDA graphs for all 3 step shapes in 6.0 s; the graphs use 3.0 MiB",
    ]


@torch.inference_mode()
def test_where_none_can_be_captured_three_shapes_are_tried(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    forward = fused(tmp_path, Full)
    forward.bind(forward.memory.throwaway(16, 5))
    GraphCapture(forward, NewestTokens(CPU), forward.graph_stats).run(squares(8, 4, 2, 1), 1, 16, lambda: 0)
    assert len(caplog.messages) == forward.graph_stats().failures == 3
    assert "too little device memory to capture a step as a CUDA graph" in caplog.messages[0]
    assert "shape=StepShape(tokens=8, requests=8, decodes_only=True)" in caplog.messages[0]


@torch.inference_mode()
def test_a_dummy_step_replays_its_graph_and_leaves_the_others(tmp_path: Path) -> None:
    forward = fused(tmp_path)
    forward.bind(forward.memory.throwaway(16, 5))
    capture = GraphCapture(forward, NewestTokens(CPU), forward.graph_stats)
    capture.run(squares(2, 1), 1, 16, lambda: 0)
    before = forward.graph_stats()
    assert capture.run_alone(1, 16).shape == (1, 320)
    after = forward.graph_stats()
    assert (after.captured, after.captures, after.replays) == (2, before.captures, before.replays + 1)


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
        assert capture.measure(squares(*sizes), 16, lambda answers=answers: next(answers)) == expected
        assert next(answers, None) is None
        assert forward.graph_stats().captured == 0  # none is left
