"""The forward pass alone over keys and values of random numbers: decode steps, prompts, and how long the device idles in them."""

import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from penstock_enginecore.attention.base import AttentionMetadata
from penstock_enginecore.config import KernelsConfig, ModelConfig
from penstock_enginecore.forward.base import ForwardBatch, ForwardPass
from penstock_enginecore.forward.build import ForwardConfig, build_forward
from penstock_enginecore.lora.device_slots import SlotLimits
from penstock_enginecore.models.loader import load_model
from tests.benchmarks.gpu import machine
from tests.benchmarks.gpu.shapes import BLOCK_SIZE, Plan, Prefill, Row

T = TypeVar("T")

ROUNDS = 30
TRACED = 20


def measure(plan: Plan, device: torch.device) -> dict[str, Any]:
    """Milliseconds of each row, and of the prompts."""
    with forward_pass(plan, device) as (forward, computing):
        decode = fitting(plan.decode, lambda row: time_decode(forward, plan, row, device))
        prefill = fitting(plan.prefill, lambda each: time_prefill(forward, plan, each, device))
    return {"computing": computing, "decode": decode, "prefill": prefill}


def fitting(rows: Sequence[T], measure_row: Callable[[T], dict[str, Any]]) -> list[dict[str, Any] | None]:
    """What is measured of ``rows``, None of those that the device has no memory for."""
    found: list[dict[str, Any] | None] = []
    for row in rows:
        try:
            found.append(measure_row(row))
        except torch.OutOfMemoryError as e:
            print(f"{row}: {str(e).splitlines()[0]}", file=sys.stderr)
            found.append(None)
            torch.cuda.empty_cache()
    return found


def idle(plan: Plan, device: torch.device) -> dict[str, Any]:
    """The share of time in which the device does nothing while the row nearest to 64 streams decodes; nothing on a CPU."""
    if device.type != "cuda":
        return {"idle": None}
    row = min(plan.decode, key=lambda each: (abs(each.streams - 64), each.context))
    with forward_pass(plan, device) as (forward, computing), cache(forward, blocks(row)), torch.inference_mode():
        batch, rows = decode_batch(plan, row)
        machine.median_seconds(device, lambda: forward.run(batch, rows), rounds=3)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(TRACED):
                forward.run(batch, rows)
            machine.synchronize(device)
    spans = sorted(
        (event.time_range.start, event.time_range.end) for event in profile.events() if event.device_type.name == "CUDA"
    )
    return {"computing": computing, "streams": row.streams, "launches": len(spans) / TRACED, "idle": share_idle(spans)}


def share_idle(spans: list[tuple[float, float]]) -> float:
    """Of the time from the first span's begin to the last one's end, what none covers. ``spans``: sorted by their begins."""
    busy, end = 0.0, spans[0][0]
    for begun, ended in spans:
        busy += max(0.0, ended - max(begun, end))
        end = max(end, ended)
    return 1 - busy / (end - spans[0][0])


@contextmanager
def forward_pass(
    plan: Plan, device: torch.device, kernels: KernelsConfig | None = None, lora: SlotLimits | None = None
) -> Iterator[tuple[ForwardPass, str]]:
    """What an engine would run the shape with, and what that computes with."""
    with tempfile.TemporaryDirectory() as folder:
        path = plan.shape.write(Path(folder))
        checkpoint = ModelConfig(path=str(path), load_format="dummy", dtype=plan.shape.dtype)
        model = load_model(checkpoint, device, lambda line: None)
        threads = torch.get_num_threads()
        config = ForwardConfig(device, "auto", kernels or KernelsConfig(), threads, BLOCK_SIZE, lora=lora)
        built = build_forward(model, config)
        yield built.forward, built.computing


@contextmanager
def cache(forward: ForwardPass, num_blocks: int) -> Iterator[None]:
    """A KV cache of random numbers, the null block included."""
    caches = forward.memory.throwaway(BLOCK_SIZE, num_blocks)
    for layer in caches.values():
        for part in (layer.cache.keys, layer.cache.values):
            part.normal_()
    forward.bind(caches)
    try:
        yield
    finally:
        forward.bind({})


def decode_batch(plan: Plan, row: Row) -> tuple[ForwardBatch, np.ndarray[Any, np.dtype[np.int64]]]:
    """The next token of each stream, whose blocks lie scattered over the cache, and the rows whose logits are wanted."""
    random = np.random.default_rng(0)
    per_stream = -(-row.context // BLOCK_SIZE)
    order = 1 + random.permutation(row.streams * per_stream).astype(np.int32)
    table = order.reshape(row.streams, per_stream)
    last = row.context - 1
    metadata = AttentionMetadata(
        np.arange(row.streams + 1),
        np.full(row.streams, row.context),
        table,
        table[:, last // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + last % BLOCK_SIZE,
        BLOCK_SIZE,
    )
    token_ids = random.integers(plan.shape.vocab, size=row.streams)
    return ForwardBatch(token_ids, np.full(row.streams, last), [metadata]), np.arange(row.streams)


def time_decode(forward: ForwardPass, plan: Plan, row: Row, device: torch.device) -> dict[str, Any]:
    """Milliseconds of a step of ``row``."""
    batch, rows = decode_batch(plan, row)
    with cache(forward, blocks(row)), torch.inference_mode():
        seconds = machine.seconds_in_a_row(device, lambda: forward.run(batch, rows), rounds=ROUNDS)
        alone = machine.median_seconds(device, lambda: forward.run(batch, rows), rounds=ROUNDS)
    return {"streams": row.streams, "context": row.context, "ms": seconds * 1e3, "alone_ms": alone * 1e3}


def prefill_batch(plan: Plan, prefill: Prefill) -> tuple[ForwardBatch, np.ndarray[Any, np.dtype[np.int64]]]:
    """A prompt, and the row of its last token."""
    count = prefill.tokens
    table = 1 + np.arange(-(-count // BLOCK_SIZE), dtype=np.int32)[None]
    positions = np.arange(count)
    metadata = AttentionMetadata(np.array([0, count]), np.array([count]), table, BLOCK_SIZE + positions, BLOCK_SIZE)
    token_ids = np.random.default_rng(0).integers(plan.shape.vocab, size=count)
    return ForwardBatch(token_ids, positions, [metadata]), np.array([count - 1])


def time_prefill(forward: ForwardPass, plan: Plan, prefill: Prefill, device: torch.device) -> dict[str, Any]:
    """Milliseconds of a prompt."""
    batch, rows = prefill_batch(plan, prefill)
    with cache(forward, 1 + -(-prefill.tokens // BLOCK_SIZE)), torch.inference_mode():
        seconds = machine.median_seconds(device, lambda: forward.run(batch, rows), rounds=max(5, ROUNDS // 3))
    return {"tokens": prefill.tokens, "ms": seconds * 1e3}


def blocks(row: Row) -> int:
    """Of the cache for ``row``, the null block included."""
    return 1 + row.streams * -(-row.context // BLOCK_SIZE)
