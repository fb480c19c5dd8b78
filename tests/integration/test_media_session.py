"""Media between a frontend's session and a real engine: sent once, cached, evicted and sent again."""

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.enginecore.v1 import messages_pb2 as pb
from penstock_common.config.sections import ServerConfig
from penstock_common.tensors.shared_memory import owner_of
from penstock_common.types.media import MultiModalFeature, TensorData
from penstock_common.types.outputs import FinishReason
from penstock_common.types.request import EngineCoreRequest
from penstock_enginecore.config import MultimodalConfig
from penstock_enginecore.core.model_info import MediaInfo
from penstock_frontend.rpc.media_transport import MediaTransport
from penstock_frontend.rpc.session_messages import add_request
from tests.fakes.clients.session_client import connected
from tests.fakes.clients.session_pair import Pair, paired
from tests.fakes.engines.engine_harness import make_config, make_request
from tests.fakes.engines.engine_server import EngineServer, wait_until
from tests.fakes.engines.fake_executor import FakeExecutor, oracle_tokens
from tests.fakes.systems.media_session import assert_same, identifier_of, tensor_of

VOCAB = 1000
IMAGES = MediaInfo(modality="image", num_blocks=2, max_embeds=64, max_tokens=64)
SHM = Path("/dev/shm")
LIMIT = 128 * 1024
LENGTH = 8


@pytest.fixture
def serve() -> Iterator[Callable[..., EngineServer]]:
    servers: list[EngineServer] = []

    def start(*, limit: int = 64 * 1024 * 1024, **multimodal: Any) -> EngineServer:
        config = msgspec.structs.replace(
            make_config(num_blocks=400, multimodal=MultimodalConfig(**{"shared_memory": False, **multimodal})),
            server=ServerConfig(host="127.0.0.1", max_message_bytes=limit),
        )
        server = EngineServer(config, FakeExecutor(vocab_size=VOCAB, media=(IMAGES,))).start().load()
        servers.append(server)
        received = server.received = []  # type: ignore[attr-defined]
        add = server.busy_loop.add

        def noting(client_id: str, request: EngineCoreRequest) -> None:
            received.append(request)
            add(client_id, request)

        server.busy_loop.add = noting  # type: ignore[method-assign]
        return server

    yield start
    for server in servers:
        server.stop()


Serve = Callable[..., EngineServer]


def image(name: str, size: int = 300_000, offset: int = 2) -> MultiModalFeature:
    data = {"pixel_values": tensor_of(name, size), "grid": TensorData("int64", (1, 3), bytes(24))}
    return MultiModalFeature(modality="image", identifier=identifier_of(name), offset=offset, length=4, data=data)


def asked(request_id: str, *features: MultiModalFeature, seed: int = 3, length: int = LENGTH) -> EngineCoreRequest:
    return make_request(prompt=12, request_id=request_id, seed=seed, max_tokens=length, mm_features=features)


def received(server: EngineServer, request_id: str) -> list[MultiModalFeature]:
    requests: list[EngineCoreRequest] = server.received  # type: ignore[attr-defined]
    return next(request.mm_features for request in reversed(requests) if request.request_id == request_id)


async def run(pair: Pair, server: EngineServer, request: EngineCoreRequest) -> None:
    """Run the request to its end. Checks that the request's media arrived unchanged, and that its tokens are right."""
    pair.add(request)
    (end,) = await pair.until_ended(request.request_id)
    assert end.finish_reason is FinishReason.LENGTH, end.error
    assert pair.tokens(request.request_id) == oracle_tokens(request.sampling_params.seed or 0, LENGTH, VOCAB)
    assert_same(received(server, request.request_id), request.mm_features)


def segments(incarnation: str) -> list[str]:
    return [path.name for path in SHM.iterdir() if owner_of(incarnation) in path.name]


async def test_media_come_whole_in_chunks_and_are_sent_once(serve: Serve) -> None:
    server, transport = serve(limit=LIMIT), MediaTransport("1", memory_id="")
    async with paired(server.address, media=transport) as pair:
        await run(pair, server, asked("a", image("x")))
        await run(pair, server, asked("b", image("x"), image("y", offset=6)))
        await run(pair, server, asked("c", image("y"), image("x", offset=7)))
    counts = transport.counts
    assert (counts.num_queries, counts.num_hits, counts.num_resent) == (5, 3, 0)
    assert counts.num_bytes == {"chunks": 600_000, "inline": 48}


