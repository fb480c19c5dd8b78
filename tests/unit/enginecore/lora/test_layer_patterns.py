"""Hostile expressions of adapters take neither the memory nor the time of the process that reads them."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock_enginecore.lora import layer_patterns
from penstock_enginecore.lora.errors import LoraError, LoraReason
from penstock_enginecore.lora.layer_patterns import Patterns, choose_layers
from tests.unit.enginecore.lora.test_layer_choice import NAMES, config_of

IN_LITTLE_MEMORY = """
import resource, sys
from pathlib import Path
from penstock_enginecore.lora.errors import LoraError
from penstock_enginecore.lora.layer_patterns import Patterns
pages = int(Path("/proc/self/statm").read_text().split()[0])
limit = pages * resource.getpagesize() + (128 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    print(Patterns("f").full("target_modules", sys.argv[1], "model.layers.0.self_attn.q_proj"))
except LoraError as e:
    print(e)
"""
"""A program that matches its argument, and may use 128 MiB more memory than at its start."""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Return the list of jobs of started processes."""
    jobs: list[bytes] = []
    run = layer_patterns.run_script

    def record(file: Path, given: bytes, timeout: float) -> "subprocess.CompletedProcess[bytes]":
        jobs.append(given)
        return run(file, given, timeout)

    monkeypatch.setattr(layer_patterns, "run_script", record)
    return jobs


@pytest.mark.slow
@pytest.mark.parametrize(
    "pattern",
    [
        "(?:(?:a|b){1000}){1000}",
        "(?:(?:(?:a|b){1000}){1000}){1000}",
        "(?:a?){30000000}.*",
        "(?=(?:(?:.?){1000}){30000,}).*",
        "(?i)(?:[^\u0100-\U0010ffff]{0,65000}){60000}",
    ],
)
def test_an_expression_takes_no_memory_of_the_engine(pattern: str) -> None:
    ran = subprocess.run([sys.executable, "-c", IN_LITTLE_MEMORY, pattern], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "False" in ran.stdout or "too much memory" in ran.stdout or "too long" in ran.stdout


def test_an_expression_that_takes_memory_is_refused() -> None:
    with pytest.raises(
        LoraError, match="target_modules: matching the expression takes too much memory.*at most 64 MiB"
    ) as caught:
        Patterns("adapter_config.json").full("target_modules", "(?:a?){30000000}.*", NAMES[0])
    assert caught.value.reason == LoraReason.CONFIG


def test_time_ends_though_the_engine_ignores_and_blocks_its_signal() -> None:
    before = signal.signal(signal.SIGPROF, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGPROF])
    try:
        with pytest.raises(LoraError, match="takes too long"):
            Patterns("file").full("target_modules", r"(?:(?:\w|\.)+)+!", NAMES[0])
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
        signal.signal(signal.SIGPROF, before)


def test_one_process_answers_for_all_names_and_all_expressions_of_a_setting(started: list[bytes]) -> None:
    ranks = {rf"^{name}$": i + 1 for i, name in enumerate(NAMES)}
    config = config_of({"target_modules": r".*"}, rank_pattern=ranks)
    assert [layer.rank for layer in choose_layers(config, NAMES, ()).values()] == list(ranks.values())
    layers = {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": ["h", "lay.rs", "layers"]}
    assert list(choose_layers(config_of(layers), NAMES, ())) == ["model.layers.1.self_attn.q_proj"]
    assert len(started) == 3


def test_names_start_no_process(started: list[bytes]) -> None:
    config = config_of({"target_modules": ["q_proj", "up_proj"]}, rank_pattern={"q_proj": 3, "1.mlp.up_proj": 4})
    assert len(choose_layers(config, NAMES, ())) == 6
    assert not started


def test_an_expression_behind_one_that_fits_is_never_looked_at() -> None:
    found = choose_layers(config_of({"target_modules": r".*"}, rank_pattern={"[a-z0-9_.]+": 3, "[a": 4}), NAMES, ())
    assert {layer.rank for layer in found.values()} == {3}


@pytest.mark.parametrize(
    ("ended", "reason", "words"),
    [
        (-signal.SIGKILL, LoraReason.UNREADABLE, "did not answer: the process was ended by SIGKILL"),
        (-signal.SIGSEGV, LoraReason.CONFIG, "the process that matches the expression crashed .exit code -11"),
    ],
)
def test_a_process_that_ends_refuses_the_adapter_if_the_expression_is_to_blame(
    monkeypatch: pytest.MonkeyPatch, ended: int, reason: LoraReason, words: str
) -> None:
    result: Any = subprocess.CompletedProcess([], ended, b"")
    monkeypatch.setattr(layer_patterns, "run_script", lambda *_: result)
    with pytest.raises(LoraError, match=words) as caught:
        Patterns("file").full("target_modules", ".*", NAMES[0])
    assert caught.value.reason == reason


def test_a_process_that_cannot_start_says_nothing_against_the_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(layer_patterns, "run_script", fail)
    with pytest.raises(LoraError, match="did not answer.*temporarily unavailable") as caught:
        Patterns("file").full("target_modules", ".*", NAMES[0])
    assert caught.value.reason == LoraReason.UNREADABLE
