"""Files from outside are read within limits, and never waited for."""

import io
import os
from pathlib import Path

import pytest

from penstock_common import files
from penstock_common.files import open_private, read_input, read_json, read_tensor_header, write_private


def test_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text('{"a": [1]}')
    (tmp_path / "link").symlink_to("file")
    assert read_json(tmp_path / "link") == {"a": [1]}


@pytest.mark.parametrize("kind", ["pipe", "directory", "device"])
def test_only_files_are_read(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(OSError, match="the path is not a regular file, but a directory, a pipe or a device"):
        read_input(path)


def test_a_link_to_itself_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="symbolic links"):
        read_input(tmp_path / "loop")


def test_a_large_file_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    os.truncate(tmp_path / "file", 1 << 40)
    with pytest.raises(ValueError, match=f"the file has {1 << 40} bytes; the limit is {files.MAX_SETTINGS_BYTES}"):
        read_input(tmp_path / "file")
    (tmp_path / "file").write_bytes(b"12345")
    os.truncate(tmp_path / "file", 5)
    assert read_input(tmp_path / "file", 5) == b"12345"
    with pytest.raises(ValueError, match="the file has 5 bytes; the limit is 4"):
        read_input(tmp_path / "file", 4)


@pytest.mark.parametrize("text", ["[" * (1 << 20), "[" * 65 + "0" + "]" * 65, '{"a":' * 500 + "0" + "}" * 500])
def test_json_without_bottom_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "file").write_text(text)
    with pytest.raises(ValueError, match="nested more than 64 levels deep"):
        read_json(tmp_path / "file")


def test_json_of_few_levels_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("[" * 64 + "0" + "]" * 64)
    assert read_json(tmp_path / "file")


def test_a_header_is_no_larger_than_its_format_allows() -> None:
    with pytest.raises(ValueError, match="the limit is 100000000"):
        read_tensor_header(io.BytesIO((1 << 40).to_bytes(8, "little")))
    assert read_tensor_header(io.BytesIO((2).to_bytes(8, "little") + b"{}")) == (2, {})
    with pytest.raises(ValueError, match="not a JSON object"):
        read_tensor_header(io.BytesIO((2).to_bytes(8, "little") + b"[]"))


# Files that services write for themselves are readable only by the service's user.


def test_a_new_file_is_private_whatever_the_mask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        os.close(open_private(tmp_path / "file"))
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600


def test_a_file_that_is_there_becomes_private_and_keeps_its_content(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("content")
    (tmp_path / "file").chmod(0o666)
    with os.fdopen(open_private(tmp_path / "file"), "r+b") as opened:
        assert opened.read() == b"content"
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600


def test_a_child_process_does_not_inherit_it(tmp_path: Path) -> None:
    descriptor = open_private(tmp_path / "file")
    assert not os.get_inheritable(descriptor)
    os.close(descriptor)


@pytest.mark.parametrize("target", ["there", "missing"])
def test_a_link_is_not_followed(tmp_path: Path, target: str) -> None:
    (tmp_path / "there").write_text("of others")
    (tmp_path / "link").symlink_to(tmp_path / target)
    with pytest.raises(OSError, match="symbolic link, which is not followed; remove the link.*link"):
        open_private(tmp_path / "link")
    assert (tmp_path / "there").read_text() == "of others"
    assert not (tmp_path / "missing").exists()


def test_a_link_among_the_directories_is_followed(tmp_path: Path) -> None:
    (tmp_path / "volume").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "volume")
    os.close(open_private(tmp_path / "link" / "file"))
    assert (tmp_path / "volume" / "file").is_file()


def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="the path is not a regular file, but a pipe or a device; remove it"):
        open_private(tmp_path / "pipe")


def test_a_file_of_two_names_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("of others")
    (tmp_path / "other").hardlink_to(tmp_path / "file")
    with pytest.raises(OSError, match="the file has 2 names"):
        open_private(tmp_path / "other")


def test_a_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(OSError, match=f"belongs to user {os.getuid()}, and this process runs as user 12345"):
        open_private(tmp_path / "file")


def test_a_written_file_replaces_none(tmp_path: Path) -> None:
    write_private(tmp_path / "file", b"one")
    with pytest.raises(FileExistsError):
        write_private(tmp_path / "file", b"two")
    assert (tmp_path / "file").read_bytes() == b"one"