async def test_media_lie_in_shared_memory_of_the_same_host(serve: Serve) -> None:
    server, transport = serve(limit=LIMIT, shared_memory=True), MediaTransport("1")
    async with paired(server.address, media=transport) as pair:
        await run(pair, server, asked("a", image("x")))
        await run(pair, server, asked("b", image("x"), image("y", offset=6)))
        assert segments("1") == [f"penstock-{owner_of('1')}.lock"]
    transport.close()
    assert segments("1") == []
    assert transport.counts.num_bytes == {"shared_memory": 600_000, "inline": 48}


async def test_other_memory_is_not_used(serve: Serve, tmp_path: Path) -> None:
    server, transport = serve(shared_memory=True), MediaTransport("1", root=tmp_path)
    async with paired(server.address, media=transport) as pair:
        await run(pair, server, asked("a", image("x")))
    assert transport.counts.num_bytes == {"chunks": 300_000, "inline": 24}


async def test_media_unreadable_for_the_engine_are_sent_again_in_chunks(serve: Serve) -> None:
    server, transport = serve(shared_memory=True), MediaTransport("1")
    async with paired(server.address, media=transport) as pair:
        session = next(iter(server.io.sessions._sessions.values()))
        assert session.features is not None
        session.features._segments._root = SHM / "missing"  # type: ignore[union-attr]
        await run(pair, server, asked("a", image("x")))
        await run(pair, server, asked("b", image("y")))
    transport.close()
    assert segments("1") == []
    assert transport.counts.num_resent == 1
    assert transport.counts.num_bytes["chunks"] == 600_000


async def test_bytes_are_there_once_for_all_sessions_and_go_with_them(serve: Serve) -> None:
    server = serve()
    cache = server.io.sessions.received
    async with paired(server.address) as one:
        await run(one, server, asked("a", image("x")))
        async with paired(server.address) as other:
            await run(other, server, asked("b", image("x")))
            server.received.clear()  # type: ignore[attr-defined]
            gc.collect()
            wait_until(lambda: cache.num_bytes == 300_024)
            assert one.session.media is not None
            assert len(one.session.media) == 1
    wait_until(lambda: not len(server.io.sessions))
    assert len(cache) == 0
    server.received.clear()  # type: ignore[attr-defined]
    server.executor.steps.clear()  # type: ignore[attr-defined]
    gc.collect()
    wait_until(lambda: cache.num_bytes == 0, timeout=20.0)
    assert server.busy_loop.stats().media is not None


async def test_what_does_not_fit_is_dropped_or_not_kept(serve: Serve) -> None:
    server = serve(receiver_cache_bytes=700_000)
    async with paired(server.address) as pair:
        for number, name in enumerate("xyzxzzy"):
            await run(pair, server, asked(f"r{number}", image(name)))
            await run(pair, server, asked(f"large{number}", image("large", 800_000)))
        session = next(iter(server.io.sessions._sessions.values()))
        assert session.features is not None
        assert pair.session.media is not None
        assert (
            session.features.kept.identifiers
            == pair.session.media.identifiers
            == {
                identifier_of("z"),
                identifier_of("y"),
            }
        )


async def test_an_engine_that_keeps_nothing_gets_everything_again(serve: Serve) -> None:
    server = serve(receiver_cache_bytes=0)
    async with paired(server.address) as pair:
        for number in range(3):
            await run(pair, server, asked(f"r{number}", image("x"), image("x", offset=7)))
    assert len(server.io.sessions.received) == 0


async def test_caches_that_are_reset_under_load_lose_nothing(serve: Serve) -> None:
    server, transport = serve(), MediaTransport("1", memory_id="")
    async with paired(server.address, media=transport) as pair:
        for number in range(30):
            pair.add(asked(f"r{number}", image("xyz"[number % 3])))
            if number % 5 == 4:
                await pair.session.call_utility("reset_mm_cache")
        for number in range(30):
            request_id = f"r{number}"
            (end,) = await pair.until_ended(request_id)
            assert end.finish_reason is FinishReason.LENGTH
            assert pair.tokens(request_id) == oracle_tokens(3, LENGTH, VOCAB)
            assert_same(received(server, request_id), [image("xyz"[number % 3])])
        await pair.session.call_utility("reset_mm_cache")
        await pair.until(lambda: pair.session.media is not None and not len(pair.session.media))
    assert transport.counts.num_bytes["chunks"] > 900_000


async def test_other_requests_go_between_the_chunks_of_media(serve: Serve) -> None:
    server = serve(limit=LIMIT)
    async with paired(server.address) as pair:
        pair.add(asked("large", image("large", 40_000_000)))
        pair.add(asked("small", seed=5))
        await pair.until_ended("small")
        assert pair.end("large") is None
        assert pair.tokens("small") == oracle_tokens(5, LENGTH, VOCAB)
        await pair.until_ended("large")
        assert_same(received(server, "large"), [image("large", 40_000_000)])


