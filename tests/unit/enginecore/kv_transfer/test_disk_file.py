"""A file of blocks returns the stored blocks, or reports that it cannot; it never returns other data."""

import os
from pathlib import Path

import pytest

from penstock_common.errors import ConfigError
from penstock_common.types.kv_transfer import BlockName
from penstock_enginecore.kv_transfer.disk_file import FILE_NAME, DiskFile

BLOCK = 5000
STRIDE = 8192
SIZE = 4096 + 4 * STRIDE
FINGERPRINT = bytes(range(16))


def name(number: int) -> BlockName:
    return BlockName(number % 3, bytes([number]) * 16)


def content(number: int) -> bytes:
    return bytes((number + i) % 251 for i in range(BLOCK))


def opened(path: Path, *, fingerprint: bytes = FINGERPRINT, size: int = SIZE, block_bytes: int = BLOCK) -> DiskFile:
    return DiskFile(path, size, block_bytes, fingerprint)


@pytest.fixture
def disk(tmp_path: Path):
    disk = opened(tmp_path / "cache")
    yield disk
    disk.close()


def filled(path: Path, *numbers: int) -> None:
    disk = opened(path)
    for slot, number in enumerate(numbers):
        disk.write(slot, name(number), content(number)).result(timeout=30)
    disk.close()


def test_blocks_come_back_by_slot_and_name(disk):
    assert (disk.num_slots, list(disk.entries)) == (4, [])
    for slot in range(3):
        disk.write(slot, name(slot), content(slot)).result(timeout=30)
    disk.write(1, name(9), content(9)).result(timeout=30)
    read = disk.read([(0, name(0)), (1, name(1)), (1, name(9)), (3, name(3))]).result(timeout=30)
    assert [None if each is None else bytes(each) for each in read] == [content(0), None, content(9), None]


def test_the_file_is_as_large_as_it_gets_from_the_start(disk, tmp_path):
    stat = (tmp_path / "cache" / FILE_NAME).stat()
    assert stat.st_size == SIZE
    assert stat.st_blocks * 512 >= SIZE
    assert stat.st_mode & 0o077 == 0


def test_the_next_engine_finds_what_was_written(tmp_path):
    filled(tmp_path, 1, 2, 3)
    disk = opened(tmp_path)
    assert sorted(disk.entries) == [(0, name(1)), (1, name(2)), (2, name(3))]
    assert bytes(disk.read([(1, name(2))]).result(timeout=30)[0]) == content(2)
    disk.close()


@pytest.mark.parametrize(
    "other",
    [{"fingerprint": bytes(16)}, {"fingerprint": b""}, {"size": SIZE + STRIDE}, {"block_bytes": BLOCK - 1}],
)
def test_another_engine_finds_nothing_and_leaves_nothing(other, tmp_path):
    filled(tmp_path, 1, 2, 3)
    disk = opened(tmp_path, **other)
    assert list(disk.entries) == []
    disk.close()
    disk = opened(tmp_path)
    assert list(disk.entries) == []
    disk.close()


def test_nothing_is_found_behind_a_clear(tmp_path):
    disk = opened(tmp_path)
    disk.write(0, name(1), content(1)).result(timeout=30)
    late = disk.write(1, name(2), content(2))
    disk.clear()
    late.result(timeout=30)
    disk.write(2, name(3), content(3)).result(timeout=30)
    assert [each is None for each in disk.read([(0, name(1)), (1, name(2)), (2, name(3))]).result(timeout=30)] == [
        True,
        True,
        False,
    ]
    disk.close()
    disk = opened(tmp_path)
    assert list(disk.entries) == [(2, name(3))]
    disk.close()


@pytest.mark.parametrize("place", [0, 9, 30, 60, 70, BLOCK // 2, BLOCK + 60])
def test_a_flipped_bit_is_seen(place, tmp_path):
    filled(tmp_path, 1)
    path = tmp_path / FILE_NAME
    data = bytearray(path.read_bytes())
    data[4096 + place] ^= 1
    path.write_bytes(data)
    disk = opened(tmp_path)
    (read,) = disk.read([(0, name(1))]).result(timeout=30)
    assert read is None
    disk.close()


def test_a_file_that_is_cut_off_or_is_something_else_counts_as_empty(tmp_path):
    filled(tmp_path, 1, 2)
    path = tmp_path / FILE_NAME
    os.truncate(path, 4096 + STRIDE + 100)
    disk = opened(tmp_path)
    assert list(disk.entries) == [(0, name(1)), (1, name(2))]
    read = disk.read([(0, name(1)), (1, name(2)), (3, name(4))]).result(timeout=30)
    assert [each is None for each in read] == [False, True, True]
    disk.close()
    path.write_bytes(b"not blocks" * 1000)
    disk = opened(tmp_path)
    assert list(disk.entries) == []
    disk.close()


def test_a_directory_belongs_to_one_engine(disk, tmp_path):
    with pytest.raises(ConfigError, match="cache.disk is .*another engine uses"):
        opened(tmp_path / "cache")
    disk.close()
    opened(tmp_path / "cache").close()


def test_a_directory_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cache.disk is '.*file', but the directory cannot be written"):
        opened(tmp_path / "file")


def test_a_size_that_no_block_fits_in_is_named():
    with pytest.raises(ConfigError, match="cache.disk_size is 5000 bytes, but a KV block takes 8192"):
        opened(Path("unused"), size=5000)


def test_a_disk_without_room_is_named_and_left_empty(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match=r"cache.disk_size is \d+ bytes, but .* has too little free space"):
        opened(tmp_path)
    assert (tmp_path / FILE_NAME).stat().st_size == 0


def test_a_write_that_fails_says_so(disk):
    with pytest.raises(OSError, match="5 bytes"):
        disk.write(0, name(1), b"short").result(timeout=30)


def test_a_link_in_place_of_the_file_is_not_followed(tmp_path):
    (tmp_path / "target").write_text("of others")
    (tmp_path / FILE_NAME).symlink_to(tmp_path / "target")
    with pytest.raises(ConfigError, match=r"cache.disk is .* cannot be written: .*symbolic link"):
        opened(tmp_path)
    assert (tmp_path / "target").read_text() == "of others"


def test_a_pipe_in_place_of_the_file_is_named(tmp_path):
    os.mkfifo(tmp_path / FILE_NAME)
    with pytest.raises(ConfigError, match=r"cache.disk is .* the path is not a regular file, but a pipe or a device"):
        opened(tmp_path)


def test_a_file_that_others_could_read_becomes_private(tmp_path):
    filled(tmp_path, 3)
    (tmp_path / FILE_NAME).chmod(0o666)
    disk = opened(tmp_path)
    disk.close()
    assert (tmp_path / FILE_NAME).stat().st_mode & 0o777 == 0o600
    assert list(disk.entries) == [(0, name(3))]
