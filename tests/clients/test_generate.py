"""The example clients' generate command: streamed text, the request to the server, and calls that end early."""

import asyncio
import signal
from pathlib import Path

import pytest

from tests.clients.running import Client, ended, read
from tests.fakes.engines.fake_engine import FakeEngine
from tests.fakes.frontends.fake_inference import FLAKY, GONE, HOLD, LARGE, LARGE_TEXT, FakeInference
from tests.fakes.frontends.frontend_server import FrontendServer
from tests.fakes.models.small_tokenizers import byte_level, save_model
from tests.fakes.patience import PATIENCE, deadlines

pytestmark = pytest.mark.slow

STEPS = 8
"""Maximum number of steps until there is text, because a token may be a part of a character."""
SEED = 2**60 + 1
"""Seed that a double cannot represent exactly."""


async def test_the_text_is_printed_as_it_is_streamed(client: Client, server: FakeInference) -> None:
    process = await client.start(server.address, "generate", f"the köln ferry 渡し船 {HOLD}")
    await read(process, "the köln ferry 渡し船")
    process.send_signal(signal.SIGINT)
    assert (await ended(process)).code == 130


async def test_the_text_ends_with_its_last_message(client: Client, server: FakeInference) -> None:
    assert await client.run(server.address, "generate", "the 渡し船 leaves") == (0, "the 渡し船 leaves\n", "")


async def test_a_message_may_be_larger_than_4_mib(client: Client, server: FakeInference) -> None:
    done = await client.run(server.address, "generate", f"a {LARGE} b")
    assert (done.code, done.err) == (0, "")
    assert done.out == f"a {LARGE_TEXT} b\n"


async def test_flags_become_fields_and_what_is_not_given_stays_unset(client: Client, server: FakeInference) -> None:
    flags = ["--model", "m", "--max-tokens", "9", "--temperature", "0", "--stop", "a", "--stop", "b"]
    assert (await client.run(server.address, "generate", *flags, "--seed", str(SEED), "given")).code == 0
    assert (await client.run(server.address, "generate", "--seed", f"-{2**63}", "least")).code == 0
    assert (await client.run(server.address, "generate", "unset")).code == 0
    given, least, unset = server.requests
    assert (given.model, given.sampling_params.max_tokens, given.sampling_params.seed) == ("m", 9, SEED)
    assert given.sampling_params.HasField("temperature")
    assert given.sampling_params.stop == ["a", "b"]
    assert least.sampling_params.seed == -(2**63)
    assert unset.sampling_params.ListFields() == []


async def test_an_interrupt_cancels_the_call_on_the_server(client: Client, server: FakeInference) -> None:
    process = await client.start(server.address, "generate", f"one two {HOLD}")
    await read(process, "one two")
    assert not server.abandoned.is_set()
    process.send_signal(signal.SIGINT)
    await asyncio.wait_for(server.abandoned.wait(), PATIENCE)
    assert await ended(process) == (130, "\n", "")


async def test_a_deadline_ends_the_call_on_both_sides(client: Client, server: FakeInference) -> None:
    for seconds in deadlines(2):
        done = await client.run(server.address, "generate", "--timeout", f"{seconds:g}", f"one two {HOLD}")
        assert done.code == 1
        assert done.err.startswith("DEADLINE_EXCEEDED: ")
        if server.requests:
            break
    await asyncio.wait_for(server.abandoned.wait(), PATIENCE)


async def test_a_cancelled_call_ends_in_the_engine_before_its_next_step(client: Client, tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    async with (
        FakeEngine(vocab_size=byte_level().get_vocab_size(), manual=True) as engine,
        FrontendServer(model, engines=[engine.address]) as frontend,
    ):
        process = await client.start(f"127.0.0.1:{frontend.frontend.port}", "generate", "hello")
        assert process.stdout is not None
        await engine.until(lambda e: e.running, limit=PATIENCE)
        for _ in range(STEPS):
            engine.step()
        assert await asyncio.wait_for(process.stdout.read(1024), PATIENCE)  # the client prints only complete characters
        process.send_signal(signal.SIGINT)
        await engine.until(lambda e: e.aborted and not e.running, limit=PATIENCE)
        assert engine.num_steps == STEPS
        assert (await ended(process)).code == 130


async def test_a_call_that_found_no_engine_is_tried_again_by_itself(client: Client, server: FakeInference) -> None:
    assert await client.run(server.address, "generate", f"the {FLAKY} ferry") == (0, f"the {FLAKY} ferry\n", "")
    assert len(server.requests) == 2


async def test_a_call_that_broke_behind_its_first_message_is_not_tried_again(
    client: Client, server: FakeInference
) -> None:
    done = await client.run(server.address, "generate", f"one two {GONE} three")
    assert (done.code, done.out) == (1, "one two\n")
    assert done.err == "UNAVAILABLE: the engine went away\n  reason: ENGINE_GONE\n"
    assert len(server.requests) == 1


async def test_a_reader_that_has_enough_ends_the_client_quietly(client: Client, server: FakeInference) -> None:
    process = await client.start(server.address, "generate", f"one {LARGE} two {LARGE} three {HOLD}")
    assert process.stdout is not None
    assert await asyncio.wait_for(process.stdout.readexactly(3), PATIENCE) == b"one"
    process.stdout._transport.close()  # type: ignore[attr-defined]  # there is no public way to close a pipe's reading end
    assert process.stderr is not None
    assert await asyncio.wait_for(process.stderr.read(), PATIENCE) == b""
    await asyncio.wait_for(process.wait(), PATIENCE)
    await asyncio.wait_for(server.abandoned.wait(), PATIENCE)
