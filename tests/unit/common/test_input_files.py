"""Files from outside are read within limits, and never waited for."""

import io
import os
from pathlib import Path

import pytest

from penstock_common import input_files
from penstock_common.input_files import read_input, read_json, read_tensor_header


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
    with pytest.raises(OSError, match="it is no file, but a directory, a pipe or a device"):
        read_input(path)


def test_a_link_to_itself_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="symbolic links"):
        read_input(tmp_path / "loop")


def test_a_large_file_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    os.truncate(tmp_path / "file", 1 << 40)
    with pytest.raises(ValueError, match=f"it has {1 << 40} bytes; the limit is {input_files.MAX_SETTINGS_BYTES}"):
        read_input(tmp_path / "file")
    (tmp_path / "file").write_bytes(b"12345")
    os.truncate(tmp_path / "file", 5)
    assert read_input(tmp_path / "file", 5) == b"12345"
    with pytest.raises(ValueError, match="it has 5 bytes; the limit is 4"):
        read_input(tmp_path / "file", 4)


@pytest.mark.parametrize("text", ["[" * (1 << 20), "[" * 65 + "0" + "]" * 65, '{"a":' * 500 + "0" + "}" * 500])
def test_json_without_bottom_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "file").write_text(text)
    with pytest.raises(ValueError, match="deeper than 64 levels"):
        read_json(tmp_path / "file")


def test_json_of_few_levels_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("[" * 64 + "0" + "]" * 64)
    assert read_json(tmp_path / "file")


def test_a_header_is_no_larger_than_its_format_allows() -> None:
    with pytest.raises(ValueError, match="the limit is 100000000"):
        read_tensor_header(io.BytesIO((1 << 40).to_bytes(8, "little")))
    assert read_tensor_header(io.BytesIO((2).to_bytes(8, "little") + b"{}")) == (2, {})
    with pytest.raises(ValueError, match="no JSON object"):
        read_tensor_header(io.BytesIO((2).to_bytes(8, "little") + b"[]"))
