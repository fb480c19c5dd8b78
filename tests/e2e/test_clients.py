"""The example clients as a user runs them, against a public API without a model."""

import asyncio
import importlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from penstock.inference.v1 import messages_pb2, service_pb2_grpc
from tests.fakes.clients import node
from tests.fakes.clients.node import needs_node
from tests.fakes.engines.fake_engine import FakeEngine
from tests.fakes.frontends.fake_inference import BUSY, FLAKY, HOLD, FakeInference
from tests.fakes.frontends.frontend_server import FrontendServer
from tests.fakes.models.small_tokenizers import byte_level, save_model
from tests.fakes.patience import PATIENCE, deadlines

CLIENTS = Path(__file__).resolve().parents[2] / "examples/clients"
PYTHON = [sys.executable, str(CLIENTS / "python/generate.py")]
TIMEOUT = PATIENCE
STEPS = 8
"""Of a fake engine until there is text: a token may be a part of a character, without one."""

needs_openssl = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="no openssl on PATH (apt-get install openssl)"
)


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for localhost that has signed itself; ``key.pem`` lies beside it."""
    folder = tmp_path_factory.mktemp("tls")
    what = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=penstock -addext subjectAltName=DNS:localhost"
    command = ["openssl", *what.split(), "-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    subprocess.run(command, check=True, capture_output=True)
    return folder / "cert.pem"


def pair(certificate: Path) -> tuple[bytes, bytes]:
    return certificate.with_name("key.pem").read_bytes(), certificate.read_bytes()


@pytest.fixture(scope="session")
def node_modules() -> None:
    """The packages of the Node client."""
    node.install(CLIENTS / "node")


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
    for seconds in deadlines(2):
        code, _, err = await run(command, server, "--timeout", f"{seconds:g}", f"one two {HOLD}")
        assert code == 1
        assert err.startswith("DEADLINE_EXCEEDED: ")
        if server.requests:
            break
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


async def test_a_cancelled_call_ends_in_the_engine_before_its_next_step(command: list[str], tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    async with (
        FakeEngine(vocab_size=byte_level().get_vocab_size(), manual=True) as engine,
        FrontendServer(model, engines=[engine.address]) as frontend,
    ):
        process = await start(*command, "--address", f"127.0.0.1:{frontend.frontend.port}", "hello")
        assert process.stdout is not None
        await engine.until(lambda e: e.running, limit=TIMEOUT)
        for _ in range(STEPS):
            engine.step()
        assert await asyncio.wait_for(process.stdout.read(1), TIMEOUT)
        process.send_signal(signal.SIGINT)
        await engine.until(lambda e: e.aborted and not e.running, limit=TIMEOUT)
        assert engine.num_steps == STEPS
        await asyncio.wait_for(process.communicate(), TIMEOUT)
    assert process.returncode == 130


async def test_a_call_that_found_no_engine_is_tried_again_by_itself(command: list[str], server: FakeInference) -> None:
    assert await run(command, server, f"the {FLAKY} ferry") == (0, f"the {FLAKY} ferry\n", "")
    assert len(server.requests) == 2


async def test_a_key_goes_into_the_metadata(command: list[str], server: FakeInference) -> None:
    process = await start(*command, "--address", server.address, "hello", PENSTOCK_API_KEY="sesame")
    await asyncio.wait_for(process.communicate(), TIMEOUT)
    assert (process.returncode, server.keys) == (0, ["Bearer sesame"])


async def test_without_a_key_there_is_none_in_the_metadata(command: list[str], server: FakeInference) -> None:
    assert (await run(command, server, "hello"))[0] == 0
    assert server.keys == [""]


@needs_openssl
async def test_a_connection_is_encrypted_and_the_server_known_by_its_certificate(
    command: list[str], certificate: Path
) -> None:
    fake = FakeInference(tls=pair(certificate))
    await fake.start()
    try:
        assert await run(command, fake, "--ca", str(certificate), "the ferry") == (0, "the ferry\n", "")
        code, _, err = await run(command, fake, "--tls", "the ferry")
    finally:
        await fake.stop()
    assert code == 1  # nobody it trusts has signed that certificate
    assert "UNAVAILABLE: " in err
    assert len(fake.requests) == 1


async def test_calls_of_one_channel_go_to_all_addresses_in_turn(
    server: FakeInference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(CLIENTS / "python"))
    other = FakeInference()
    await other.start()
    async with importlib.import_module("connection").connect_aio(f"ipv4:{server.address},{other.address}") as channel:
        stub = service_pb2_grpc.InferenceServiceStub(channel)
        async with asyncio.timeout(TIMEOUT):
            while not (server.requests and other.requests):  # the second connection may come up later than the first
                await stub.Generate(messages_pb2.GenerateRequest(text="warm up")).read()
        before = len(server.requests), len(other.requests)
        for _ in range(6):
            await stub.Generate(messages_pb2.GenerateRequest(text="the ferry")).read()
    await other.stop()
    assert (len(server.requests) - before[0], len(other.requests) - before[1]) == (3, 3)


async def test_many_prompts_are_continued_at_once(server: FakeInference) -> None:
    command = [sys.executable, str(CLIENTS / "python/generate_many.py")]
    assert await run(command, server, "a b", "c d") == (0, "a b: a b\nc d: c d\n", "")
    assert len(server.requests) == 2


@needs_node
async def test_the_node_clients_own_tests_pass(node_modules: None, server: FakeInference) -> None:
    tests = str(CLIENTS / "node/client.test.mjs")
    process = await start("node", "--test", tests, PENSTOCK_ADDRESS=server.address)
    out, _ = await asyncio.wait_for(process.communicate(), TIMEOUT)
    assert process.returncode == 0, out.decode()
