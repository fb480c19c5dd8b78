"""The file of a run: what is read from it while others write, and of a process that was killed."""

from pathlib import Path

import pytest

from tests.device.records import FILE, TAIL_BYTES, RecordFile, RecordReader, read, tail


def test_a_record_is_read_once_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / FILE
    reader = RecordReader(path)
    assert reader.new() == []
    path.write_bytes(b'{"kind": "row", "phase": "a"')
    assert reader.new() == []
    with path.open("ab") as file:
        file.write(b', "row": "b", "found": {}}\n')
    assert reader.new() == [{"kind": "row", "phase": "a", "row": "b", "found": {}}]
    assert reader.new() == []


def test_half_a_line_of_a_killed_process_loses_no_other(tmp_path: Path) -> None:
    path = tmp_path / FILE
    path.write_bytes(b'{"kind": "row", "pha')
    file = RecordFile(path)
    file.write("row", "kernels", "one", found={"ms": 1.0})
    file.close()
    assert read(path).found == {("kernels", "one"): {"ms": 1.0}}


def test_a_row_that_is_run_again_counts_by_its_last_record(tmp_path: Path) -> None:
    file = RecordFile(tmp_path / FILE)
    file.write("error", "passes", "build model", error="made to fail")
    file.write("row", "passes", "build model", found={})
    results = read(tmp_path / FILE)
    assert not results.errors
    assert results.of("passes") == {"build model": {}}


def test_values_that_json_cannot_hold_are_refused(tmp_path: Path) -> None:
    file = RecordFile(tmp_path / FILE)
    with pytest.raises(TypeError):
        file.write("row", "passes", "one", found={"tensor": object()})
    assert read(tmp_path / FILE).found == {}


def test_of_long_output_the_end_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert tail(path) == ""
    path.write_bytes(b"first" + b"x" * TAIL_BYTES + b"last")
    assert len(tail(path)) == TAIL_BYTES
    assert tail(path).endswith("xlast")
