"""The device of a worker, and the error if it is not the expected one."""

import logging
from pathlib import Path

import pytest
import torch

from penstock_common.errors import ConfigError
from penstock_enginecore.executor.device import prompt_batch_tokens, resolve_device, step_tokens


@pytest.fixture
def driver(tmp_path: Path) -> Path:
    """Create device files as on a machine with a GPU."""
    for name in ("nvidia0", "nvidiactl"):
        (tmp_path / name).touch()
    return tmp_path


def gpus(monkeypatch: pytest.MonkeyPatch, *, count: int, capability: tuple[int, int] = (9, 0)) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda rank: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda rank: "Tesla V100")


def fails(message: str) -> None:
    raise RuntimeError(message)


def test_each_rank_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, count=2)
    assert [str(resolve_device("auto", rank)) for rank in (0, 1)] == ["cuda:0", "cuda:1"]
    assert str(resolve_device("cpu", 1)) == "cpu"
    with pytest.raises(ConfigError, match="worker 2 has no device, but torch finds only 2 CUDA devices"):
        resolve_device("cuda", 2)


def test_workers_have_the_gpus_that_the_configuration_gives_them(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, count=4)
    assert [str(resolve_device("auto", worker, (3, 1))) for worker in (0, 1)] == ["cuda:3", "cuda:1"]
    assert str(resolve_device("cpu", 1, (3, 1))) == "cpu"
    message = "executor.devices assigns worker 1 to device 4, but torch finds only 4 CUDA devices, numbered from 0"
    with pytest.raises(ConfigError, match=message):
        resolve_device("cuda", 1, (0, 4))


def test_a_gpu_that_is_too_old_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    gpus(monkeypatch, count=1, capability=(7, 0))
    message = "Tesla V100 has compute capability 7.0, but at least 8.0 is required"
    with pytest.raises(ConfigError, match=message):
        resolve_device("cuda", 0, dev=tmp_path)
    with caplog.at_level(logging.WARNING):
        assert resolve_device("auto", 0, dev=tmp_path) == torch.device("cpu")
    assert message in caplog.text


@pytest.mark.parametrize(
    ("build", "visible", "said", "why"),
    [
        (None, None, "", "this torch was built without CUDA"),
        ("13.0", "", "", "CUDA_VISIBLE_DEVICES is ''"),
        ("13.0", "-1", "", "CUDA_VISIBLE_DEVICES is '-1'"),
        (
            "13.0",
            None,
            "The NVIDIA driver on your system is too old (found version 11040). Please update it",
            r"The NVIDIA driver on your system is too old \(found version 11040\); set",
        ),
    ],
    ids=["no build", "none visible", "none visible by number", "an old driver"],
)
def test_it_is_said_why_there_is_none(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    driver: Path,
    build: str | None,
    visible: str | None,
    said: str,
    why: str,
) -> None:
    gpus(monkeypatch, count=0)
    monkeypatch.setattr(torch.version, "cuda", build)
    monkeypatch.setattr(torch.cuda, "init", lambda: fails(said))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(ConfigError, match=f"torch finds no CUDA device: {why}"):
        resolve_device("cuda", 0, dev=driver)
    with caplog.at_level(logging.WARNING):
        assert resolve_device("auto", 0, dev=driver) == torch.device("cpu")
    assert "computing on the CPU, although the machine has a GPU" in caplog.text


def test_a_machine_without_a_gpu_is_no_reason_to_warn(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    gpus(monkeypatch, count=0)
    with caplog.at_level(logging.WARNING):
        assert resolve_device("auto", 0, dev=tmp_path) == torch.device("cpu")
    assert caplog.text == ""


def test_steps_on_cpus_are_smaller() -> None:
    assert step_tokens(torch.device("cpu")) == 512
    assert step_tokens(torch.device("cuda", 0)) == 2048
    assert prompt_batch_tokens(torch.device("cpu")) == 256
    assert prompt_batch_tokens(torch.device("cuda", 0)) == 0
