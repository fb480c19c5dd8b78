"""The serve command with the real services and the demo model."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest

from penstock_local.serving.machine_resources import free_ports
from tests.fakes.clients.command import PENSTOCK, Command, listening
from tests.fakes.patience import PATIENCE

MODEL = Path(__file__).resolve().parents[2] / "examples/demo_model/penstock-tiny"
QUESTION = "<|user|>What is 12 + 30?<|end|><|assistant|>"


class Server:
    """A running ``penstock serve`` and its public ports."""

    def __init__(self, command: Command, ports: list[int]) -> None:
        self.command = command
        self.ports = ports

    def generate(self, *arguments: str) -> subprocess.Popen[str]:
        """Run ``penstock generate`` against this server."""
        return subprocess.Popen(
            [*PENSTOCK, "generate", *arguments, "--address", f"localhost:{self.ports[0]}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )

    def text(self, *arguments: str) -> str:
        """Return the text that ``penstock generate`` writes. Fails if the command fails."""
        with self.generate(*arguments) as process:
            out, err = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, err
        return out


def start(engines: int) -> Iterator[Server]:
    assert (MODEL / "config.json").is_file(), f"the demo model is missing: {MODEL}"
    ports = free_ports(3)
    flags = ("--grpc-port", str(ports[0]), "--http-port", str(ports[1]), "--admin-port", str(ports[2]))
    with Command(
        "serve", str(MODEL), "--engines", str(engines), "--kv-cache-memory", "64MiB", "--device", "cpu", *flags
    ) as command:
        command.wait_for("Ctrl-C stops everything")
        yield Server(command, ports)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Yield a server with two engines for all tests of this module."""
    yield from start(engines=2)


@pytest.fixture
def own_server() -> Iterator[Server]:
    """Yield a server with one engine that the test may stop."""
    yield from start(engines=1)


def test_the_ready_block_says_what_is_served(server: Server) -> None:
    assert "model   penstock-tiny, 2 engines, up to 2048 tokens" in server.command.output


def test_the_log_says_what_each_service_loads_as_it_begins(server: Server) -> None:
    log = server.command.output
    for engine in ("engine-0", "engine-1"):
        phases = (
            "importing torch and transformers",
            "loading LlamaForCausalLM from .* as float32",
            r"loading weights: 38/38 tensors of 9\.5 MiB in 1 file",
            "preparing kernels and running a forward pass of one token",
            "KV cache: .* tokens",
        )
        in_order = ".*".join(rf"{engine} +\| \S+ \[info\] {phase} +seconds=[\d.]+" for phase in phases)
        assert re.search(in_order, log, re.DOTALL), log
        assert log.count(f"{engine} ") < 20
    assert re.search(r"frontend +\| \S+ \[info\] loading the tokenizer +model=.*penstock-tiny", log)


def test_greedy_generation_answers(server: Server) -> None:
    assert "42" in server.text(QUESTION, "--temperature", "0", "--max-tokens", "20")


def test_the_same_seed_gives_the_same_text(server: Server) -> None:
    flags = ("Once upon a time", "--temperature", "1", "--max-tokens", "30")
    first, again, other = (server.text(*flags, "--seed", seed) for seed in ("7", "7", "8"))
    assert first == again
    assert first != other


def test_a_stop_string_ends_the_text_before_it(server: Server) -> None:
    prompt = "<|user|>Count from 1 to 12.<|end|><|assistant|>"
    text = server.text(prompt, "--temperature", "0", "--max-tokens", "60", "--stop", "5")
    assert "4" in text
    assert "5" not in text


def test_a_schema_is_followed_by_a_model_that_knows_nothing_of_it(server: Server) -> None:
    schema = {
        "type": "object",
        "properties": {"animal": {"enum": ["fox", "bear"]}, "legs": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["animal", "legs"],
        "additionalProperties": False,
    }
    text = server.text("A fox has", "--json-schema", json.dumps(schema), "--temperature", "1", "--max-tokens", "60")
    jsonschema.validate(json.loads(text), schema)


def test_log_probabilities_of_several_sequences_come_with_their_tokens(server: Server) -> None:
    with server.generate("The", "--n", "2", "--logprobs", "2", "--seed", "1", "--max-tokens", "5") as process:
        _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    assert err.count("rank  likeliest") == 2
    assert "[2 outputs: 2 length" in err


def test_a_wrong_setting_is_refused_and_the_server_goes_on(server: Server) -> None:
    with server.generate(QUESTION, "--top-p", "7") as process:
        _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert "INVALID_ARGUMENT: sampling_params.top_p" in err
    assert server.text(QUESTION, "--temperature", "0", "--max-tokens", "20")


@pytest.mark.slow
def test_a_stop_lets_running_requests_finish_and_frees_the_ports(own_server: Server) -> None:
    with own_server.generate("Once upon a time", "--ignore-eos", "--max-tokens", "300") as process:
        assert process.stdout is not None
        assert process.stdout.read(1)
        own_server.command.process.terminate()
        assert own_server.command.wait_for_exit() == 0
        _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    assert "300 new tokens" in err
    assert [port for port in own_server.ports if listening(port)] == []


@pytest.mark.slow
def test_a_model_that_cannot_be_loaded_is_reported_by_the_engine(tmp_path: Path) -> None:
    checkpoint = shutil.copytree(MODEL, tmp_path / "model")
    (checkpoint / "config.json").write_text('{"model_type": "no-such-architecture"}')
    ports = [str(port) for port in free_ports(3)]
    flags = ("--grpc-port", ports[0], "--http-port", ports[1], "--admin-port", ports[2])
    with Command("serve", str(checkpoint), *flags) as command:
        assert command.wait_for_exit() == 1
        assert "exited with code" in command.output


def test_errors_in_a_models_files_are_reported_once_before_anything_starts(tmp_path: Path) -> None:
    checkpoint = shutil.copytree(MODEL, tmp_path / "model")
    (checkpoint / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    with Command("serve", str(checkpoint)) as command:
        assert command.wait_for_exit() == 2
        assert command.output.count("is a git-LFS pointer") == 1
        assert "starting" not in command.output


def test_the_demo_shows_everything_and_stops() -> None:
    assert (MODEL / "config.json").is_file(), f"the demo model is missing: {MODEL}"
    with Command("demo", str(MODEL)) as command:
        assert command.wait_for_exit() == 0, command.output
        assert "the same text" in command.output
        assert "8 concurrent requests on 2 engines" in command.output
        assert "coordinator stopped" in command.output
