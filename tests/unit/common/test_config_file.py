"""Reactions of a service to changes of its config file."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import yaml
from structlog.testing import capture_logs

from penstock_common import config_file as module
from penstock_common.config.loader import from_command_line
from penstock_common.config_file import ConfigFile
from penstock_common.errors import ConfigError
from penstock_frontend.config import FrontendConfig

BASE: dict[str, Any] = {"model": {"path": "m"}, "engines": ["e:1"]}


class File:
    """A config file on disk, and a service that follows it."""

    def __init__(self, path: Path, *flags: str) -> None:
        self.path = path
        self.write()
        source = from_command_line(FrontendConfig, prog="p", description="", argv=["--config", str(path), *flags])
        self.config_file = ConfigFile(source)
        self.applied: list[FrontendConfig] = []

    def write(self, **changes: Any) -> None:
        self.path.write_text(yaml.safe_dump(BASE | changes))

    async def look(self, times: int = 1) -> list[Any]:
        """Look at the file ``times`` times. Returns, for each log line, its level and its settings or else its event."""
        with capture_logs() as logs:
            for _ in range(times):
                await self.config_file.look(self.applied.append)
        return [(line["log_level"], line.get("settings", line["event"])) for line in logs]


@pytest.fixture
def file(tmp_path: Path) -> File:
    return File(tmp_path / "config.yaml")


async def test_changed_settings_are_applied_once_and_logged(file: File) -> None:
    assert await file.look(2) == []
    file.write(limits={"max_n": 7}, log={"level": "debug"})
    assert await file.look(3) == [("info", "config: read the changed file"), ("info", ["limits.max_n", "log.level"])]
    [config] = file.applied
    assert (config.limits.max_n, config.log.level) == (7, "debug")
    assert file.config_file.running == config


async def test_settings_that_need_a_restart_are_logged_once_and_others_apply(file: File) -> None:
    file.write(tokenizer_threads=5, limits={"max_n": 7})
    told = await file.look(3)
    assert told[1:] == [("info", ["limits.max_n"]), ("warning", ["tokenizer_threads"])]
    assert file.applied[0].tokenizer_threads == file.config_file.running.tokenizer_threads == 2
    file.write(tokenizer_threads=5, limits={"max_n": 8})
    assert (await file.look(2))[1:] == [("info", ["limits.max_n"])], "that a restart is needed was said"
    file.write(tokenizer_threads=6, limits={"max_n": 8})
    assert (await file.look(2))[1:] == [("warning", ["tokenizer_threads"])]
    file.write(limits={"max_n": 8})
    assert (await file.look())[1:] == [], "as it runs"
    file.write(tokenizer_threads=6, limits={"max_n": 8})
    assert (await file.look())[1:] == [("warning", ["tokenizer_threads"])]


async def test_a_file_that_cannot_be_used_changes_nothing(file: File) -> None:
    before = file.config_file.running
    file.write(limits={"max_n": 0}, log={"level": "debug"})
    told = await file.look(3)
    assert [level for level, _ in told] == ["error"]
    file.path.unlink()
    assert [level for level, _ in await file.look(2)] == ["error"]
    assert (file.config_file.running, file.applied) == (before, [])
    file.write(log={"level": "debug"})
    assert (await file.look())[-1] == ("info", ["log.level"])


async def test_flags_and_environment_stand_above_the_new_file_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_LIMITS__MAX_N", "3")
    file = File(tmp_path / "config.yaml", "--log.level=error")
    file.write(log={"level": "debug", "requests": True}, limits={"max_n": 7})
    assert (await file.look())[1:] == [("info", ["log.requests"])]
    assert (file.applied[0].log.level, file.applied[0].limits.max_n) == ("error", 3)


async def test_the_first_file_has_to_be_one_that_can_be_used(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("modle: {}")
    source = from_command_line(
        FrontendConfig, prog="p", description="", argv=["--config", str(tmp_path / "config.yaml")]
    )
    with pytest.raises(ConfigError, match="there is no setting 'modle'"):
        ConfigFile(source)


async def test_without_a_file_there_is_nothing_to_follow() -> None:
    source = from_command_line(FrontendConfig, prog="p", description="", argv=["--model.path=m", "--engines=[e:1]"])
    config_file = ConfigFile(source)
    assert config_file.running.model.path == "m"
    await config_file.follow(lambda config: None)


async def test_an_error_while_applying_ends_neither_the_service_nor_the_watch(
    file: File, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOOK_INTERVAL", 0.01)
    seen: asyncio.Queue[FrontendConfig] = asyncio.Queue()

    def apply(config: FrontendConfig) -> None:
        seen.put_nowait(config)
        if config.limits.max_n == 7:
            raise ZeroDivisionError

    async with file.config_file.followed(apply):
        file.write(limits={"max_n": 7})
        assert (await seen.get()).limits.max_n == 7
        file.write(limits={"max_n": 8})
        assert (await seen.get()).limits.max_n == 8
    file.write(limits={"max_n": 9})
    assert seen.empty()
