"""Values made of files that change under a running service."""

import os
from pathlib import Path

import pytest

from penstock_common.errors import ConfigError
from penstock_common.security.reloaded_files import WatchedFiles, read_bytes


def number_in(path: Path) -> int:
    text = read_bytes(str(path), field="numbers.file")
    if not text.isdigit():
        raise ConfigError(f"numbers.file: {path} is no number")
    return int(text)


def watched(path: Path) -> WatchedFiles[int]:
    return WatchedFiles([str(path)], lambda: number_in(path), what="numbers")


def age(path: Path) -> None:
    """Set a file's time to long ago."""
    os.utime(path, (1_000_000_000, 1_000_000_000))


def test_a_file_is_read_again_when_it_is_replaced_or_written_in_place(tmp_path: Path) -> None:
    file = tmp_path / "n"
    file.write_text("1")
    age(file)
    value = watched(file)
    file.write_text("2")
    assert value.current() == 2
    file.write_text("3")  # same size, and same modification time if the file system's clock has not advanced
    assert value.current() == 3
    other = tmp_path / "other"
    other.write_text("4")
    age(other)
    other.replace(file)
    assert value.current() == 4


def test_an_untouched_file_is_not_read_again(tmp_path: Path) -> None:
    file = tmp_path / "n"
    file.write_text("1")
    age(file)
    reads: list[int] = []
    value = WatchedFiles([str(file)], lambda: reads.append(1), what="numbers")
    for _ in range(5):
        value.current()
    assert len(reads) == 1


def test_a_swapped_link_counts_as_kubernetes_makes_them(tmp_path: Path) -> None:
    for number in (1, 2):
        version = tmp_path / f"..v{number}"
        version.mkdir()
        (version / "n").write_text(str(number))
        age(version / "n")
    (tmp_path / "..data").symlink_to("..v1")
    (tmp_path / "n").symlink_to("..data/n")
    value = watched(tmp_path / "n")
    assert value.current() == 1
    (tmp_path / "..data_tmp").symlink_to("..v2")
    (tmp_path / "..data_tmp").replace(tmp_path / "..data")
    assert value.current() == 2


def test_an_unusable_file_keeps_the_old_value_and_is_logged_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "n"
    file.write_text("1")
    value = watched(file)
    file.write_text("half")
    assert [value.current() for _ in range(3)] == [1, 1, 1]
    file.unlink()
    assert [value.current() for _ in range(3)] == [1, 1, 1]
    file.write_text("2")
    assert value.current() == 2
    captured = capsys.readouterr()
    log = captured.out + captured.err
    assert log.count("is no number") == 1
    assert log.count("No such file") == 1
    assert log.count("the changed file cannot be used") == 2
    assert log.count(": read the changed file") == 1


def test_an_unusable_file_at_the_start_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"numbers.file: .*/n cannot be read: No such file"):
        watched(tmp_path / "n")


def test_what_becomes_usable_by_itself_is_used(tmp_path: Path) -> None:
    file = tmp_path / "n"
    file.write_text("1")
    age(file)
    too_early = False

    def read() -> int:
        if too_early:
            raise ConfigError("its time has not begun")
        return number_in(file)

    value = WatchedFiles([str(file)], read, what="numbers")
    too_early = True
    file.write_text("22")
    age(file)
    assert value.current() == 1
    too_early = False
    value._try_again_at = 0.0  # a second later
    assert value.current() == 22
