"""Compilation of the fused decoder's kernels for a model shape, by launching the kernels of an engine's steps."""

import logging
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import KernelInterface

from penstock_enginecore.attention.base import AttentionMetadata, IntArray
from penstock_enginecore.attention.kv_cache import FLOAT8
from penstock_enginecore.config import ModelConfig
from penstock_enginecore.config.model import Dtype
from penstock_enginecore.forward.base import ForwardBatch
from penstock_enginecore.forward.cuda.buffers import DRAW_DTYPES, MAX_CAPTURED_TOKENS, decode_sizes
from penstock_enginecore.forward.cuda.decoder import FusedForward
from penstock_enginecore.forward.cuda.kernel_api import Draws
from penstock_enginecore.forward.cuda.kernels.logprobs import score
from penstock_enginecore.forward.cuda.kernels.mask import mask
from penstock_enginecore.forward.cuda.kernels.sample import TokenSampler
from penstock_enginecore.forward.cuda.triton_kernels import TritonKernels
from penstock_enginecore.forward.dummy_inputs import blank_step
from penstock_enginecore.forward.modules import probe_model
from penstock_enginecore.kernel_cache.shapes import Shape
from penstock_enginecore.lora.adapter import BLANK, LoraSegment
from penstock_enginecore.lora.device_slots import SlotLimits
from penstock_enginecore.models.loader import load_model

# Kernel launches that only compile the kernel. The GPU need not be present.

_WARP = 32


class _Driver:
    """Triton driver that reports the properties of the GPU for which kernels are compiled."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, _WARP)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:  # noqa: ARG002 - there are no streams
        return 0


class _NoProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Torch mode that skips matrix products into buffers, because the results are not needed and the products take
    minutes on a CPU.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.out, torch.ops.aten.addmm.out):
            return kwargs["out"]
        return func(*args, **(kwargs or {}))


@contextmanager
def compile_only(capability: int) -> Iterator[None]:
    """Return a context in which kernel launches with tensors on the CPU only compile the kernel, for a GPU of this
    compute ``capability``. A value of 90 means capability 9.0. Launches do not change their output tensors. Use the
    context only once per process, because Triton caches compiled kernels for all GPUs together.
    """
    launch = KernelInterface.__getitem__

    def compile_it(kernel: Any, grid: Any) -> Any:
        return lambda *args, **kwargs: kernel.run(*args, grid=grid, warmup=True, **kwargs)

    driver.set_active(_Driver(capability))
    KernelInterface.__getitem__ = compile_it
    try:
        with _NoProducts():  # type: ignore[no-untyped-call]
            yield
    finally:
        KernelInterface.__getitem__ = launch


logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")
_BLOCK_SIZE = 16
_FLOAT8_FROM = 89
_SLOTS = SlotLimits(max_loras=1, max_rank=16)
_PROMPTS = ((24,), (512,), (1024,), (1023,), (300, 301), (700, 1, 1))
"""Number of new tokens of each request, for each compiled step that is not a decode step."""


@torch.inference_mode()
def warm(
    shape: Shape,
    capability: int,
    dtype: Dtype = "bfloat16",
    sizes: Sequence[int] = (),
    *,
    float8_cache: bool = False,
    lora: bool = False,
) -> None:
    """Compile kernels for decode steps, prompts and sampling. Call this function only once per process.

    Args:
        shape: Shape of the model.
        capability: Compute capability, for example 90 for 9.0.
        dtype: The dtype of weights and activations.
        sizes: Numbers of requests in the decode steps to compile, or empty for all sizes that CUDA graphs are captured
            for.
        float8_cache: Whether to compile also for an fp8 KV cache, if GPUs of this capability support it.
        lora: Whether to compile also for LoRA adapters, for every ``lora.max_lora_rank`` that is a multiple of 16.
    """
    caches = [None, FLOAT8] if float8_cache and capability >= _FLOAT8_FROM else [None]
    with tempfile.TemporaryDirectory() as folder:
        config = ModelConfig(path=str(shape.write(Path(folder))), load_format="dummy", dtype=dtype)
        model = load_model(config, _CPU, logger.debug)
        forwards = [probe_model(model, _CPU, _BLOCK_SIZE, cache) for cache in caches]
        with compile_only(capability):
            for probed in forwards:
                forward = FusedForward(probed, TritonKernels(dependent_launch=True), None, _SLOTS if lora else None)
                blocks = 1 + sum(_PROMPTS[2]) // _BLOCK_SIZE
                forward.bind(forward.memory.throwaway(_BLOCK_SIZE, blocks))
                for batch, rows in _steps(sizes or decode_sizes(MAX_CAPTURED_TOKENS)):
                    forward.run(batch, rows)
                    if lora:
                        forward.run(replace(batch, segments=[LoraSegment(BLANK, 0, len(batch.token_ids))]), rows)
            _sample(shape.vocab, model.dtype)


def _steps(sizes: Sequence[int]) -> Iterator[tuple[ForwardBatch, IntArray]]:
    newest = torch.zeros(1025, dtype=torch.int32)
    for size in sizes:
        yield blank_step(size, size, 1, _BLOCK_SIZE, newest)
    for lengths in _PROMPTS:
        starts: IntArray = np.cumsum([0, *lengths])
        none: IntArray = np.zeros(starts[-1], dtype=np.int64)
        table = np.zeros((len(lengths), -(-max(lengths) // _BLOCK_SIZE)), dtype=np.int32)
        metadata = AttentionMetadata(starts, np.diff(starts), table, none - 1, _BLOCK_SIZE)
        yield ForwardBatch(none, metadata.positions(), [metadata]), starts[1:] - 1


def _sample(vocab: int, dtype: torch.dtype) -> None:
    rows = 16
    sampler = TokenSampler(rows, vocab, _CPU)
    draws = Draws(*(torch.zeros(rows, dtype=each) for each in DRAW_DTYPES))
    token_ids, num_nans = torch.zeros(2, rows, dtype=torch.int32)
    peaks = torch.zeros(rows)
    for of_logits in {dtype, torch.float32}:  # logits to which rules are applied are float32
        logits = torch.zeros(rows, vocab, dtype=of_logits)
        for filtered in (True, False):
            sampler.sample(logits, draws, token_ids, peaks, num_nans, filtered=filtered)
    logits = torch.zeros(rows, vocab, dtype=dtype)
    for count in (0, 1):
        score(logits, torch.zeros(rows, dtype=torch.int64), count)
    mask(torch.zeros(1, vocab), torch.zeros(1, dtype=torch.int64), torch.zeros(1, -(-vocab // 32), dtype=torch.int32))
