"""A step's launches can be captured and replayed: they depend only on the step's shape, and stay within buffers."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock_enginecore.attention.base import AttentionMetadata
from penstock_enginecore.forward.base import Choice, FedTokens, ForwardBatch
from penstock_enginecore.forward.cuda.decoder import FusedForward
from penstock_enginecore.sample.base import DrawSettings, PlainDraws
from tests.fakes.models.fused_models import FUSED_FAMILIES, fused, save_varied_model
from tests.fakes.models.recorded_launches import RecordedKernels, RecordedSampling, Recorder, tensors_of
from tests.fakes.models.torch_kernels import TorchKernels

BLOCK_SIZE = 16
OTHER = torch.zeros(3)
NEWEST = torch.zeros(100, dtype=torch.int32)
WITH_EXPERTS = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "dots1")
"""Families whose steps allocate memory. The sizes depend only on the step's shape, and a graph has memory for them."""


class Spied(FusedForward):
    """Records the kernels that a step launches between the arrival of its inputs and its logits."""

    recorder: Recorder
    may_allocate = False

    def _launch_all(self, step: Any) -> torch.Tensor:
        kernels = self._layers._kernels
        caches = [part for layer in self._caches for part in (layer.cache.keys, layer.cache.values)]
        feedback = self._feedback
        inputs = [step.inputs.token_ids, step.inputs.fed.ids]
        results = [feedback._results, feedback._peaks, feedback._newest]
        static = [*tensors_of(step.activations), *caches, *inputs, *results]
        kernels.recorder = self.recorder = Recorder(static, may_allocate=self.may_allocate)
        try:
            with self.recorder:
                return super()._launch_all(step)
        finally:
            kernels.recorder = None


def spied(path: Path, architecture: str, *, batch_invariant: bool = False, **changes: Any) -> FusedForward:
    save_varied_model(architecture, path, **changes)
    forward = fused(path, RecordedKernels(batch_invariant=batch_invariant))
    forward.__class__ = Spied
    forward.may_allocate = architecture in WITH_EXPERTS
    forward.choose_by(RecordedSampling(512, 320, torch.device("cpu")))
    forward.bind(forward.memory.throwaway(BLOCK_SIZE, 64))
    return forward


def decodes(lengths: list[int], seed: int) -> tuple[ForwardBatch, np.ndarray]:
    """Return a step with the next token of sequences of ``lengths``, in random blocks."""
    count = len(lengths)
    generator = np.random.default_rng(seed)
    table = generator.permutation(63)[: count * 4].reshape(count, 4).astype(np.int32) + 1
    ends = np.array(lengths)
    found = AttentionMetadata(np.arange(count + 1), ends, table, np.zeros(count, dtype=np.int64), BLOCK_SIZE)
    slots = np.concatenate([found.slots(i, n - 1, n) for i, n in enumerate(lengths)])
    metadata = AttentionMetadata(found.query_start_loc, ends, table, slots, BLOCK_SIZE)
    fed = FedTokens(NEWEST, np.arange(count)[::2], generator.permutation(99)[: len(range(0, count, 2))])
    choice = Choice(draws(count, generator), NEWEST, generator.permutation(99)[:count])
    batch = ForwardBatch(generator.integers(0, 320, count), ends - 1, [metadata], None, fed, choice)
    return batch, np.arange(count)


def draws(count: int, generator: np.random.Generator) -> PlainDraws:
    """Return settings of rows that are greedy, sampled, or sampled after filters."""
    return PlainDraws.of(
        DrawSettings.off(count)._replace(
            temperature=generator.choice([0.0, 0.5, 1.0], count),
            top_k=generator.choice([0, 5], count),
            top_p=generator.choice([1.0, 0.9], count),
            min_p=generator.choice([0.0, 0.1], count),
        ),
        generator.integers(0, 2**64, count, dtype=np.uint64),
        generator.integers(0, 99, count),
    )


def mixed(seed: int) -> tuple[ForwardBatch, np.ndarray]:
    """Return a step of seven tokens: a piece of a prompt, and two decodes."""
    generator = np.random.default_rng(seed)
    table = generator.permutation(63)[:12].reshape(3, 4).astype(np.int32) + 1
    starts, ends = np.array([0, 1, 6, 7]), generator.integers(8, 60, 3)
    found = AttentionMetadata(starts, ends, table, np.zeros(7, dtype=np.int64), BLOCK_SIZE)
    slots = [found.slots(i, n - new, n) for i, (n, new) in enumerate(zip(ends, np.diff(starts), strict=True))]
    metadata = AttentionMetadata(starts, ends, table, np.concatenate(slots), BLOCK_SIZE)
    return ForwardBatch(generator.integers(0, 320, 7), metadata.positions(), [metadata]), starts[1:] - 1


@pytest.mark.parametrize("architecture", FUSED_FAMILIES)
@torch.inference_mode()
def test_steps_of_one_shape_launch_the_same_work_on_the_same_memory(architecture: str, tmp_path: Path) -> None:
    forward = spied(tmp_path, architecture)
    seen = []
    for batch, rows in (decodes([1, 33, 7], 0), decodes([60, 2, 40, 19], 1), decodes([5, 5, 5], 2)):
        forward.run(batch, rows)
        seen.append(forward.recorder.seen)
    assert len(seen[0]) > 20
    names = [operation[0] for operation in seen[0]]
    assert names[:2] == ["index_select", "where"]
    assert names[-2:] == ["sample", "index_copy_"]
    assert seen[0] == seen[1] == seen[2]
    forward.run(*decodes([5, 5, 5, 5, 5], 3))
    assert forward.recorder.seen != seen[0]


