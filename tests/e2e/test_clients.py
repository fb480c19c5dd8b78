"""The example clients as a user runs them, against a public API without a model."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.fakes.fake_inference import BUSY, HOLD, FakeInference

CLIENTS = Path(__file__).resolve().parents[2] / "examples/clients"
PYTHON = [sys.executable, str(CLIENTS / "python/generate.py")]
TIMEOUT = 60.0

needs_node = pytest.mark.skipif(
    shutil.which("node") is None or shutil.which("npm") is None, reason="node and npm are not on PATH"
)


@pytest.fixture(scope="session")
def node_modules() -> None:
    """The packages of the Node client, installed on first use."""
    if not (CLIENTS / "node/node_modules").is_dir():
        npm = shutil.which("npm")
        assert npm is not None
        run = subprocess.run([npm, "ci"], cwd=CLIENTS / "node", capture_output=True, text=True, timeout=300)
        assert run.returncode == 0, run.stdout + run.stderr


@pytest.fixture(params=["python", pytest.param("node", marks=needs_node)])
def command(request: pytest.FixtureRequest) -> list[str]:
    """The command line of a client, without arguments."""
    if request.param == "python":
        return PYTHON
    request.getfixturevalue("node_modules")
    return ["node", str(CLIENTS / "node/generate.mjs")]


@pytest.fixture
async def server() -> AsyncIterator[FakeInference]:
    fake = FakeInference()
    await fake.start()
    yield fake
    await fake.stop()


async def start(*command: str, **env: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *command,
        env={**os.environ, **env},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def run(command: list[str], server: FakeInference, *arguments: str) -> tuple[int | None, str, str]:
    """Exit code, output and errors of a client that ends by itself."""
    process = await start(*command, "--address", server.address, *arguments)
    out, err = await asyncio.wait_for(process.communicate(), TIMEOUT)
    return process.returncode, out.decode(), err.decode()


async def test_the_text_is_printed_as_it_is_streamed(command: list[str], server: FakeInference) -> None:
    assert await run(command, server, "the köln ferry 渡し船 leaves") == (0, "the köln ferry 渡し船 leaves\n", "")


async def test_flags_become_fields_and_what_is_not_given_stays_unset(command: list[str], server: FakeInference) -> None:
    flags = [
        "--model",
        "m",
        "--max-tokens",
        "9",
        "--temperature",
        "0",
        "--seed",
        str(2**60 + 1),
        "--stop",
        "a",
        "--stop",
        "b",
    ]
    assert (await run(command, server, *flags, "given"))[0] == 0
    assert (await run(command, server, "unset"))[0] == 0
    given, unset = server.requests
    assert given.model == "m"
    assert given.sampling_params.max_tokens == 9
    assert given.sampling_params.HasField("temperature")
    assert given.sampling_params.seed == 2**60 + 1
    assert given.sampling_params.stop == ["a", "b"]
    assert unset.sampling_params.ListFields() == []


async def test_several_sequences_are_told_apart(server: FakeInference) -> None:
    assert await run(PYTHON, server, "--n", "2", "the ferry") == (0, "[0] the ferry\n[1] the ferry\n", "")


async def test_log_probabilities_come_with_their_tokens(server: FakeInference) -> None:
    result = await run(PYTHON, server, "--logprobs", "0", "the ferry")
    assert result == (0, "the ferry\n", "[0] 'the' -0.000\n[0] ' ferry' -1.000\n")


async def test_an_interrupt_cancels_the_call_on_the_server(command: list[str], server: FakeInference) -> None:
    process = await start(*command, "--address", server.address, f"one two {HOLD}")
    assert process.stdout is not None
    assert await asyncio.wait_for(process.stdout.readexactly(len("one two")), TIMEOUT) == b"one two"
    assert not server.abandoned.is_set()
    process.send_signal(signal.SIGINT)
    await asyncio.wait_for(server.abandoned.wait(), TIMEOUT)
    _, err = await asyncio.wait_for(process.communicate(), TIMEOUT)
    assert (process.returncode, err) == (130, b"")


async def test_a_deadline_ends_the_call_on_both_sides(command: list[str], server: FakeInference) -> None:
    code, _, err = await run(command, server, "--timeout", "2", f"one two {HOLD}")
    assert code == 1
    assert err.startswith("DEADLINE_EXCEEDED: ")
    await asyncio.wait_for(server.abandoned.wait(), TIMEOUT)


async def test_a_wrong_field_is_named(command: list[str], server: FakeInference) -> None:
    code, out, err = await run(command, server, "--temperature", "900", "hello")
    message = "sampling_params.temperature is 900; it must be from 0 to 100"
    assert (code, out) == (1, "\n")
    assert err.splitlines() == [
        f"INVALID_ARGUMENT: {message}",
        "  reason: INVALID_FIELD",
        f"  field: sampling_params.temperature: {message}",
    ]


async def test_a_full_queue_says_when_to_retry(command: list[str], server: FakeInference) -> None:
    code, _, err = await run(command, server, BUSY)
    assert code == 1
    assert err.splitlines()[1:] == ["  reason: QUEUE_FULL", "  retry after: 2.5 s"]


async def test_a_server_that_is_not_there_is_unavailable(command: list[str], server: FakeInference) -> None:
    await server.stop()
    code, _, err = await run(command, server, "hello")
    assert code == 1
    assert err.startswith("UNAVAILABLE: ")


@needs_node
async def test_the_node_clients_own_tests_pass(node_modules: None, server: FakeInference) -> None:
    tests = str(CLIENTS / "node/client.test.mjs")
    process = await start("node", "--test", tests, PENSTOCK_ADDRESS=server.address)
    out, _ = await asyncio.wait_for(process.communicate(), TIMEOUT)
    assert process.returncode == 0, out.decode()
