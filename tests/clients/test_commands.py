"""The example clients' commands for conversations, sessions and many calls."""

import re
import signal

import pytest

from tests.clients.running import Client, ended, read
from tests.fakes.frontends.fake_inference import BUSY, GONE, HOLD, FakeInference
from tests.fakes.patience import PATIENCE

pytestmark = pytest.mark.slow

SUMMARY = re.compile(r"calls: (\d+), failed: (\d+), messages: (\d+), seconds: \d+\.\d\n")


def counts(out: str) -> tuple[int, ...]:
    """Return the numbers of calls, failed calls and messages that the load command printed."""
    found = SUMMARY.fullmatch(out)
    assert found, out
    return tuple(map(int, found.groups()))


async def test_an_answer_is_printed_as_it_is_streamed(client: Client, server: FakeInference) -> None:
    done = await client.run(server.address, "chat", "--system", "be brief", "--max-tokens", "7", "the 渡し船 leaves")
    assert done == (0, "the 渡し船 leaves\n", "")
    (asked,) = server.chats
    assert [(turn.role, turn.content) for turn in asked.messages] == [
        ("system", "be brief"),
        ("user", "the 渡し船 leaves"),
    ]
    assert asked.sampling_params.max_tokens == 7


async def test_an_answer_that_is_interrupted_is_cancelled(client: Client, server: FakeInference) -> None:
    process = await client.start(server.address, "chat", f"one {HOLD}")
    await read(process, "one")
    process.send_signal(signal.SIGINT)
    assert (await ended(process)).code == 130


async def test_a_session_prints_each_text_when_it_is_whole(client: Client, server: FakeInference) -> None:
    done = await client.run(server.address, "session", "--seed", "3", "a b", "渡し船", "c d e")
    assert (done.code, done.err) == (0, "")
    assert sorted(done.out.splitlines()) == ["[0] a b", "[1] 渡し船", "[2] c d e"]
    assert [(asked.request_id, asked.sampling_params.seed) for asked in server.requests] == [
        ("0", 3),
        ("1", 3),
        ("2", 3),
    ]


async def test_in_a_session_one_request_fails_alone(client: Client, server: FakeInference) -> None:
    done = await client.run(server.address, "session", "a b", BUSY, f"c {GONE} d")
    assert (done.code, done.out) == (1, "[0] a b\n")
    lines = done.err.splitlines()
    assert "[1] RESOURCE_EXHAUSTED: the queue is full: 8 of 8 requests" in lines
    assert lines.count("  retry after: 2.5 s") == 1
    assert lines[lines.index("[2] UNAVAILABLE: the engine went away") + 1] == "  reason: ENGINE_GONE"


async def test_in_a_session_a_field_that_is_wrong_is_named(client: Client, server: FakeInference) -> None:
    done = await client.run(server.address, "session", "--temperature", "900", "a b")
    message = "sampling_params.temperature is 900; it must be from 0 to 100"
    assert (done.code, done.out) == (1, "")
    assert done.err.splitlines() == [
        f"[0] INVALID_ARGUMENT: {message}",
        "  reason: INVALID_FIELD",
        "  field: sampling_params.temperature",
    ]


async def test_in_a_session_one_request_is_ended_by_its_id(client: Client, server: FakeInference) -> None:
    done = await client.run(server.address, "session", "--abort-after", "2", f"one two {HOLD}", "a b")
    assert (done.code, done.err) == (0, "")
    assert sorted(done.out.splitlines()) == ["[0] one two (aborted)", "[1] a b"]


async def test_nothing_is_ended_that_has_ended_by_itself(client: Client, server: FakeInference) -> None:
    done = await client.run(server.address, "session", "--abort-after", "9", "one two")
    assert done == (0, "[0] one two\n", "")


async def test_a_session_that_is_interrupted_is_cancelled(client: Client, server: FakeInference) -> None:
    process = await client.start(server.address, "session", f"one {HOLD}", "a b")
    await read(process, "[1] a b\n")
    process.send_signal(signal.SIGINT)
    assert (await ended(process)).code == 130


async def test_many_calls_are_made_and_counted(client: Client, server: FakeInference) -> None:
    done = await client.run(server.address, "load", "--at-once", "16", "--calls", "40", "a b c")
    assert (done.code, done.err) == (0, "")
    assert counts(done.out) == (40, 0, 120)
    assert len(server.requests) == 40


async def test_as_many_calls_as_at_once_unless_it_is_told(client: Client, server: FakeInference) -> None:
    assert counts((await client.run(server.address, "load", "--at-once", "3", "a")).out) == (3, 0, 3)


async def test_calls_that_fail_are_told_and_counted(client: Client, server: FakeInference) -> None:
    done = await client.run(server.address, "load", "--calls", "2", BUSY)
    assert (done.code, counts(done.out)) == (1, (2, 2, 0))
    assert done.err.splitlines().count("RESOURCE_EXHAUSTED: the queue is full: 8 of 8 requests") == 2


async def test_calls_are_begun_for_as_long_as_is_asked(client: Client, server: FakeInference) -> None:
    done = await client.run(server.address, "load", "--at-once", "2", "--for", "0.5", "a b")
    assert done.code == 0
    calls, failed, messages = counts(done.out)
    assert (calls, failed, messages) == (len(server.requests), 0, 2 * calls)
    assert calls >= 2


async def test_a_load_that_is_interrupted_says_what_it_has_done(client: Client, server: FakeInference) -> None:
    process = await client.start(server.address, "load", "--at-once", "2", f"a {HOLD}")
    while len(server.requests) < 2:
        await server.asked(PATIENCE)
    process.send_signal(signal.SIGINT)
    done = await ended(process)
    assert (done.code, done.err) == (130, "")
    assert counts(done.out)[:2] == (0, 0)