NOT_LAUNCHED = {"view", "slice", "select", "t", "transpose", "unsqueeze", "expand", "as_strided", "split", "alias"}
NOT_LAUNCHED |= {
    "new_empty",
    "empty",
    "empty_like",
    "empty_strided",
    "split_with_sizes",
    "detach",
    "_unsafe_view",
    "unflatten",
}
"""Operations that compute nothing on a device."""


@pytest.mark.parametrize(
    ("architecture", "changes", "of_mlp", "of_layer", "by_torch"),
    [
        ("llama", {}, 3, 9, 9),
        ("mixtral", {}, 3, 9, 27),
        ("qwen3_moe", {}, 3, 9, 25),
        ("gpt_oss", {}, 3, 9, 37),
        ("dots1", {"first_k_dense_replace": 0}, 3, 9, 41),
        ("deepseek_v3", {"first_k_dense_replace": 0}, 3, 13, 48),
    ],
)
@torch.inference_mode()
def test_a_layer_has_few_launches(
    architecture: str, changes: dict[str, Any], of_mlp: int, of_layer: int, by_torch: int, tmp_path: Path
) -> None:
    """Count from the attention of the first layer to the attention of the second. Attention counts as one launch.

    ``by_torch`` is the number of a layer whose experts torch routes, sorts and sums, as before ADR 174.
    """
    assert of_layer <= by_torch
    forward = spied(tmp_path, architecture, **changes)
    forward.run(*decodes([1, 33, 7], 0))
    names = [operation[0] for operation in forward.recorder.seen if operation[0] not in NOT_LAUNCHED]
    first, second = (i for i, name in enumerate(names) if name.startswith("attend"))
    layer = names[first:second]
    before, after = (i for i, name in enumerate(layer) if name == "add_rms_norm")
    assert after - before - 1 == of_mlp, layer
    assert len(layer) == of_layer, layer


@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"])
@torch.inference_mode()
def test_mixtures_of_float32_do_not_need_what_cannot_be_captured(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's grouped product of float32 and float16 reads the ends of rows on the host, so a capture of it fails."""

    def refuse(*args: Any, **options: Any) -> torch.Tensor:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    forward = spied(tmp_path, architecture)
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", refuse)
    forward.run(*decodes([1, 33, 7], 0))
    assert "grouped_product" in [operation[0] for operation in forward.recorder.seen]


@pytest.mark.parametrize(
    ("architecture", "batch_invariant"),
    [("gemma3", False), ("gemma3", True), ("qwen3_moe", True), ("gpt_oss", True), ("deepseek_v3", True)],
)
@torch.inference_mode()
def test_steps_that_mix_prompts_and_decodes_do_so_too(architecture: str, batch_invariant: bool, tmp_path: Path) -> None:
    forward = spied(tmp_path, architecture, batch_invariant=batch_invariant)
    seen = []
    for seed in range(2):
        forward.run(*mixed(seed))
        seen.append(forward.recorder.seen)
    assert seen[0] == seen[1]


@pytest.mark.parametrize(
    ("name", "fault", "error"),
    [
        ("gated", lambda self, gate_up, kind, out: out.copy_(gate_up[:, : out.shape[1]]), "copy_ may cross"),
        ("gated", lambda self, gate_up, kind, out: float(out[0, 0]), "__float__ reads on the host"),
        ("gated", lambda self, gate_up, kind, out: gate_up.nonzero(), "nonzero reads on the host"),
        ("gated", lambda self, gate_up, kind, out: OTHER.fill_(0), "fill_ writes to what is not static"),
        ("gated", lambda self, gate_up, kind, out: gate_up + 1, "add allocates"),
    ],
)
@torch.inference_mode()
def test_steps_that_cannot_be_captured_are_found(
    name: str, fault: Any, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tests the recorder itself, with faulty operations that ``RecordedKernels`` does not cover."""
    forward = spied(tmp_path, "llama")
    monkeypatch.setattr(RecordedKernels, "__getattribute__", object.__getattribute__)
    monkeypatch.setattr(TorchKernels, name, fault)
    for other in ("prologue", "attend", "add_rms_norm"):
        monkeypatch.setattr(TorchKernels, other, lambda self, *args: None)
    with pytest.raises(AssertionError, match=error):
        forward.run(*decodes([1, 33, 7], 0))


@torch.inference_mode()
def test_padding_changes_neither_logits_nor_what_others_have_in_the_cache(tmp_path: Path) -> None:
    forward = spied(tmp_path, "qwen3")
    batch, rows = decodes([60, 2, 40], 1)
    batch = dataclasses.replace(batch, fed=None)
    for cache in forward._caches:
        cache.cache.keys.normal_()
        cache.cache.values.normal_()
    before = [cache.cache.keys.clone() for cache in forward._caches]
    logits = forward.run(batch, rows).logits.clone()
    slots = batch.attention[0].slot_mapping
    for cache, kept in zip(forward._caches, before, strict=True):
        changed = (cache.cache.keys != kept).any(dim=3).any(dim=1)
        assert changed.reshape(-1).nonzero()[:, 0].tolist() == sorted(slots.tolist())
    full, _ = decodes([60, 2, 40, 9], 1)
    [metadata] = full.attention
    metadata = AttentionMetadata(
        metadata.query_start_loc,
        metadata.seq_lens,
        np.concatenate([batch.attention[0].block_table, [[60, 61, 62, 63]]]).astype(np.int32),
        np.append(slots, 60 * BLOCK_SIZE + 8),
        BLOCK_SIZE,
    )
    ids, positions = np.append(batch.token_ids, 7), np.append(batch.positions, 8)
    four = forward.run(ForwardBatch(ids, positions, [metadata]), np.arange(4)).logits
    torch.testing.assert_close(four[:3], logits)
