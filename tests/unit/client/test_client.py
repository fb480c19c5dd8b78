"""The Python client against a real server on loopback: answers, errors, cancelled calls, retries, connections that end."""

import asyncio
import re
import runpy
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from penstock_client import (
    AsyncClient,
    ChatMessage,
    Client,
    DeadlineExceeded,
    InvalidArgument,
    Keepalive,
    ResourceExhausted,
    SamplingParams,
    Tls,
    Unavailable,
    Unimplemented,
)
from tests.fakes.frontends.fake_inference import BUSY, FLAKY, GONE, HOLD, LARGE, LARGE_TEXT, THINK, FakeInference
from tests.fakes.network.certificates import Authority
from tests.fakes.network.tcp_proxy import TcpProxy
from tests.fakes.patience import PATIENCE


@pytest.fixture
async def server() -> AsyncIterator[FakeInference]:
    async with FakeInference() as fake:
        yield fake


@pytest.fixture
async def client(server: FakeInference) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(server.address, timeout=PATIENCE) as made:
        yield made


async def test_a_stream_has_the_pieces_and_an_answer_is_whole(client: AsyncClient, server: FakeInference) -> None:
    pieces = [piece async for piece in client.stream("one two", SamplingParams(n=2, logprobs=0), model="fake")]
    assert [(piece.index, piece.text) for piece in pieces] == [(0, "one"), (1, "one"), (0, " two"), (1, " two")]
    assert [piece.finish_reason for piece in pieces] == [None, None, "stop", "stop"]
    assert [(entry.token, entry.logprob, entry.rank) for [entry] in pieces[2].logprobs] == [(" two", -1.0, 1)]
    assert (pieces[0].usage, pieces[0].prompt_logprobs, pieces[2].usage.completion_tokens) == (None, None, 2)
    assert [output.token_ids for output in await client.generate([5, 6], SamplingParams(max_tokens=1))] == [[0]]
    assert (server.requests[0].model, list(server.requests[1].token_ids.ids)) == ("fake", [5, 6])
    assert server.requests[1].sampling_params.output_kind == 3  # FINAL


async def test_a_conversation_is_answered(client: AsyncClient, server: FakeInference) -> None:
    messages = [ChatMessage(role="user", content=f"{THINK} why {THINK} so")]
    pieces = [piece async for piece in client.stream_chat(messages, chat_template_kwargs='{"a": 1}')]
    assert "".join(piece.reasoning for piece in pieces) == "why "
    assert "".join(piece.content for piece in pieces) == "so"
    assert server.chats[0].chat_template_kwargs == '{"a": 1}'


async def test_a_message_above_grpcs_own_limit_arrives(client: AsyncClient) -> None:
    assert [piece.text async for piece in client.stream(LARGE)] == [LARGE_TEXT]


async def test_errors_name_the_field_and_when_to_try_again(client: AsyncClient) -> None:
    with pytest.raises(InvalidArgument) as wrong:
        await client.generate("hello", SamplingParams(temperature=900))
    assert (wrong.value.field, wrong.value.reason) == ("sampling_params.temperature", "INVALID_FIELD")
    assert wrong.value.message == "sampling_params.temperature is 900; it must be from 0 to 100"
    with pytest.raises(ResourceExhausted, match="the queue is full") as busy:
        await client.generate(BUSY)
    assert (busy.value.field, busy.value.reason, busy.value.retry_after) == ("", "QUEUE_FULL", 2.5)
    with pytest.raises(Unimplemented) as unknown:
        await client.embed(["a", [1, 2]])
    assert (unknown.value.code, unknown.value.reason, unknown.value.retry_after) == ("UNIMPLEMENTED", "", None)


async def test_pieces_before_a_failure_arrive_and_nothing_is_begun_again(
    client: AsyncClient, server: FakeInference
) -> None:
    stream = client.stream(f"one {GONE}")
    assert (await anext(stream)).text == "one"
    with pytest.raises(Unavailable, match="the engine went away"):
        await anext(stream)
    assert len(server.requests) == 1


async def test_a_call_that_was_unavailable_is_tried_again(client: AsyncClient, server: FakeInference) -> None:
    assert "".join([piece.text async for piece in client.stream(f"{FLAKY} two")]) == f"{FLAKY} two"
    assert len(server.requests) == 2


async def test_leaving_the_loop_ends_the_call(client: AsyncClient, server: FakeInference) -> None:
    async for piece in client.stream(f"one {HOLD}"):
        assert piece.text == "one"
        break
    await asyncio.wait_for(server.abandoned.wait(), PATIENCE)


async def test_cancelling_the_task_ends_the_call(client: AsyncClient, server: FakeInference) -> None:
    task = asyncio.create_task(client.generate(HOLD))
    await server.asked(PATIENCE)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(server.abandoned.wait(), PATIENCE)


async def test_a_closed_stream_has_no_more_pieces(client: AsyncClient, server: FakeInference) -> None:
    async with client.stream(f"one {HOLD}") as stream:
        await anext(stream)
    assert [piece async for piece in stream] == []
    await asyncio.wait_for(server.abandoned.wait(), PATIENCE)