async def test_media_that_are_too_large_end_their_request_alone(serve: Serve) -> None:
    server = serve()
    async with paired(server.address) as pair:
        pair.add(asked("large", image("x", 200_000_000), image("y", 100_000_000, offset=6)))
        pair.add(asked("small", image("z")))
        (end,) = await pair.until_ended("large")
        assert end.error is not None
        assert (end.error.code, end.error.reason) == ("INVALID_ARGUMENT", "MESSAGE_TOO_LARGE")
        await pair.until_ended("small")


async def test_an_abort_while_media_are_under_way_leaves_nothing(serve: Serve) -> None:
    server = serve(limit=LIMIT)
    async with paired(server.address) as pair:
        pair.add(asked("gone", image("gone", 40_000_000)))
        pair.add(asked("a"))
        await pair.until_ended("a")
        pair.session.abort(["gone"], "test")
        await run(pair, server, asked("b", image("x")))
        session = next(iter(server.io.sessions._sessions.values()))
        assert len(session.prompts.tensors) == 0
        assert pair.session.media is not None
        assert pair.session.media.identifiers == {identifier_of("x")}


def raw(**feature: Any) -> pb.EngineCoreRequest:
    """Return a request whose media feature is valid except for the given fields."""
    request = asked("r", image("x", 100))
    message = add_request(request).add
    base: dict[str, Any] = {"modality": "image", "identifier": identifier_of("x"), "offset": 2, "length": 4}
    message.mm_features.add(**{**base, **feature})
    return message


def tensor(**fields: Any) -> dict[str, Any]:
    return {"data": {"t": {"dtype": 6, "shape": [3], "inline": b"abc", **fields}}}


SEGMENT = {"name": f"penstock-{owner_of('')}-99", "size": 3}


@pytest.mark.parametrize(
    ("feature", "code", "field"),
    [
        ({}, "FAILED_PRECONDITION", "mm_features[0]"),
        ({"identifier": "x" * 64, **tensor()}, "INVALID_ARGUMENT", "mm_features[0].identifier"),
        ({"identifier": identifier_of("x")[1:], **tensor()}, "INVALID_ARGUMENT", "mm_features[0].identifier"),
        ({"modality": "smell", **tensor()}, "INVALID_ARGUMENT", "mm_features[0].modality"),
        ({"modality": "video", **tensor()}, "INVALID_ARGUMENT", "mm_features[0].modality"),
        (tensor(dtype=0), "INVALID_ARGUMENT", "mm_features[0].data[t].dtype"),
        (tensor(shape=[4]), "INVALID_ARGUMENT", "mm_features[0].data[t].inline"),
        (tensor(shape=[2**63, 2**63]), "INVALID_ARGUMENT", "mm_features[0].data[t].inline"),
        (tensor(shape=[1] * 9), "INVALID_ARGUMENT", "mm_features[0].data[t].shape"),
        (tensor(inline=None), "UNIMPLEMENTED", "mm_features[0].data[t].inline"),
        (
            tensor(inline=None, chunks={"transfer_id": 7, "size": 3}),
            "INVALID_ARGUMENT",
            "mm_features[0].data[t].chunks",
        ),
        (tensor(inline=None, shared_memory=SEGMENT), "FAILED_PRECONDITION", "mm_features[0].data[t].shared_memory"),
        (
            tensor(inline=None, shared_memory={"name": "../../etc/passwd", "size": 3}),
            "INVALID_ARGUMENT",
            "mm_features[0].data[t].shared_memory",
        ),
        (
            tensor(inline=None, shared_memory={"name": f"penstock-{owner_of('2')}-1", "size": 3}),
            "INVALID_ARGUMENT",
            "mm_features[0].data[t].shared_memory",
        ),
        ({"offset": 9, **tensor()}, "INVALID_ARGUMENT", "mm_features[0].length"),
        ({"length": 0, **tensor()}, "INVALID_ARGUMENT", "mm_features[0].length"),
    ],
)
async def test_features_that_are_no_good_end_their_request_alone(
    serve: Serve, feature: dict[str, Any], code: str, field: str
) -> None:
    server = serve(shared_memory=True)
    async with connected(server.address) as client:
        await client.add("other", max_tokens=LENGTH)
        await client._send(pb.SessionRequest(add=raw(**feature)))
        await client.until_ended("r", "other")
        error = client.ends["r"].error
        assert (error.code, error.field) == (code, field)
        assert client.tokens["other"] == oracle_tokens(0, LENGTH, VOCAB)
