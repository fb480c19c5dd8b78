"""The joined log of several processes."""

import io

import pytest

from penstock_local.console import JoinedLog


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Closed(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_prefixes_line_up() -> None:
    stream = io.StringIO()
    log = JoinedLog(["coordinator", "engine-0"], stream=stream, on_closed=lambda: None)
    log.write("engine-0", "loading")
    log.write("coordinator", "up")
    assert stream.getvalue() == "engine-0    | loading\ncoordinator | up\n"


def test_services_have_different_colors_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = Terminal()
    log = JoinedLog(["a", "b"], stream=stream, on_closed=lambda: None)
    log.write("a", "x")
    log.write("b", "x")
    first, second = stream.getvalue().splitlines()
    assert first.startswith("\x1b[36ma |")
    assert second.startswith("\x1b[32mb |")


def test_no_color_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    JoinedLog(["a"], stream=stream, on_closed=lambda: None).write("a", "x")
    assert stream.getvalue() == "a | x\n"


def test_a_muted_log_drops_lines() -> None:
    stream = io.StringIO()
    log = JoinedLog(["a"], stream=stream, on_closed=lambda: None)
    log.muted = True
    log.write("a", "x")
    assert stream.getvalue() == ""


def test_a_closed_stream_is_told_once_and_never_written_again() -> None:
    told: list[None] = []
    log = JoinedLog(["a"], stream=Closed(), on_closed=lambda: told.append(None))
    log.write("a", "x")
    log.write("a", "y")
    assert len(told) == 1
