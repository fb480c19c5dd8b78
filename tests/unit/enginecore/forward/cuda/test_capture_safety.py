"""What a step launches could be captured and replayed: it depends on the step's shape alone, and stays within buffers.

The kernels of these tests read on the host and allocate, which real ones do not; so a launch counts as one operation, of the
tensors that it is given.
"""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from penstock_enginecore.attention.base import AttentionMetadata
from penstock_enginecore.forward.base import ForwardBatch
from penstock_enginecore.forward.cuda.decoder import FusedForward
from tests.fakes.models.fused_models import FUSED_FAMILIES, fused
from tests.fakes.models.tiny_models import save_tiny_model
from tests.fakes.models.torch_kernels import TorchKernels

BLOCK_SIZE = 16
OTHER = torch.zeros(3)
WRITTEN = {"prologue": (6, 7, 8), "attend": (5,), "add_rms_norm": (1, 3), "gated": (2,)}
"""By launch, which of its arguments it writes to."""
READS = ("_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal", "unique", "masked_select")


class Recorder(TorchDispatchMode):
    """Notes each operation with the addresses and shapes of its tensors. Refuses reads on the host, copies, new tensors, and
    writes to others than ``static``.
    """

    def __init__(self, static: list[torch.Tensor]) -> None:
        super().__init__()
        self.seen: list[tuple[Any, ...]] = []
        self.static = {storage(tensor) for tensor in static}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        assert name not in READS, f"{name} reads on the host"
        assert name not in ("_to_copy", "copy_"), f"{name} may cross to the host"
        tensors = [x for x in (*args, *(kwargs or {}).values()) if isinstance(x, torch.Tensor)]
        for spec in func._schema.arguments:
            if spec.alias_info is not None and spec.alias_info.is_write:
                index = func._schema.arguments.index(spec)
                written = (kwargs or {}).get(spec.name) if spec.kwarg_only else args[index]
                assert storage(written) in self.static, f"{name} writes to what is not static"
        storages = {storage(tensor) for tensor in tensors}
        result = func(*args, **(kwargs or {}))
        for out in result if isinstance(result, tuple | list) else [result]:
            assert not isinstance(out, torch.Tensor) or storage(out) in storages, f"{name} allocates"
        numbers = [x for x in args if isinstance(x, int | float)]
        self.note(name, tensors, numbers)
        return result

    def note(self, name: str, tensors: list[torch.Tensor], rest: list[Any]) -> None:
        self.seen.append((name, *((tensor.data_ptr(), *tensor.shape, *tensor.stride()) for tensor in tensors), *rest))


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Launches(TorchKernels):
    """Notes each launch as one operation."""

    recorder: Recorder | None = None

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        recorder = super().__getattribute__("recorder")
        if recorder is None or name not in WRITTEN:
            return found

        @functools.wraps(found)
        def launch(*args: Any) -> None:
            tensors = [tensor for arg in args for tensor in tensors_of(arg)]
            for arg in WRITTEN[name]:
                assert args[arg] is None or storage(args[arg]) in recorder.static, (
                    f"{name} writes to what is not static"
                )
            rest = [arg for arg in args if isinstance(arg, str | float | int)]
            recorder.note(name, tensors, rest)
            with _disable_current_modes():
                found(*args)

        return launch


def tensors_of(arg: Any) -> list[torch.Tensor]:
    if isinstance(arg, torch.Tensor):
        return [arg]
    if isinstance(arg, tuple):
        return [tensor for part in arg for tensor in tensors_of(part)]
    fields = getattr(arg, "__dataclass_fields__", {})
    return [tensor for name in fields for tensor in tensors_of(getattr(arg, name))]


class Spied(FusedForward):
    """Records what a step launches between its inputs' arrival and its logits."""

    recorder: Recorder

    def _launch(self, step: Any) -> torch.Tensor:
        kernels = self._layers._kernels
        caches = [part for layer in self._caches for part in (layer.cache.keys, layer.cache.values)]
        kernels.recorder = self.recorder = Recorder(tensors_of(step.activations) + caches)
        try:
            with self.recorder:
                return super()._launch(step)
        finally:
            kernels.recorder = None


def spied(path: Path, architecture: str) -> FusedForward:
    save_tiny_model(architecture, path)
    forward = fused(path, Launches())
    forward.__class__ = Spied
    forward.bind(forward.memory.throwaway(BLOCK_SIZE, 64))
    return forward


def decodes(lengths: list[int], seed: int) -> tuple[ForwardBatch, np.ndarray]:
    """The next token of sequences of ``lengths``, in blocks drawn by ``seed``."""
    count = len(lengths)
    generator = np.random.default_rng(seed)
    table = generator.permutation(63)[: count * 4].reshape(count, 4).astype(np.int32) + 1
    ends = np.array(lengths)
    found = AttentionMetadata(np.arange(count + 1), ends, table, np.zeros(count, dtype=np.int64), BLOCK_SIZE)
    slots = np.concatenate([found.slots(i, n - 1, n) for i, n in enumerate(lengths)])
    metadata = AttentionMetadata(found.query_start_loc, ends, table, slots, BLOCK_SIZE)
    return ForwardBatch(generator.integers(0, 320, count), ends - 1, [metadata]), np.arange(count)


def mixed(seed: int) -> tuple[ForwardBatch, np.ndarray]:
    """A piece of a prompt and two decodes: seven tokens."""
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
    assert seen[0] == seen[1] == seen[2]
    forward.run(*decodes([5, 5, 5, 5, 5], 3))
    assert forward.recorder.seen != seen[0]


@torch.inference_mode()
def test_steps_that_mix_prompts_and_decodes_do_so_too(tmp_path: Path) -> None:
    forward = spied(tmp_path, "gemma3")
    seen = []
    for seed in range(2):
        forward.run(*mixed(seed))
        seen.append(forward.recorder.seen)
    assert seen[0] == seen[1]


@pytest.mark.parametrize(
    ("name", "fault", "error"),
    [
        ("gated", lambda self, gate_up, kind, out: out.copy_(gate_up[:, : out.shape[1]]), "copy_ may cross"),
        ("gated", lambda self, gate_up, kind, out: float(out[0, 0]), "item reads on the host"),
        ("gated", lambda self, gate_up, kind, out: gate_up.nonzero(), "nonzero reads on the host"),
        ("gated", lambda self, gate_up, kind, out: OTHER.fill_(0), "fill_ writes to what is not static"),
        ("gated", lambda self, gate_up, kind, out: gate_up + 1, "add allocates"),
    ],
)
@torch.inference_mode()
def test_what_could_not_be_captured_is_found(
    name: str, fault: Any, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recorder itself: faults in place of a launch, which is not covered by ``Launches`` then."""
    forward = spied(tmp_path, "llama")
    monkeypatch.setattr(Launches, "__getattribute__", object.__getattribute__)
    monkeypatch.setattr(TorchKernels, name, fault)
    for other in ("prologue", "attend", "add_rms_norm"):
        monkeypatch.setattr(TorchKernels, other, lambda self, *args: None)
    with pytest.raises(AssertionError, match=error):
        forward.run(*decodes([1, 33, 7], 0))


@torch.inference_mode()
def test_padding_changes_neither_logits_nor_what_others_have_in_the_cache(tmp_path: Path) -> None:
    forward = spied(tmp_path, "qwen3")
    batch, rows = decodes([60, 2, 40], 1)
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
