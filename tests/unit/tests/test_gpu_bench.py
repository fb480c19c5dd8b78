"""What ``make bench-gpu`` reckons with, and what it says without a GPU."""

import json
from pathlib import Path

import pytest
from transformers import AutoConfig

from tests.benchmarks.gpu import passes, report
from tests.benchmarks.gpu.shapes import FULL, LLAMA_1B, LLAMA_8B, SMOKE, Ceilings, Prefill, Row

H200 = Ceilings(copy_rate=4.3e12, product_rate=780e12)


@pytest.mark.parametrize(
    ("row", "floor"),
    [
        (Row(1, 1024), 3.52),
        (Row(32, 1024), 4.49),
        (Row(128, 1024), 7.49),
        (Row(256, 1024), 12.9),
        (Row(64, 16_384), 35.5),
    ],
)
def test_floors_of_decode_steps(row: Row, floor: float):
    assert H200.decode_ms(LLAMA_8B, row) == pytest.approx(floor, rel=0.03)


def test_the_floor_of_a_prompt_is_its_products():
    assert H200.prefill_ms(LLAMA_8B, Prefill(2048)) == pytest.approx(38.1, rel=0.01)


def test_a_shape_has_the_parameters_of_its_checkpoint():
    assert LLAMA_8B.step_weights == pytest.approx(7.5e9, rel=0.01)
    assert LLAMA_1B.step_weights == pytest.approx(1.236e9, rel=0.01)
    assert LLAMA_8B.kv_bytes_per_token == 131_072


def test_a_shape_writes_a_configuration_that_transformers_reads(tmp_path: Path):
    config = AutoConfig.from_pretrained(LLAMA_8B.write(tmp_path))
    assert (config.num_hidden_layers, config.head_dim, config.num_key_value_heads) == (32, 128, 8)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert (tmp_path / "tokenizer.json").is_file()


@pytest.mark.parametrize(
    ("spans", "idle"),
    [([(0, 4)], 0.0), ([(0, 1), (3, 4)], 0.5), ([(0, 4), (1, 2), (3, 6), (7, 8)], 0.125)],
    ids=["busy", "a gap", "overlapping"],
)
def test_idle_is_what_no_launch_covers(spans: list[tuple[float, float]], idle: float):
    assert passes.share_idle(spans) == pytest.approx(idle)


def test_a_decode_batch_has_blocks_of_its_own_for_each_stream():
    batch, rows = passes.decode_batch(SMOKE, Row(3, 40))
    (metadata,) = batch.attention
    assert sorted(metadata.block_table.ravel().tolist()) == list(range(1, 10))
    assert metadata.positions().tolist() == batch.positions.tolist() == [39] * 3
    assert [metadata.slots(i, 39, 40).item() for i in range(3)] == metadata.slot_mapping.tolist()
    assert rows.tolist() == [0, 1, 2]


def test_what_was_not_measured_is_called_so():
    lines = list(report.lines(FULL, {"shape": "8B"}))
    rows = [line for line in lines if line.startswith("| 64 | 1024")]
    assert rows == ["| 64 | 1024 | unmeasured | 6.90 | unmeasured | unmeasured | unmeasured |"]


def test_the_price_of_batch_invariance_stands_beside_the_default():
    found = [{"ms": 3.0, "same_bits": True}, {"ms": 5.0, "same_bits": False}]
    usual = [{"ms": 2.0}, {"ms": 4.0}]
    results = {
        "invariant": {"decode": found, "prefill": [{"ms": 8.0, "same_bits": True}]},
        "passes": {"computing": "kernels", "decode": usual, "prefill": [{"ms": 8.0}]},
    }
    lines = list(report.lines(SMOKE, results))
    first = lines.index("| batch invariant | ms | beside the default | same bits |") + 2
    assert lines[first : first + 3] == [
        "| 1 x 64 | 3.00 | 1.50x | yes |",
        "| 4 x 64 | 5.00 | 1.25x | NO |",
        "| prompt of 64 | 8.00 | 1.00x | yes |",
    ]
    assert "| prompt of 64 | unmeasured | unmeasured | unmeasured |" in report.lines(SMOKE, {})


def test_a_phase_that_failed_is_told_and_its_figures_are_unmeasured():
    lines = list(report.lines(SMOKE, {"device": "CPU", "passes": {"error": "not within 150 s"}}))
    assert lines[-1] == "Phase passes failed: not within 150 s"
    assert "Computing with: unmeasured." in lines
