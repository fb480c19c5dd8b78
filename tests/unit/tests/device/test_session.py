"""Runs of phases whose rows fail, hang, die or talk: every other row is in the file."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.device.phases import Phase, Settings
from tests.device.records import FILE, Results, read
from tests.device.session import Options, Session
from tests.fakes.device_phases import BROKEN, HANGING, PHASES

FIRST = [("first", f"row {i}") for i in range(4)] + [("first", "last")]
ROWS = [("host", "compile"), *FIRST, ("second", "one"), ("second", "two")] + [("apart", f"check {i}") for i in range(3)]


def run(
    folder: Path,
    faults: dict[str, str] | None = None,
    phases: Sequence[Phase] = PHASES,
    *,
    cpu: bool = True,
    **options: Any,
) -> Results:
    session = Session(phases, Settings("tiny", cpu, jobs=2), Options(out=folder, faults=faults or {}, **options))
    found = session.run()
    assert read(folder / FILE) == found
    return found


def measured(results: Results) -> list[tuple[str, str]]:
    return [key for key in results.found if not key[1].startswith(("build", "close"))]


def test_a_row_that_raises_keeps_its_traceback_and_output(tmp_path: Path) -> None:
    results = run(tmp_path, {"first/row 1": "raise", "first/row 0": "print"})
    assert sorted(measured(results)) == sorted(set(ROWS) - {("first", "row 1")})
    error = results.errors["first", "row 1"]
    assert error["error"] == "RuntimeError: made to fail"
    assert "faults.py" in error["traceback"]
    assert "and one on stderr" in error["stderr"]
    assert len({results.found[key]["pid"] for key in FIRST if key in results.found}) == 1


def test_a_row_that_hangs_is_killed_and_the_rest_goes_on_in_a_fresh_process(tmp_path: Path) -> None:
    results = run(tmp_path, phases=[HANGING, *PHASES])
    assert sorted(measured(results)) == sorted([*ROWS, ("hanging", "before"), ("hanging", "behind")])
    error = results.errors["hanging", "hangs"]
    assert error["error"] == "not within 1 s"
    assert "_hang" in error["stderr"], "the stack of the thread that hung"
    assert results.found["hanging", "before"]["pid"] != results.found["hanging", "behind"]["pid"]


def test_a_process_that_a_signal_kills_is_followed_by_another(tmp_path: Path) -> None:
    results = run(tmp_path, {"first/row 2": "die", "apart/check 1": "die"})
    assert sorted(measured(results)) == sorted(set(ROWS) - {("first", "row 2"), ("apart", "check 1")})
    assert results.errors["first", "row 2"]["error"] == "killed by SIGSEGV"
    assert results.errors["apart", "check 1"]["error"] == "killed by SIGSEGV"
    assert results.found["first", "row 1"]["pid"] != results.found["first", "row 3"]["pid"]


def test_an_error_that_poisons_the_device_is_followed_by_a_fresh_process(tmp_path: Path) -> None:
    results = run(tmp_path, {"first/row 1": "poison"})
    assert sorted(measured(results)) == sorted(set(ROWS) - {("first", "row 1")})
    assert results.errors["first", "row 1"]["poisoned"]
    pids = [results.found["first", f"row {i}"]["pid"] for i in (0, 2, 3)]
    assert pids[0] != pids[1] == pids[2]
    begun = [record for record in records(tmp_path) if record["kind"] == "begin"]
    assert [record["row"] for record in begun if record["phase"] == "first"].count("row 0") == 1


def test_rows_of_what_cannot_be_built_fail_and_other_stages_go_on(tmp_path: Path) -> None:
    for number, (fault, why) in enumerate(
        {"raise": "not built: RuntimeError: made to fail", "die": "not built: killed by SIGSEGV"}.items()
    ):
        results = run(tmp_path / str(number), {"first/build model": fault})
        assert results.errors["first", "row 0"]["error"] == results.errors["first", "row 3"]["error"] == why
        assert ("first", "last") in results.found


def test_a_phase_that_cannot_be_imported_is_told(tmp_path: Path) -> None:
    results = run(tmp_path, phases=[*PHASES, BROKEN])
    assert "not_there" in results.errors["broken", "import"]["error"]
    assert sorted(measured(results)) == sorted(ROWS)


def test_rows_that_the_budget_does_not_reach_are_listed(tmp_path: Path) -> None:
    seen: list[str] = []
    options = {"until": time.monotonic() + 3600.0}

    def end_behind_row_2(record: dict[str, Any]) -> None:
        seen.append(record["row"])
        if record["row"] == "row 2":
            object.__setattr__(session_options, "until", 0.0)

    session_options = Options(out=tmp_path, faults={"first/row 3": "hang"}, tell=end_behind_row_2, **options)
    results = Session(PHASES, Settings("tiny", True), session_options).run()
    assert ("first", "row 2") in results.found
    assert results.errors["first", "row 3"]["error"] == "the budget was over"
    assert results.unrun.keys() == {("first", "last"), ("second", "one"), ("second", "two")} | {
        ("apart", f"check {i}") for i in range(3)
    }
    assert set(results.unrun.values()) == {"the budget was over"}
    assert read(tmp_path / FILE) == results


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / FILE).read_text().splitlines() if line]
