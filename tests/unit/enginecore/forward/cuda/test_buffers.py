"""Inputs of steps: where they lie, how they are padded, and that none is overwritten before it has arrived."""

import numpy as np
import pytest
import torch

from penstock_enginecore.attention.base import AttentionMetadata
from penstock_enginecore.forward.base import Choice, FedTokens, ForwardBatch
from penstock_enginecore.forward.cuda.buffers import (
    ActivationBuffers,
    CacheShape,
    HostSlot,
    HostSlots,
    InputBuffers,
    StepMemory,
    StepShape,
    Widths,
    padded_shape,
    shape_of,
)
from penstock_enginecore.sample.base import DrawSettings, PlainDraws
from tests.fakes.models.recorded_launches import tensors_of

CPU = torch.device("cpu")
INF = float("inf")
WIDTHS = Widths(hidden=8, qkv=24, attended=12, intermediate=20, vocab=30)


def metadata(lengths: list[int], query_lens: list[int], *, first_block: int = 1) -> AttentionMetadata:
    """Return metadata of requests with ``lengths`` tokens in blocks of 4. The last ``query_lens`` tokens are new."""
    starts = np.cumsum([0, *query_lens])
    width = -(-max(lengths) // 4)
    table = first_block + np.arange(len(lengths) * width, dtype=np.int32).reshape(-1, width)
    found = AttentionMetadata(starts, np.array(lengths), table, np.zeros(starts[-1], dtype=np.int64), 4)
    slots = [found.slots(i, n - new, n) for i, (n, new) in enumerate(zip(lengths, query_lens, strict=True))]
    return AttentionMetadata(starts, np.array(lengths), table, np.concatenate(slots), 4)


def test_steps_are_padded_to_few_shapes_and_large_ones_to_multiples_of_16() -> None:
    decodes = {padded_shape(n, n) for n in range(1, 513)}
    assert len(decodes) == 28
    assert {shape.tokens - shape.requests for shape in decodes} == {0}
    mixed = {padded_shape(n, r) for n in range(1, 513) for r in range(1, n)}
    assert len(mixed) <= 45
    for n in range(1, 513):
        for r in {1, n // 3 + 1, n}:
            shape = padded_shape(n, r)
            assert n <= shape.tokens < n + 64
            assert r <= shape.requests <= max(shape.tokens, r)
    assert padded_shape(3, 17) == StepShape(4, 32)
    assert padded_shape(7, 3) == StepShape(8, 8)
    assert padded_shape(257, 50) == StepShape(320, 64)
    assert padded_shape(512, 512) == StepShape(512, 512)
    assert padded_shape(513, 3) == StepShape(528, 16)
    assert padded_shape(3, 513) == StepShape(16, 528)
    assert padded_shape(1504, 160) == StepShape(1504, 160)


def test_large_steps_are_padded_if_that_adds_few_tokens() -> None:
    assert [padded_shape(n, 3) for n in (992, 1024, 1984, 2048)] == [
        StepShape(1024, 16),
        StepShape(1024, 16),
        StepShape(2048, 16),
        StepShape(2048, 16),
    ]
    assert [padded_shape(n, 300).tokens for n in (700, 991, 1025, 1983, 2049)] == [704, 992, 1040, 1984, 2064]
    assert padded_shape(2048, 513) == StepShape(2048, 528)
    assert [StepShape(*sizes).is_large for sizes in ((1024, 512), (1023, 1), (2048, 513))] == [False, True, True]


def test_a_step_is_padded_with_requests_of_no_tokens_and_tokens_of_no_slot() -> None:
    buffers = InputBuffers(StepShape(16, 8), 2, 6, HostSlots.on(CPU), CPU)
    shape = StepShape(8, 4)
    inputs = buffers.of(shape)
    for tensor in (inputs.token_ids, inputs.positions, inputs.rows, *(group.slots for group in inputs.groups)):
        tensor.fill_(77)
    groups = [metadata([9, 2], [3, 2]), metadata([9, 2], [3, 2], first_block=20)]
    ids, rows = np.arange(5) + 50, np.array([2, 4])
    buffers.load(ForwardBatch(ids, groups[0].positions(), groups), rows, shape)
    assert inputs.token_ids.tolist() == [50, 51, 52, 53, 54, 0, 0, 0]
    assert inputs.positions.tolist() == [6, 7, 8, 0, 1, 0, 0, 0]
    assert inputs.rows.tolist() == [2, 4, 0, 0]
    for group, expected in zip(inputs.groups, groups, strict=True):
        assert group.query_start_loc.tolist() == [0, 3, 5, 5, 5]
        assert group.seq_lens.tolist() == [9, 2, 0, 0]
        assert group.slots.tolist() == [*expected.slot_mapping.tolist(), -1, -1, -1]
        assert group.block_table[:2, :3].tolist() == expected.block_table.tolist()
        assert group.block_table.shape == (4, 6)
    assert {t.dtype for t in (inputs.token_ids, inputs.positions, inputs.rows)} == {torch.int32}
    assert inputs.groups[0].slots.dtype == torch.int64


def test_each_token_has_three_rotary_positions_if_the_model_has_sections() -> None:
    buffers = InputBuffers(StepShape(8, 8), 2, 6, HostSlots.on(CPU), CPU, sections=True)
    groups, shape = [metadata([9, 2], [3, 2])] * 2, StepShape(8, 2)
    inputs = buffers.of(shape)
    rope = np.arange(15).reshape(3, 5)
    for given, expected in ((rope, rope), (None, np.stack([groups[0].positions()] * 3))):
        inputs.rope_positions.fill_(77)
        batch = ForwardBatch(np.arange(5), groups[0].positions(), groups, rope_positions=given)
        buffers.load(batch, np.array([4]), shape)
        assert inputs.rope_positions.tolist() == [[*row, 0, 0, 0] for row in expected.tolist()]
        assert inputs.positions.tolist() == [6, 7, 8, 0, 1, 0, 0, 0]
        assert inputs.groups[1].slots.tolist()[5:] == [-1, -1, -1]
    assert InputBuffers(StepShape(8, 8), 1, 6, HostSlots.on(CPU), CPU).of(shape).rope_positions is None


def test_steps_of_decodes_have_shapes_of_their_own() -> None:
    for lengths, decodes_only in (([1, 1, 1], True), ([1, 2, 1], False), ([2, 1, 0], False)):
        step = metadata([9, 7, 5], lengths)
        batch = ForwardBatch(np.zeros(sum(lengths), dtype=np.int64), step.positions(), [step])
        shape = shape_of(batch, np.arange(3))
        assert shape == StepShape(4, 4, decodes_only)
        inputs = InputBuffers(StepShape(8, 8), 2, 6, HostSlots.on(CPU), CPU).of(shape)
        assert [group.decodes_only for group in inputs.groups] == [decodes_only] * 2


def test_rows_that_nobody_draws_are_greedy_and_kept_by_nobody() -> None:
    buffers, shape = InputBuffers(StepShape(8, 8), 1, 6, HostSlots.on(CPU), CPU), StepShape(4, 4)
    inputs, step = buffers.of(shape), metadata([9, 2, 1], [1, 1, 1])
    draws = PlainDraws.of(
        DrawSettings.off(2)._replace(
            temperature=np.array([0.5, 0.0]),
            top_k=np.array([7, 0]),
            top_p=np.array([0.9, 1.0]),
            min_p=np.array([1.0, 0.0]),
        ),
        np.array([2**64 - 1, 5], dtype=np.uint64),
        np.array([3, 4]),
    )
    fed = FedTokens(torch.zeros(9), np.array([2]), np.array([6]))
    choice = Choice(draws, torch.zeros(9), np.array([1, 6]))
    batch = ForwardBatch(np.zeros(3, dtype=np.int64), step.positions(), [step], None, fed, choice)
    for _ in range(2):
        buffers.load(batch, np.array([0, 2]), shape, nobody=8)
        assert [tensor.tolist() for tensor in tensors_of(inputs.draws)] == [
            [0.5, 0.0, 0.0, 0.0],
            [-1, 5, 0, 0],
            [3, 4, 0, 0],
            [0.0, INF, INF, INF],
            [7, 0, 0, 0],
            [0.9, 1.0, 1.0, 1.0],
        ]
        assert inputs.kept_rows.tolist() == [1, 6, 8, 8]
        assert inputs.fed.known.tolist() == [False, False, True, False]
        assert inputs.fed.rows.tolist() == [0, 0, 6, 0]
    buffers.load(ForwardBatch(batch.token_ids, batch.positions, [step]), np.array([0]), shape, nobody=8)
    assert inputs.draws.temperature.tolist() == [0.0] * 4
    assert inputs.kept_rows.tolist() == [8] * 4
    assert not inputs.fed.known.any()


def test_tensors_of_padded_shapes_begin_at_aligned_addresses_and_never_move() -> None:
    memory = StepMemory(CacheShape(3, 10), WIDTHS, torch.float16, CPU)
    step = memory.step(StepShape(48, 16))
    addresses = [tensor.data_ptr() for tensor in tensors(step)]
    base = min(a.data_ptr() for a in tensors(memory.step(StepShape(2048, 512))))
    assert all((address - base) % 16 == 0 for address in addresses)
    memory.step(StepShape(3000, 20))
    assert memory.step(StepShape(48, 16)) is step
    assert [tensor.data_ptr() for tensor in tensors(step)] == addresses


def tensors(step: object) -> list[torch.Tensor]:
    inputs, activations = step.inputs, step.activations  # type: ignore[attr-defined]
    groups = [
        getattr(g, name) for g in inputs.groups for name in ("block_table", "query_start_loc", "seq_lens", "slots")
    ]
    flowing = [getattr(activations, name) for name in activations.__slots__]
    return [inputs.token_ids, inputs.positions, inputs.rows, *groups, *flowing]


def test_memory_of_large_steps_is_kept_for_the_next_and_grows_with_them() -> None:
    memory = StepMemory(CacheShape(1, 10), WIDTHS, torch.float32, CPU)
    first = memory.step(StepShape(700, 3))
    assert first.activations.x.shape == (700, 8)
    assert first.activations.x.data_ptr() == memory.step(StepShape(2048, 16)).activations.x.data_ptr()
    second = memory.step(StepShape(2100, 3))
    again = memory.step(StepShape(2500, 500))
    assert again.activations.x.data_ptr() == second.activations.x.data_ptr() != first.activations.x.data_ptr()
    larger = memory.step(StepShape(600, 1025))
    assert larger.activations.logits.shape == (1025, 30)
    assert memory.step(StepShape(1024, 1536)).activations.x.data_ptr() == larger.activations.x.data_ptr()


def test_buffers_alive_at_the_same_time_share_no_memory() -> None:
    step = ActivationBuffers(StepShape(16, 8), WIDTHS, torch.float32, CPU).of(StepShape(16, 8))
    of_attention, of_mlp = ("qkv", "query", "attended"), ("gate_up", "gated")
    others = ("residual", "x", "normed", "chosen", "logits")
    for alive in ((*of_attention, *others), (*of_mlp, *others)):
        for i, name in enumerate(alive):
            getattr(step, name).fill_(i)
        for i, name in enumerate(alive):
            assert (getattr(step, name) == i).all(), name


class FakeEvent:
    """A CUDA event that logs its calls."""

    def __init__(self, log: list[str], name: str) -> None:
        self.log = log
        self.name = name

    def record(self) -> None:
        self.log.append(f"record {self.name}")

    def synchronize(self) -> None:
        self.log.append(f"wait {self.name}")


def test_a_slot_is_written_again_only_when_its_copy_has_ended() -> None:
    log: list[str] = []
    slots = HostSlots(tuple(HostSlot(CPU, lambda name=name: FakeEvent(log, name)) for name in "ab"))
    for _ in range(3):
        log.append("write")
        slots.take(8).send(8)
    assert log == ["write", "wait a", "record a", "write", "wait b", "record b", "write", "wait a", "record a"]


@pytest.mark.parametrize("num_bytes", [1, 8, 9, 1000])
def test_what_was_laid_out_arrives(num_bytes: int) -> None:
    slots = HostSlots.on(CPU)
    for value in (3, 4, 5):
        slot = slots.take(num_bytes)
        slot.memory[:num_bytes] = value
        assert (slot.send(num_bytes) == value).all()
