"""Segments of shared memory: created, read, refused, and always removed."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock_common.errors import FailedPrecondition, InvalidArgument, RequestFailed, ResourceExhausted
from penstock_common.tensors.shared_memory import (
    KEPT_FOR,
    PAUSE,
    UNREADABLE,
    Arena,
    ArenaReader,
    SegmentReader,
    SegmentRef,
    SegmentWriter,
    owner_of,
    remove_orphans,
    shared_memory_id,
)
from tests.fakes.engines.engine_harness import FakeClock


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def written(writer: SegmentWriter, data: bytes) -> SegmentRef:
    ref = writer.write(data)
    assert ref is not None
    return ref


def refusal(reader: SegmentReader, name: str, size: int, offset: int = 0) -> RequestFailed:
    with pytest.raises(RequestFailed) as error:
        reader.read(name, offset, size, field="mm_features[0].data[x].shared_memory")
    return error.value


def test_written_tensors_are_read_once(tmp_path: Path) -> None:
    writer, reader = SegmentWriter("f", root=tmp_path), SegmentReader("f", root=tmp_path)
    ref = written(writer, bytes(range(256)) * 1000)
    assert (tmp_path / ref.name).stat().st_mode & 0o777 == 0o600
    assert reader.read(ref.name, 0, ref.size, field="f") == bytes(range(256)) * 1000
    assert names(tmp_path) == [f"penstock-{owner_of('f')}.lock"]
    writer.close()
    assert names(tmp_path) == []


def test_bytes_may_begin_behind_an_offset(tmp_path: Path) -> None:
    ref = written(SegmentWriter("f", root=tmp_path), b"abcdef")
    assert SegmentReader("f", root=tmp_path).read(ref.name, 2, 4, field="f") == b"cdef"


@pytest.mark.parametrize(
    "name",
    [
        "",
        "..",
        "../etc/passwd",
        "/etc/passwd",
        f"penstock-{owner_of('f')}-1/../../x",
        f"penstock-{owner_of('f')}-1\n",
        f"penstock-{owner_of('f')}-",
        f"penstock-{owner_of('f')}.lock",
        f"penstock-{owner_of('other')}-1",
    ],
)
def test_names_that_are_not_of_the_session_are_refused_and_stay(tmp_path: Path, name: str) -> None:
    written(SegmentWriter("f", root=tmp_path), b"abc")
    written(SegmentWriter("other", root=tmp_path), b"abc")
    before = names(tmp_path)
    reader = SegmentReader("f", root=tmp_path)
    error = refusal(reader, name, 3)
    assert isinstance(error, InvalidArgument)
    assert "which is not a segment of this session" in error.message
    reader.discard(name)
    assert names(tmp_path) == before


@pytest.mark.parametrize(("offset", "size"), [(0, 2), (0, 4), (1, 3), (2**60, 3), (0, 0)])
def test_a_segment_of_another_size_is_refused_and_removed(tmp_path: Path, offset: int, size: int) -> None:
    ref = written(SegmentWriter("f", root=tmp_path), b"abc")
    error = refusal(SegmentReader("f", root=tmp_path), ref.name, size, offset)
    assert isinstance(error, InvalidArgument)
    assert f"the segment has 3 bytes; offset and size require {offset + size} bytes" in error.message
    assert ref.name not in names(tmp_path)


def test_a_segment_that_is_not_there_can_be_sent_otherwise(tmp_path: Path) -> None:
    error = refusal(SegmentReader("f", root=tmp_path), f"penstock-{owner_of('f')}-7", 3)
    assert isinstance(error, FailedPrecondition)
    assert error.reason == UNREADABLE


def test_links_are_not_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"abc")
    name = f"penstock-{owner_of('f')}-7"
    (tmp_path / name).symlink_to(secret)
    assert refusal(SegmentReader("f", root=tmp_path), name, 3).reason == UNREADABLE
    assert secret.exists()


def test_a_pipe_in_place_of_a_segment_is_refused_at_once(tmp_path: Path) -> None:
    name = f"penstock-{owner_of('f')}-7"
    os.mkfifo(tmp_path / name)
    assert "is not a regular file" in refusal(SegmentReader("f", root=tmp_path), name, 3).message


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_another_users_file_is_refused(tmp_path: Path) -> None:
    ref = written(SegmentWriter("f", root=tmp_path), b"abc")
    os.chown(tmp_path / ref.name, 12_345, 12_345)
    assert "belongs to another user" in refusal(SegmentReader("f", root=tmp_path), ref.name, 3).message


def test_reads_beyond_max_bytes_are_refused(tmp_path: Path) -> None:
    error = refusal(SegmentReader("f", root=tmp_path, max_bytes=10), f"penstock-{owner_of('f')}-7", 11)
    assert isinstance(error, ResourceExhausted)


def test_unread_tensors_are_bounded(tmp_path: Path) -> None:
    writer = SegmentWriter("f", root=tmp_path, max_bytes=10)
    first = written(writer, b"abcdef")
    assert writer.write(b"12345") is None
    SegmentReader("f", root=tmp_path).read(first.name, 0, 6, field="f")
    written(writer, b"12345")
    assert writer.num_bytes == 5


def test_unread_tensors_are_removed_in_the_end(tmp_path: Path) -> None:
    clock = FakeClock()
    writer = SegmentWriter("f", root=tmp_path, clock=clock)
    old = written(writer, b"old")
    clock.now += KEPT_FOR / 2
    new = written(writer, b"new")
    clock.now += KEPT_FOR / 2 + 1
    writer.remove_old()
    assert old.name not in names(tmp_path)
    assert new.name in names(tmp_path)
    assert writer.num_bytes == 3


def test_where_nothing_can_be_written_nothing_is_tried_for_a_while(tmp_path: Path) -> None:
    clock = FakeClock()
    writer = SegmentWriter("f", root=tmp_path / "missing", clock=clock)
    assert writer.write(b"abc") is None
    (tmp_path / "missing").mkdir()
    assert writer.broken
    assert writer.write(b"abc") is None
    clock.now += PAUSE + 1
    written(writer, b"abc")


def test_a_segment_that_cannot_be_filled_is_not_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int, data: memoryview) -> int:
        raise OSError(28, "No space left on device")

    writer = SegmentWriter("f", root=tmp_path)
    monkeypatch.setattr("penstock_common.tensors.shared_memory.os.write", full)
    assert writer.write(b"abc") is None
    assert names(tmp_path) == [f"penstock-{owner_of('f')}.lock"]
    assert writer.num_bytes == 0


def test_files_of_dead_processes_are_removed_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    living = SegmentWriter("living", root=tmp_path)
    kept = written(living, b"abc")
    (tmp_path / "somebody-elses").write_bytes(b"x")
    code = (
        "import os, pathlib\n"
        "from penstock_common.tensors.shared_memory import SegmentWriter\n"
        f"writer = SegmentWriter('dead', root=pathlib.Path({str(tmp_path)!r}))\n"
        "writer.write(b'abc'), writer.write(b'def')\n"
        "os._exit(9)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=False, env=os.environ)
    assert sum(owner_of("dead") in name for name in names(tmp_path)) == 3
    assert remove_orphans(tmp_path) == 2
    assert names(tmp_path) == sorted([kept.name, f"penstock-{owner_of('living')}.lock", "somebody-elses"])
    living.close()


def test_segments_without_a_lock_are_removed(tmp_path: Path) -> None:
    (tmp_path / f"penstock-{owner_of('x')}-3").write_bytes(b"abc")
    assert remove_orphans(tmp_path) == 1
    assert names(tmp_path) == []


def test_who_writes_first_removes_what_others_have_left(tmp_path: Path) -> None:
    (tmp_path / f"penstock-{owner_of('x')}-3").write_bytes(b"abc")
    written(SegmentWriter("f", root=tmp_path), b"abc")
    assert not any(owner_of("x") in name for name in names(tmp_path))


def test_the_memory_has_a_name_where_it_can_be_used(tmp_path: Path) -> None:
    assert shared_memory_id(tmp_path / "missing") == ""
    assert shared_memory_id(tmp_path) == shared_memory_id(tmp_path) != ""
    (tmp_path / "other").mkdir()
    assert shared_memory_id(tmp_path) != shared_memory_id(tmp_path / "other")


# Arenas of shared memory: tensors are written, read and refused, and no memory is left behind.


@pytest.fixture
def arena(tmp_path: Path) -> Arena:
    return Arena("a", size=1050, slot_bytes=100, root=tmp_path)


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
    os.close(arena._lock)  # like the system after the death of a process
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
    with pytest.raises(OSError, match="an arena of 99 bytes has no space for a slot of 100 bytes"):
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
    with pytest.raises(InvalidArgument, match="ends after 50 of 100 bytes"):
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
