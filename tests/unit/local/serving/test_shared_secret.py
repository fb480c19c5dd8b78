"""The file of the secret that engines of one command share."""

import stat
from pathlib import Path

import pytest

from penstock_common.security.shared_secret import load_secret
from penstock_local.serving.serve import secret_file


def test_the_file_is_of_this_user_alone_and_goes_at_the_end(capfd: pytest.CaptureFixture[str]) -> None:
    with secret_file(wanted=True) as path:
        assert stat.S_IMODE(Path(path).stat().st_mode) == 0o600
        assert stat.S_IMODE(Path(path).parent.stat().st_mode) == 0o700
        assert load_secret(path) is not None
        with secret_file(wanted=True) as other:
            assert Path(other).read_text() != Path(path).read_text()
    assert not Path(path).parent.exists()
    assert "secret" not in "".join(capfd.readouterr())


def test_the_file_goes_when_the_command_fails_too() -> None:
    paths = []

    def fail() -> None:
        with secret_file(wanted=True) as path:
            paths.append(Path(path))
            raise RuntimeError("a service died")

    with pytest.raises(RuntimeError):
        fail()
    assert not paths[0].parent.exists()


def test_where_none_is_wanted_there_is_no_file() -> None:
    with secret_file(wanted=False) as path:
        assert path == ""
