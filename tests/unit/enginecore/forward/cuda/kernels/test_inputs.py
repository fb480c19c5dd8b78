"""Inputs of decode steps made from rows that persist, against the same by single numbers."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_enginecore.forward.cuda.launches import GroupInputs
from tests.fakes.models.interpreted_kernels import interpreted

inputs = interpreted("inputs")

POISON = -77


def int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def poisoned(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.full(shape, POISON, dtype=dtype)


@dataclass
class Step:
    """A step's tensors, with a poisoned number behind each."""

    requests: int
    widths: tuple[int, ...]

    def __post_init__(self) -> None:
        self.memory = [poisoned(self.requests + 1) for _ in range(4)]
        self.starts = poisoned(self.requests + 2)
        self.tables = [poisoned(self.requests + 1, width) for width in self.widths]
        self.slot_memory = [poisoned(self.requests + 1, dtype=torch.int64) for _ in self.widths]
        self.token_ids, self.positions, self.logit_rows, seq_lens = (m[: self.requests] for m in self.memory)
        self.groups = tuple(
            GroupInputs(table[: self.requests], self.starts[: self.requests + 1], seq_lens, slots[: self.requests])
            for table, slots in zip(self.tables, self.slot_memory, strict=True)
        )

    def run(self, state: object, rows: torch.Tensor, block_size: int) -> None:
        inputs.decode_inputs(state, rows, block_size, self.token_ids, self.positions, self.logit_rows, self.groups)


def random_state(lengths: list[int], widths: tuple[int, ...], seed: int) -> object:
    generator = torch.Generator().manual_seed(seed)
    rows = len(lengths)

    def random(*shape: int) -> torch.Tensor:
        return torch.randint(1, 1_000_000, shape, generator=generator, dtype=torch.int32)

    tables = tuple(random(rows, width) for width in widths)
    return inputs.RowState(random(rows), int32(lengths), torch.arange(rows) * 10, tables)


def check(lengths: list[int], chosen: list[int], padding: int, block_size: int, groups: int, seed: int = 0) -> None:
    width = -(-(max(lengths) + 1) // block_size)
    state = random_state(lengths, tuple(width + 2 + i for i in range(groups)), seed)
    step = Step(len(chosen) + padding, tuple(width + i for i in range(groups)))
    step.run(state, int32([*chosen, *[-1] * padding]), block_size)
    none, real = [0] * padding, len(chosen)
    positions = [lengths[row] for row in chosen]
    assert step.memory[0].tolist() == [*state.token_ids[chosen].tolist(), *none, POISON]
    assert step.memory[1].tolist() == [*positions, *none, POISON]
    assert step.memory[2].tolist() == [*range(real + padding), POISON]
    assert step.memory[3].tolist() == [*(position + 1 for position in positions), *none, POISON]
    assert step.starts.tolist() == [*range(real), *[real] * (padding + 1), POISON]
    for held, table, slots in zip(state.block_tables, step.tables, step.slot_memory, strict=True):
        wanted = poisoned(*table.shape)
        for request, (row, position) in enumerate(zip(chosen, positions, strict=True)):
            filled = position // block_size + 1
            wanted[request, :filled] = held[row, :filled]
        assert torch.equal(table, wanted)
        expected = [
            int(held[row, position // block_size]) * block_size + position % block_size
            for row, position in zip(chosen, positions, strict=True)
        ]
        assert slots.tolist() == [*expected, *[-1] * padding, POISON]
    assert state.lengths.tolist() == [length + (row in chosen) for row, length in enumerate(lengths)]


@settings(max_examples=10)
@given(data=st.data())
def test_any_step(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(0, 100), min_size=1, max_size=8))
    chosen = data.draw(st.permutations(range(len(lengths))))[: data.draw(st.integers(0, len(lengths)))]
    padding = data.draw(st.integers(0 if chosen else 1, 9))
    check(lengths, list(chosen), padding, data.draw(st.integers(1, 20)), data.draw(st.integers(1, 3)))


def test_tables_longer_than_a_program_looks_at_in_one_go() -> None:
    check([1000, 3, 517], [2, 0], 2, 3, 1)


def test_more_requests_than_one_program_advances() -> None:
    check([7] * 135, list(range(134, 0, -1)), 3, 4, 1)


@settings(max_examples=8)
@given(data=st.data())
def test_sampled_tokens_are_what_their_rows_go_on_with(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 140))
    state = random_state([5] * count, (3,), seed=count)
    chosen = data.draw(st.permutations(range(count)))[: data.draw(st.integers(0, count))]
    padding = data.draw(st.integers(0, 4))
    tokens, indices = state.token_ids.clone(), state.output_indices.clone()
    sampled = torch.arange(len(chosen) + padding, dtype=torch.int32) + 2_000_000
    inputs.keep_tokens(state, int32([*chosen, *[-1] * padding]), sampled)
    tokens[list(chosen)] = sampled[: len(chosen)]
    indices[list(chosen)] += 1
    assert torch.equal(state.token_ids, tokens)
    assert torch.equal(state.output_indices, indices)


def test_steps_follow_one_another_without_the_host() -> None:
    state = random_state([0, 6], (4,), seed=1)
    rows = int32([1, 0, -1])
    for step_number in range(5):
        step = Step(3, (4,))
        newest = state.token_ids.tolist()
        step.run(state, rows, 4)
        assert step.token_ids.tolist() == [newest[1], newest[0], 0]
        assert step.positions.tolist() == [6 + step_number, step_number, 0]
        inputs.keep_tokens(state, rows, int32([step_number, 100 + step_number, 7]))
        assert state.token_ids.tolist() == [100 + step_number, step_number]


def test_other_shapes_are_refused() -> None:
    state = random_state([1, 2], (4,), seed=0)
    with pytest.raises(ValueError, match="3 rows for 2 token ids, 2 positions, 2 rows"):
        Step(2, (4,)).run(state, int32([0, 1, -1]), 4)
    with pytest.raises(ValueError, match="1 block tables for 2 KV cache groups"):
        Step(2, (4, 4)).run(state, int32([0, 1]), 4)
    with pytest.raises(ValueError, match="block tables of 5 blocks from those of 4"):
        Step(2, (5,)).run(state, int32([0, 1]), 4)
    with pytest.raises(ValueError, match=r"\[2\] tokens of \[1\] rows"):
        inputs.keep_tokens(state, int32([0]), int32([0, 1]))
