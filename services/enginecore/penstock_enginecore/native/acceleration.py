"""Which parts of a model the kernels take over, and the proof that they compute the same.

A model's own modules run once before and once after. Where the results differ, or something fails, the modules stay as they
were and a log line says so.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from penstock_enginecore.attention.base import AttentionMetadata, IntArray
from penstock_enginecore.config import KernelsConfig
from penstock_enginecore.models.attention_hook import AttentionCall, LayerCaches
from penstock_enginecore.native.attention import CHUNK
from penstock_enginecore.native.decoder import NativeDecoder, UnsuitableError
from penstock_enginecore.native.library import KernelsError, NativeLibrary, open_library
from penstock_enginecore.native.linear import PackedLinears

logger = logging.getLogger(__name__)

_PROBE_TOKENS = 24
_TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Differences, as shares of the length of the whole as a vector, that another order of summation does not make: by the dtype
in which the model's own modules compute.
"""

NO_KERNELS = KernelsConfig(isa="off")


def open_kernels(config: KernelsConfig, device: torch.device, num_threads: int) -> NativeLibrary | None:
    """The kernels that ``config`` asks for; None where they are off, not built, or not for this device. Raises
    KernelsError where an instruction set is named that cannot be had.
    """
    if config.isa == "off" or device.type != "cpu":
        return None
    try:
        return open_library(config.isa, num_threads)
    except KernelsError as e:
        if config.isa != "auto":
            raise
        logger.warning("computing without kernels, which is slower: %s", e)
        return None


@dataclass(frozen=True, slots=True)
class Probe:
    """A prompt of a few tokens, and where it lies in a cache of its own."""

    token_ids: IntArray
    metadata: AttentionMetadata

    @classmethod
    def create(cls, vocab_size: int) -> "Probe":
        """Tokens from all over the vocabulary, in a cache of blocks of ``CHUNK`` tokens."""
        blocks = -(-_PROBE_TOKENS // CHUNK)
        metadata = AttentionMetadata(
            query_start_loc=np.array([0, _PROBE_TOKENS]),
            seq_lens=np.array([_PROBE_TOKENS]),
            block_table=np.arange(1, blocks + 1, dtype=np.int32)[None],
            slot_mapping=np.arange(CHUNK, CHUNK + _PROBE_TOKENS),
            block_size=CHUNK,
        )
        return cls(np.arange(1, _PROBE_TOKENS + 1) * 7919 % vocab_size, metadata)

    @property
    def num_blocks(self) -> int:
        """Blocks of the cache, the null block included."""
        return 1 + int(self.metadata.block_table.shape[1])


def accelerated_decoder(
    library: NativeLibrary,
    module: PreTrainedModel,
    calls: Sequence[AttentionCall],
    *,
    block_size: int,
    max_len: int,
    probe: Probe,
    expected: torch.Tensor,
    caches: LayerCaches,
) -> NativeDecoder | None:
    """The whole model in the kernels, with its own weights freed; None where they do not compute it. ``expected``
    ``[tokens, vocab]``: the model's own logits of ``probe``.
    """
    try:
        decoder = NativeDecoder(library, module, calls, block_size, max_len)
    except UnsuitableError as e:
        logger.info("the model runs module by module: %s", e)
        return None
    rows = np.arange(len(probe.token_ids))
    logits = decoder.run(decoder.embed(probe.token_ids), rows, [probe.metadata], caches, rows)
    if not _same(logits, expected):
        logger.warning(
            "the model runs module by module: as one program its logits differ by %.3g", _distance(logits, expected)
        )
        return None
    decoder.take_over()
    return decoder


def accelerated_linears(
    library: NativeLibrary, module: torch.nn.Module, run: Callable[[], torch.Tensor], expected: torch.Tensor
) -> PackedLinears | None:
    """The model's linear layers packed; None where that does not work. ``run``: what the model makes of the probe."""
    packed = PackedLinears(module, library)
    try:
        result = run()
    except Exception as e:
        logger.info("linear layers are not packed: %s: %s", type(e).__name__, e)
        packed.undo()
        return None
    if not _same(result, expected):
        logger.warning("linear layers are not packed: the results differ by %.3g", _distance(result, expected))
        packed.undo()
        return None
    packed.keep()
    return packed


def _distance(result: torch.Tensor, expected: torch.Tensor) -> float:
    return float((result.float() - expected.float()).norm() / expected.float().norm().clamp(min=1e-30))


def _same(result: torch.Tensor, expected: torch.Tensor) -> bool:
    return _distance(result, expected) <= _TOLERANCES[expected.dtype]  # which no NaN is


def describe(library: NativeLibrary | None, **uses: object) -> str:
    """What computes, for logs and operators: the instruction set and the ``uses`` that are in force, or torch."""
    if library is None:
        return "torch"
    used = [name for name, use in uses.items() if use]
    return f"{library.isa} kernels ({', '.join(used) or 'unused'}), {library.num_threads} threads"
