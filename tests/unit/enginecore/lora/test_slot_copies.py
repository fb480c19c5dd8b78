"""Adapters reach slots through a ring that is smaller than an adapter, and a step never uses an incomplete slot."""

import itertools
from random import Random

import pytest
import torch

from penstock_enginecore.forward.cuda.adapters import DeviceAdapters
from penstock_enginecore.forward.cuda.buffers import StepShape
from penstock_enginecore.lora.adapter import LoraAdapter, LoraSegment, LowRankUpdate
from penstock_enginecore.lora.device_slots import Place, SlotLimits
from penstock_enginecore.lora.slot_copies import AtOnce, StagedCopies
from penstock_enginecore.worker.staging import StagingRing
from tests.fakes.deferred_stream import DeferredStream
from tests.fakes.models.torch_kernels import TorchKernels
from tests.fakes.patience import PATIENCE

CPU = torch.device("cpu")
PLACE = Place({"one": (8, 12), "two": (4, 12)})


def staged(num_pieces: int = 2, piece_bytes: int = 64) -> tuple[StagedCopies, DeferredStream]:
    stream = DeferredStream()
    return StagedCopies(StagingRing(num_pieces, piece_bytes, stream, CPU), stream), stream


def updates_of(number: int) -> dict[str, LowRankUpdate]:
    generator = torch.Generator().manual_seed(number)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator)

    rank = 1 + number % 4
    return {name: LowRankUpdate(random(rank, 12), random(out, rank)) for name, (out, _) in PLACE.layers.items()}


class Served:
    """Adapters of one product, by number."""

    def __init__(self, copies: StagedCopies | AtOnce, max_loras: int = 2) -> None:
        self.adapters = DeviceAdapters([PLACE], SlotLimits(max_loras, 4), torch.float32, CPU, TorchKernels(), copies)
        self.adapters.allocate()

    def add(self, number: int) -> None:
        self.adapters.prepare(LoraAdapter(bytes([number]), updates_of(number)))()

    def step(self, *numbers: int) -> None:
        """Run a step with a row for each adapter, and check its results."""
        x, out = torch.randn(len(numbers), 12), torch.zeros(len(numbers), 12)
        segments = [LoraSegment(bytes([number]), row, row + 1) for row, number in enumerate(numbers)]
        with self.adapters.step(segments, (), StepShape(len(numbers), 1)):
            self.adapters.add_to(0, x, 1.0, out)
        for row, number in enumerate(numbers):
            expected = torch.cat([x[row] @ update.a.t() @ update.b.t() for update in updates_of(number).values()])
            torch.testing.assert_close(out[row], expected)


@pytest.mark.parametrize("num_pieces", [1, 2, 5])
@pytest.mark.parametrize("size", [0, 1, 16, 64, 65, 1000])
def test_a_copy_is_complete_before_the_work_behind_it(size: int, num_pieces: int) -> None:
    copies, stream = staged(num_pieces)
    source, target = torch.randn(size, dtype=torch.bfloat16), torch.zeros(size, dtype=torch.bfloat16)
    table, to = torch.arange(5), torch.zeros(5, dtype=torch.int64)
    copies.await_end(copies.begin([(target, source), (to, table)]))
    assert torch.equal(target, source)
    assert torch.equal(to, table)
    assert stream.running == 0
    copies.finish()


def test_a_source_may_be_freed_when_the_device_still_copies() -> None:
    copies, stream = staged(4)
    source, target = torch.ones(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    end = copies.begin([(target, source)])
    end.result(PATIENCE)
    assert stream.running == 1
    source.zero_()
    copies.await_end(end)
    assert target.all()
    copies.finish()


def test_targets_of_other_sizes_are_refused() -> None:
    copies, _ = staged()
    end = copies.begin([(torch.zeros(3), torch.zeros(4))])
    with pytest.raises(ValueError, match="cannot copy 16 bytes to 12 bytes of device memory"):
        copies.await_end(end)
    copies.finish()


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("piece_bytes", [16, 4096])
def test_steps_use_complete_adapters_in_any_order(piece_bytes: int, inference: bool) -> None:
    rng = Random(piece_bytes)
    with torch.inference_mode(inference):
        copies, stream = staged(2, piece_bytes)
        served = Served(copies)
        for number in range(5):
            served.add(number)  # several adapters take the same slot, while copies run
        for numbers in rng.sample(list(itertools.permutations(range(5), 2)), 12):
            served.step(*numbers)
        served.adapters.remove(bytes([3]))
        served.add(3)
        served.step(3, 1)
        served.adapters.release()
        assert stream.running == 0


def test_memory_is_freed_after_the_copies_and_filled_again() -> None:
    copies, stream = staged(8)
    served = Served(copies)
    served.add(0)
    served.add(1)
    served.adapters._coming[bytes([1])].result(PATIENCE)
    assert stream.running, "the device still copies"
    served.adapters.release()
    assert stream.running == 0
    served.adapters.allocate()
    served.step(1, 0)
    served.adapters.release()


@pytest.mark.parametrize("fail_at", range(3))
def test_after_an_error_the_next_step_copies_the_adapter_again(fail_at: int) -> None:
    copies, stream = staged()
    served = Served(copies)
    stream.fail_at = fail_at
    served.add(0)
    served.add(1)
    with pytest.raises(OSError, match="refuses"):
        served.step(0)
    served.step(1)
    served.step(0, 1)
    copies.finish()