async def test_a_deadline_ends_the_call_on_both_sides(client: AsyncClient, server: FakeInference) -> None:
    with pytest.raises(DeadlineExceeded):
        await client.generate(HOLD, timeout=0.2)
    await asyncio.wait_for(server.abandoned.wait(), PATIENCE)


async def test_a_connection_that_ended_is_made_again(server: FakeInference) -> None:
    cable = TcpProxy(int(server.address.rpartition(":")[2]))
    await cable.start()
    try:
        async with AsyncClient(f"127.0.0.1:{cable.port}", timeout=PATIENCE) as client:
            stream = client.stream(f"one {HOLD}")
            assert (await anext(stream)).text == "one"
            cable.cut()
            with pytest.raises(Unavailable) as cut:
                await anext(stream)
            assert (cut.value.reason, cut.value.field) == ("", "")
            assert [output.request_id for output in await client.generate("again", request_id="r")] == ["r"]
    finally:
        await cable.close()


async def test_without_a_server_the_error_names_the_address(server: FakeInference) -> None:
    await server.stop()
    message = f"no connection to {server.address}: .*; is a server running\\? Start one with: penstock serve MODEL"
    async with AsyncClient(server.address, timeout=PATIENCE) as client:
        with pytest.raises(Unavailable, match=message):
            await client.generate("hello")
        with pytest.raises(Unavailable, match=message):
            await client.models()


async def test_a_connection_is_encrypted_and_shows_the_key(tmp_path: Path) -> None:
    identity = Authority().issue("localhost")
    ca = identity.write(tmp_path / "right").ca
    other = Authority().issue("localhost").write(tmp_path / "wrong").ca
    async with FakeInference(tls=(identity.key, identity.certificate)) as fake:
        async with AsyncClient(fake.address, tls=Tls(ca=ca), key="sesame", timeout=PATIENCE) as client:
            assert (await client.generate("hello"))[0].finish_reason == "stop"
        async with AsyncClient(fake.address, tls=Tls(ca=other), timeout=PATIENCE) as stranger:
            with pytest.raises(Unavailable):
                await stranger.generate("hello")
    assert fake.keys == ["Bearer sesame"]


async def test_threads_have_the_same(server: FakeInference) -> None:
    def use() -> None:
        with Client(server.address, key="sesame", timeout=PATIENCE) as client:
            assert [model.name for model in client.models()] == ["fake"]
            assert [output.request_id for output in client.generate(f"{FLAKY} one", request_id="r")] != []
            assert [piece.content for piece in client.stream_chat([ChatMessage(role="user", content="so")])] == [
                "so",
                "",
            ]
            with pytest.raises(InvalidArgument) as wrong:
                client.generate("hello", SamplingParams(temperature=900))
            assert wrong.value.field == "sampling_params.temperature"
            with pytest.raises(Unimplemented):
                client.score("a", ["b", [1]])
            with pytest.raises(DeadlineExceeded):
                client.generate(HOLD, timeout=0.2)
            for piece in client.stream(f"one {HOLD}", timeout=PATIENCE):
                assert piece.text == "one"
                break
            with client.stream(f"one {HOLD}") as stream:
                next(stream)
            assert list(stream) == []

    await asyncio.to_thread(use)
    await asyncio.wait_for(server.abandoned.wait(), PATIENCE)
    assert set(server.keys) == {"Bearer sesame"}


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"address": ""}, "address is empty; it must be host:port"),
        (
            {"address": "http://localhost:8000"},
            "address is 'http://localhost:8000'; it must be HOST:PORT of the server's gRPC port",
        ),
        ({"address": "https://localhost:8000"}, "without https:// and pass tls=Tls()"),
        ({"key": "sk-a\n"}, "key has characters that are not printable ASCII"),
        ({"timeout": 0}, "timeout is 0; it must be above 0 s"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_invalid_connection_addresses_are_named(wrong: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Client(**wrong)


def test_settings_of_connections_have_limits(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keepalive.interval is 1; it must be at least 5 s"):
        Keepalive(interval=1)
    with pytest.raises(ValueError, match="keepalive.timeout is 0; it must be above 0 s"):
        Keepalive(timeout=0)
    with pytest.raises(ValueError, match=r"tls.certificate is 'tls.crt', but tls.key is empty; set both"):
        Tls(certificate="tls.crt")
    with pytest.raises(FileNotFoundError, match="absent.pem"):
        Client(tls=Tls(ca=tmp_path / "absent.pem"))


def test_the_client_for_threads_is_that_of_the_source() -> None:
    service = Path(__file__).parents[3] / "services" / "client"
    build = runpy.run_path(str(service / "build_sync_client.py"))
    source, made = (service / "penstock_client" / f"{kind}_client.py" for kind in ("async", "sync"))
    assert made.read_text() == build["synchronous"](source.read_text()), "run `make setup`"
    assert not re.search(r"\basync\b|\bawait\b|aio_", made.read_text())


async def test_a_channel_of_the_callers_is_used_and_closed(server: FakeInference) -> None:
    channel = grpc.aio.insecure_channel(server.address)
    async with AsyncClient("nowhere:1", channel=channel, key="sesame", timeout=PATIENCE) as client:
        assert (await client.generate("hello"))[0].finish_reason == "stop"
    assert server.keys == ["Bearer sesame"]
    assert channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN
