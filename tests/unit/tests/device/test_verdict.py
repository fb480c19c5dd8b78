"""The last line of a run on a device, and its exit status."""

import pytest

from tests.device.records import Results
from tests.device.verdict import row_line, verdict

FAST = {"ms": 1.0, "computing": "fused decoder, Triton sampler", "not_replayed": ""}


def results(**found: dict[str, object]) -> Results:
    return Results(found={("passes", row): values for row, values in found.items()})


def test_rows_of_the_fused_decoder_and_its_graphs_are_fine() -> None:
    assert verdict(results(one=FAST, copy={"rate": 1.0}), cpu=False) == (0, "OK: 2 rows")


@pytest.mark.parametrize(
    ("slow", "words"),
    [
        (
            {"computing": "Triton attention in graphs"},
            "computed by Triton attention in graphs, not by the fused decoder",
        ),
        ({"not_replayed": "3 steps were launched piece by piece"}, "graphs were not used: 3 steps were launched"),
    ],
    ids=["modules", "launched"],
)
def test_a_gpu_that_computes_another_way_fails_the_run(slow: dict[str, object], words: str) -> None:
    status, line = verdict(results(one=FAST, two=FAST | slow), cpu=False)
    assert status == 1
    assert line.startswith("FAILED: the fused decoder or its graphs were not used in 1 rows, first passes: two: ")
    assert words in line
    assert verdict(results(one=FAST, two=FAST | slow), cpu=True) == (0, "OK: 2 rows")


def test_failed_rows_and_those_that_were_not_run_fail_the_run() -> None:
    found = results(one={"ok": False}, two={"ok": True})
    found.errors["lora", "step"] = {"error": "not within 30 s"}
    found.unrun["peers", "transformers"] = "the budget was over"
    assert verdict(found, cpu=False) == (
        1,
        "FAILED: 2 rows failed: lora: step, passes: one; 1 rows were not run: the budget was over",
    )


def test_a_run_without_rows_fails() -> None:
    assert verdict(Results(), cpu=True) == (1, "FAILED: no row was run")


def test_a_row_is_one_line_with_its_values_or_its_error() -> None:
    record = {"kind": "row", "phase": "passes", "row": "decode 1 x 64", "seconds": 1.25, "found": {"ms": 3.14159265}}
    assert row_line(record) == "ok   passes: decode 1 x 64                 1.2 s  {ms: 3.142}"
    told = {"kind": "row", "phase": "passes", "row": "build model", "found": {"computing": "fused decoder"}}
    assert row_line(told).endswith("{computing: fused decoder}")
    failed = {"kind": "error", "phase": "lora", "row": "step", "error": "first\nsecond"}
    assert row_line(failed) == "FAIL lora: step                            0.0 s  first second"
    wrong = {"kind": "row", "phase": "checks", "row": "draws", "found": {"ok": False, "says": "0.1"}}
    assert row_line(wrong).startswith("FAIL checks: draws")
