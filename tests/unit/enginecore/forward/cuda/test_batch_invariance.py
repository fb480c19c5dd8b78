"""A whole decoder with interpreted batch-invariant kernels: a sequence has the same logits bits alone and in a batch."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock_enginecore.attention.base import AttentionMetadata
from penstock_enginecore.forward.base import ForwardBatch
from penstock_enginecore.forward.cuda.decoder import FusedForward
from penstock_enginecore.forward.cuda.linear import keeps
from tests.fakes.models.fused_models import load_probed, save_varied_model
from tests.fakes.models.interpreted_kernels import interpreted, sum_in_order
from tests.fakes.models.quantized_models import save_quantized_model
from tests.fakes.models.torch_kernels import TorchKernels

interpreted("invariant")
BLOCK_SIZE, BLOCKS, VOCAB, LENGTH = 16, 2, 320, 20
TABLE = 1 + np.random.default_rng(0).permutation(3 * BLOCKS).reshape(3, BLOCKS).astype(np.int32)
TOKENS = np.random.default_rng(1).integers(0, VOCAB, (3, BLOCKS * BLOCK_SIZE))
Part = tuple[int, int, int]
"""Part of a step: a sequence, and the first and last position to compute."""

WHOLE: tuple[list[Part], ...] = ([(0, 0, LENGTH)],)
CROWD: tuple[list[Part], ...] = (
    [(1, 0, 19), (0, 0, 5)],
    [(1, 19, 20), (0, 5, 19), (2, 0, 9)],
    [(1, 20, 21), (2, 9, 10), (0, 19, 20)],
)
"""Chunks of a prompt in batches with prompts and decodes of others, and a decode among others."""
ONE_LAYER = {"num_hidden_layers": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": ONE_LAYER,
    "llama/awq": {},
    "deepseek_v3": ONE_LAYER | {"first_k_dense_replace": 0},
    "gpt_oss/mxfp4": ONE_LAYER | {"layer_types": ["sliding_attention"]},
}


class HalfInterpreted(TorchKernels):
    """Replaces kernels that compute one token per program by torch, token by token, which is faster than the
    interpreter.
    """

    def __init__(self, *, batch_invariant: bool = True) -> None:
        from penstock_enginecore.forward.cuda.triton_kernels import TritonKernels  # after the interpreter is set

        super().__init__(batch_invariant=batch_invariant)
        kernels = TritonKernels(batch_invariant=batch_invariant)
        self.attend = kernels.attend  # type: ignore[method-assign]
        self.attend_latent = kernels.attend_latent  # type: ignore[method-assign]
        self.product = kernels.product  # type: ignore[method-assign]
        self.quantized_product = kernels.quantized_product  # type: ignore[method-assign]
        self.grouped_product = kernels.grouped_product  # type: ignore[method-assign]
        self.quantized_grouped_product = kernels.quantized_grouped_product  # type: ignore[method-assign]
        self.route = kernels.route  # type: ignore[method-assign]
        self.align = kernels.align  # type: ignore[method-assign]
        self.weighted_sum = kernels.weighted_sum  # type: ignore[method-assign]


@pytest.fixture(autouse=True)
def in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    sum_in_order(monkeypatch)


def decoder(name: str, path: Path, kernels: TorchKernels) -> FusedForward:
    architecture, _, form = name.partition("/")
    if form:
        save_quantized_model(architecture, form, path, hidden_size=64, **FAMILIES.get(name, ONE_LAYER))
    else:
        save_varied_model(architecture, path, **FAMILIES.get(name, ONE_LAYER))
    return FusedForward(load_probed(path, keeps), kernels).take_over()


@torch.inference_mode()
def logits(forward: FusedForward, steps: Sequence[Sequence[Part]]) -> torch.Tensor:
    """Return logits of sequence 0 ``[LENGTH, vocab]``, with an empty cache."""
    forward.bind(forward.memory.throwaway(BLOCK_SIZE, 1 + TABLE.size))
    found = torch.full((LENGTH, VOCAB), torch.nan)
    for parts in steps:
        for (sequence, start, end), of_part in zip(parts, _run(forward, parts), strict=True):
            if sequence == 0:
                found[start:end] = of_part
    forward.bind({})
    return found


def _run(forward: FusedForward, parts: Sequence[Part]) -> Sequence[torch.Tensor]:
    counts = [end - start for _, start, end in parts]
    token_ids = np.concatenate([TOKENS[sequence, start:end] for sequence, start, end in parts])
    positions = np.concatenate([np.arange(start, end) for _, start, end in parts])
    owners = np.repeat([sequence for sequence, _, _ in parts], counts)
    slots = TABLE[owners, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
    starts, ends = np.append(0, np.cumsum(counts)), np.array([end for _, _, end in parts])
    metadata = AttentionMetadata(starts, ends, TABLE[[sequence for sequence, _, _ in parts]], slots, BLOCK_SIZE)
    output = forward.run(ForwardBatch(token_ids, positions, [metadata]), np.arange(len(token_ids)))
    return output.logits.clone().split(counts)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", FAMILIES)
def test_a_sequence_has_the_same_logits_alone_and_in_a_crowd(name: str, tmp_path: Path) -> None:
    forward = decoder(name, tmp_path, HalfInterpreted())
    whole = logits(forward, WHOLE)
    assert not whole.isnan().any()
    assert torch.equal(logits(forward, CROWD), whole)


def split(product: Callable[..., None], x: torch.Tensor, weight: torch.Tensor, *rest: Any, **kwargs: Any) -> None:
    """Compute the columns of a product of few rows in two parts, as libraries do to keep a device busy. Products with
    an activation stay whole.
    """
    if len(x) > 8 or kwargs.get("activation") is not None:
        product(x, weight, *rest, **kwargs)
        return
    *between, out = rest
    for columns in (slice(None, x.shape[1] // 2), slice(x.shape[1] // 2, None)):
        part = torch.zeros_like(out)
        kept = weight[..., columns, :] if kwargs.get("transposed") else weight[..., columns]
        product(x[:, columns].contiguous(), kept.contiguous(), *between, part, **kwargs)
        out.copy_(part) if columns.start is None else out.add_(part)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("launch", "name"), [("product", "llama"), ("grouped_product", "qwen3_moe")])
def test_sums_that_are_split_by_the_number_of_rows_are_seen(
    launch: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = HalfInterpreted()
    monkeypatch.setattr(kernels, launch, functools.partial(split, getattr(kernels, launch)))
    forward = decoder(name, tmp_path, kernels)
    whole, crowd = logits(forward, WHOLE), logits(forward, CROWD)
    torch.testing.assert_close(crowd, whole, rtol=1e-3, atol=1e-4)
    assert not torch.equal(crowd, whole)
