"""Arenas of shared memory: what is put there, read, refused, and never left behind."""

import errno
import os
from pathlib import Path

import pytest

from penstock_common.errors import FailedPrecondition, InvalidArgument
from penstock_common.tensors.shared_memory import Arena, ArenaReader, SegmentWriter, remove_orphans


@pytest.fixture
def arena(tmp_path: Path) -> Arena:
    return Arena("a", size=1050, slot_bytes=100, root=tmp_path)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_what_is_put_is_read_as_often_as_one_likes(arena: Arena, tmp_path: Path) -> None:
    reader = ArenaReader("a", root=tmp_path)
    places = [(arena.put(bytes([i]) * (i + 1)), i) for i in range(10)]
    assert arena.put(b"") is None, "it has ten slots"
    assert arena.num_used == 10
    for offset, i in places * 2:
        assert offset is not None
        assert reader.read(arena.name, offset, i + 1, field="data") == bytes([i]) * (i + 1)
    arena.give_back(300)
    assert arena.put(b"again") == 300
    assert reader.read(arena.name, 300, 5, field="data") == b"again"


def test_its_size_is_taken_at_once(arena: Arena, tmp_path: Path) -> None:
    status = (tmp_path / arena.name).stat()
    assert status.st_size == 1000
    assert status.st_blocks * 512 >= 1000
    assert status.st_mode & 0o777 == 0o600


def test_closing_it_leaves_nothing(arena: Arena, tmp_path: Path) -> None:
    assert names(tmp_path) == sorted([arena.name, f"{arena.name.removesuffix('-0')}.lock"])
    assert remove_orphans(tmp_path) == 0, "its owner lives"
    arena.close()
    arena.close()
    assert names(tmp_path) == []


def test_one_without_an_owner_is_removed_by_who_starts_next(tmp_path: Path) -> None:
    arena = Arena("a", size=1000, slot_bytes=100, root=tmp_path)
    os.close(arena._lock)  # as the system does when a process has died
    arena._lock = -1
    assert remove_orphans(tmp_path) == 1
    assert names(tmp_path) == []


def test_the_segments_of_the_same_process_are_others(arena: Arena, tmp_path: Path) -> None:
    writer = SegmentWriter("a", root=tmp_path)
    ref = writer.write(b"x")
    writer.close()
    assert ref is not None
    assert names(tmp_path) == sorted([arena.name, f"{arena.name.removesuffix('-0')}.lock"])


def test_memory_that_cannot_be_had_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        Arena("a", size=1000, slot_bytes=100, root=tmp_path)
    assert names(tmp_path) == []


def test_less_than_a_slot_is_no_arena(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="99 bytes hold no slot of 100"):
        Arena("a", size=99, slot_bytes=100, root=tmp_path)
    assert names(tmp_path) == []


def test_more_than_a_slot_is_refused(arena: Arena) -> None:
    with pytest.raises(ValueError, match="101 bytes"):
        arena.put(b"x" * 101)
    assert arena.num_used == 0


@pytest.mark.parametrize("name", ["", "/etc/passwd", "../x", "penstock-" + "0" * 32 + "-0"])
def test_another_name_is_not_read(arena: Arena, tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidArgument, match="is not the arena"):
        ArenaReader("a", root=tmp_path).read(name, 0, 1, field="data")


def test_bytes_beyond_its_end_are_refused(arena: Arena, tmp_path: Path) -> None:
    reader = ArenaReader("a", root=tmp_path)
    with pytest.raises(InvalidArgument, match="ends behind 50 of 100 bytes"):
        reader.read(arena.name, 950, 100, field="data")


def test_one_that_is_gone_is_unreadable(arena: Arena, tmp_path: Path) -> None:
    arena.close()
    with pytest.raises(FailedPrecondition, match="cannot be read"):
        ArenaReader("a", root=tmp_path).read(arena.name, 0, 1, field="data")


def test_a_link_in_its_place_is_not_followed(arena: Arena, tmp_path: Path) -> None:
    (tmp_path / arena.name).unlink()
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / arena.name).symlink_to(tmp_path / "secret")
    with pytest.raises(FailedPrecondition, match="cannot be read"):
        ArenaReader("a", root=tmp_path).read(arena.name, 0, 1, field="data")
