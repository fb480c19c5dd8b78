"""Floors and batches of ``make bench-gpu``."""

from typing import Any, cast

import pytest
import torch

from penstock_enginecore.attention.base import IntArray
from penstock_enginecore.forward.base import ForwardBatch, ForwardOutput
from penstock_enginecore.forward.build import BuiltForward
from penstock_enginecore.sample.base import LaunchedTokens, PlainDraws
from tests.benchmarks.gpu import names, passes, phases
from tests.benchmarks.gpu.batches import decode_batch, prefill_batch, verify_batch
from tests.benchmarks.gpu.decoder import Decoder
from tests.benchmarks.gpu.shapes import FULL, LLAMA_8B, SMOKE, Ceilings, DecodeRow, Prefill
from tests.device.phases import Settings

H200 = Ceilings(copy_rate=4.3e12, product_rate=780e12)


@pytest.mark.parametrize(
    ("row", "floor"),
    [
        (DecodeRow(1, 1024), 3.52),
        (DecodeRow(32, 1024), 4.49),
        (DecodeRow(128, 1024), 7.49),
        (DecodeRow(256, 1024), 12.9),
        (DecodeRow(64, 16_384), 35.5),
    ],
)
def test_floors_of_decode_steps(row: DecodeRow, floor: float):
    assert H200.decode_ms(LLAMA_8B, row) == pytest.approx(floor, rel=0.03)


def test_the_floor_of_a_prompt_is_its_products():
    assert H200.prefill_ms(LLAMA_8B, Prefill(2048)) == pytest.approx(38.1, rel=0.01)


@pytest.mark.parametrize(
    ("spans", "idle"),
    [([(0, 4)], 0.0), ([(0, 1), (3, 4)], 0.5), ([(0, 4), (1, 2), (3, 6), (7, 8)], 0.125)],
    ids=["busy", "a gap", "overlapping"],
)
def test_idle_is_what_no_launch_covers(spans: list[tuple[float, float]], idle: float):
    assert passes.share_idle(spans) == pytest.approx(idle)


def test_a_decode_batch_has_blocks_of_its_own_for_each_stream():
    batch, rows = decode_batch(SMOKE, DecodeRow(3, 40))
    (metadata,) = batch.attention
    assert sorted(metadata.block_table.ravel().tolist()) == list(range(1, 10))
    assert metadata.positions().tolist() == batch.positions.tolist() == [39] * 3
    assert [metadata.slots(i, 39, 40).item() for i in range(3)] == metadata.slot_mapping.tolist()
    assert rows.tolist() == [0, 1, 2]


def test_steps_that_verify_drafts_multiply_by_each_token():
    one, many = (H200.decode_ms(LLAMA_8B, DecodeRow(64, 1024), tokens) for tokens in (1, 12))
    assert one == pytest.approx(5.53, rel=0.03)
    assert many - one == pytest.approx(2 * 12 * 64 * 7.5e9 / 780e9 - 3.5, rel=0.05)


def test_rows_have_names_of_their_own():
    for settings in (Settings("8B"), Settings("1B"), Settings("tiny", cpu=True), Settings("8B", jobs=4)):
        for phase in phases.PHASES:
            rows = [row.name for stage in phase.load(settings) for row in stage.rows]
            assert len(rows) == len(set(rows)), phase.name


def test_kernels_are_compiled_for_the_sizes_of_the_steps_dealt_out_to_processes():
    [phase] = [phase for phase in phases.PHASES if phase.name == "compile"]
    [stage] = phase.load(Settings("8B", jobs=3))
    assert [row.name for row in stage.rows] == ["decodes of 1, 48, 256", "decodes of 8, 64", "decodes of 32, 128"]


def test_the_decode_step_that_idleness_is_measured_of_is_also_run_without_graphs():
    assert names.idle_row(FULL).streams == 64
    assert [row.streams for row in names.launched_rows(FULL)] == [1, 64]
    rows = [row.name for stage in passes.stages(Settings("8B")) for row in stage.rows]
    assert {"idle", "launched 1 x 1024", "launched 64 x 1024"} <= set(rows)
    assert not {"idle", "launched 1 x 64"} & {
        row.name for stage in passes.stages(Settings("tiny", True)) for row in stage.rows
    }


NEWEST = 3
"""What the fake device chooses."""


class Forward:
    """A pass on a device that chooses tokens; keeps what it is given."""

    def __init__(self, *, itself: bool) -> None:
        self.itself = itself
        self.batches: list[ForwardBatch] = []

    def run(self, batch: ForwardBatch, rows: IntArray) -> ForwardOutput:
        self.batches.append(batch)
        logits = torch.zeros(len(rows), 8)
        logits[:, NEWEST] = 1.0
        tokens = (
            LaunchedTokens(torch.full((2, len(rows)), NEWEST, dtype=torch.int32), len(rows)) if self.itself else None
        )
        return ForwardOutput(logits, launched=tokens)


class Launcher:
    def launch(self, logits: torch.Tensor, draws: PlainDraws) -> LaunchedTokens:
        assert not draws.any_drawn
        return LaunchedTokens(torch.stack([logits.argmax(-1), 0 * logits.argmax(-1)]).int(), len(logits))


def decoder(forward: Forward, launcher: Launcher | None) -> Decoder:
    built: Any = BuiltForward(cast(Any, forward), cast(Any, None), "fakes", launcher)
    return Decoder(SMOKE, torch.device("cpu"), built)


def test_decode_steps_take_their_tokens_from_the_device_as_in_an_engine():
    forward = Forward(itself=False)
    step = decoder(forward, Launcher()).step(*decode_batch(SMOKE, DecodeRow(3, 40)))
    step()
    step()
    batch = forward.batches[-1]
    assert batch.choice is not None
    assert batch.fed is not None
    assert batch.fed.newest is batch.choice.newest
    token_ids = torch.from_numpy(batch.token_ids.copy())
    batch.fed.write(token_ids)
    assert token_ids.tolist() == [NEWEST] * 3


def test_of_a_step_that_verifies_drafts_the_first_token_of_each_stream_comes_from_the_device():
    forward = Forward(itself=True)
    decoder(forward, Launcher()).step(*verify_batch(SMOKE, DecodeRow(2, 40), 5), per_stream=5)()
    [batch] = forward.batches
    assert batch.fed is not None
    assert batch.fed.places.tolist() == [0, 5]
    assert batch.choice is not None
    assert len(batch.choice.kept_rows) == 10


def test_a_prompt_is_not_fed_and_without_a_launcher_neither_are_steps():
    forward = Forward(itself=True)
    decoder(forward, Launcher()).step(*prefill_batch(SMOKE, Prefill(16)), per_stream=None)()
    decoder(forward, None).step(*decode_batch(SMOKE, DecodeRow(3, 40)))()
    assert [batch.fed for batch in forward.batches] == [None, None]
    assert [batch.choice is None for batch in forward.batches] == [False, True]


def test_without_graphs_steps_are_launched_and_graphs_come_back():
    forward: Any = Forward(itself=True)
    forward._graphs = graphs = object()
    with decoder(forward, None).launched():
        assert forward._graphs is None
    assert forward._graphs is graphs
