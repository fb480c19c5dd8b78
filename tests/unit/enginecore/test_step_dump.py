"""Files of failed steps."""

import json

import pytest

from penstock_enginecore.config import ErrorDumpConfig
from penstock_enginecore.core.steps_in_flight import EngineDeadError
from tests.fakes.engines.engine_harness import (
    add,
    make_engine,
    make_request,
)
from tests.fakes.engines.fake_executor import FakeExecutor


@pytest.mark.parametrize("include_tokens", [False, True])
def test_a_failed_step_can_be_kept_in_a_file(tmp_path, include_tokens):
    config = ErrorDumpConfig(directory=str(tmp_path / "dumps"), include_tokens=include_tokens)
    engine = make_engine(FakeExecutor(fail_at_step=0, vocab_size=10**6), error_dump=config)
    add(engine, make_request([777777, 888888], request_id="victim"))
    with pytest.raises(EngineDeadError):
        engine.step(lambda: None)
    [file] = (tmp_path / "dumps").iterdir()
    dump = json.loads(file.read_text())
    assert "the fake device is gone" in dump["error"]
    assert dump["stats"]["num_running_reqs"] == 1
    assert dump["scheduler_output"]["new"][0]["num_prompt_tokens"] == 2
    assert ("777777" in file.read_text()) == include_tokens
    assert file.stat().st_mode & 0o077 == 0


def test_a_dump_that_cannot_be_written_does_not_hide_the_failure(tmp_path, caplog):
    (tmp_path / "file").touch()
    config = ErrorDumpConfig(directory=str(tmp_path / "file"))
    engine = make_engine(FakeExecutor(fail_at_step=0), error_dump=config)
    add(engine, make_request())
    with pytest.raises(EngineDeadError, match="the fake device is gone"):
        engine.step(lambda: None)
    assert "cannot be written" in caplog.text
