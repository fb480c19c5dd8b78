"""Data that exceeds the message limit between a frontend and a real engine is split, or only the data's request is
refused.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.common.v1 import tensor_pb2
from penstock.enginecore.v1 import messages_pb2 as pb
from penstock_common.config.sections import ServerConfig
from penstock_common.tensors.chunks import MAX_TENSOR_BYTES
from penstock_common.tensors.shared_memory import ROOT, UNREADABLE, SegmentWriter, owner_of
from penstock_common.types.outputs import FinishReason
from penstock_common.types.prompt_embeds import PromptEmbeds
from penstock_common.types.request import EngineCoreRequest, PoolingParams, PoolingTask, RequestContext
from penstock_common.types.sampling import SamplingParams
from penstock_frontend.rpc.media_transport import MediaTransport
from penstock_frontend.rpc.session_messages import add_request
from tests.fakes.clients.session_client import connected
from tests.fakes.clients.session_pair import Pair, paired
from tests.fakes.engines.engine_harness import make_config
from tests.fakes.engines.engine_server import EngineServer
from tests.fakes.engines.fake_engine import FakeEngine
from tests.fakes.engines.fake_executor import FakeExecutor, oracle_tokens
from tests.fakes.engines.large_outputs import PoolingExecutor, ScoringExecutor, pooled_bytes

LIMIT = 128 * 1024
VOCAB = 1000
HIDDEN = 4


@pytest.fixture
def serve() -> Iterator[Callable[..., EngineServer]]:
    servers: list[EngineServer] = []

    def start(executor: FakeExecutor, limit: int = LIMIT, **config: Any) -> EngineServer:
        made = msgspec.structs.replace(
            make_config(**{"num_blocks": 16_000, "max_num_batched_tokens": 4096, **config}),
            server=ServerConfig(host="127.0.0.1", max_message_bytes=limit),
        )
        servers.append(EngineServer(made, executor).start().load())
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


Serve = Callable[..., EngineServer]


def generator(executor: type[FakeExecutor] = FakeExecutor) -> FakeExecutor:
    return executor(model_max_len=60_000, check_kv=False)


def asked(request_id: str, prompt: int = 5, embeds: PromptEmbeds | None = None, **params: Any) -> EngineCoreRequest:
    sampling = SamplingParams(**{"seed": 3, "max_tokens": 8, **params})
    ids = [0] * embeds.num_tokens if embeds else list(range(prompt % VOCAB)) or [7] * prompt
    return EngineCoreRequest(
        request_id=request_id, prompt_token_ids=ids, prompt_embeds=embeds, sampling_params=sampling
    )


def pooling(request_id: str, prompt: int) -> EngineCoreRequest:
    params = PoolingParams(task=PoolingTask.TOKEN_EMBED)
    return EngineCoreRequest(request_id=request_id, prompt_token_ids=[7] * prompt, pooling_params=params)


def vectors(count: int) -> PromptEmbeds:
    return PromptEmbeds(dtype="float32", num_tokens=count, hidden_size=HIDDEN, data=b"\0\0\x80?" * (count * HIDDEN))


async def neighbour(pair: Pair, request_id: str = "neighbour") -> None:
    """Check that another request on the session gives the same tokens as when it runs alone."""
    assert pair.tokens(request_id) == oracle_tokens(3, 100, VOCAB)


async def test_vectors_larger_than_a_message_come_whole(serve: Serve) -> None:
    server = serve(PoolingExecutor(64, model_max_len=2000))
    async with paired(server.address, max_message_bytes=LIMIT) as pair:
        for request_id, prompt in (("small", 3), ("large", 900), ("other", 700)):
            pair.session.add(pooling(request_id, prompt))
        small, large, other = await pair.until_ended("small", "large", "other")
    for end, prompt in ((small, 3), (large, 900), (other, 700)):
        assert end.pooling_output is not None
        assert end.pooling_output.shape == (prompt, 64)
        assert end.pooling_output.data == pooled_bytes(prompt * 64 * 4)
    assert sorted(pair.finished) == ["large", "other", "small"]


async def test_log_probabilities_of_a_long_prompt_come_in_pieces(serve: Serve) -> None:
    server = serve(generator(ScoringExecutor))
    async with paired(server.address, max_message_bytes=LIMIT) as pair:
        pair.session.add(asked("neighbour", max_tokens=100))
        pair.session.add(asked("long", prompt=3000, prompt_logprobs=20))
        await pair.until_ended("neighbour", "long")
    pieces = [output.new_prompt_logprobs for output in pair.outputs["long"] if output.new_prompt_logprobs is not None]
    assert sum(map(len, pieces)) == 2999
    assert len(pieces) > 1
    assert pair.tokens("long") == oracle_tokens(3, 8, VOCAB)
    await neighbour(pair)


async def test_an_output_that_no_message_holds_ends_its_request_alone(serve: Serve) -> None:
    executor = ScoringExecutor(model_max_len=60_000, check_kv=False, vocab_size=20_000)
    server = serve(executor)
    server.engine._limits = msgspec.structs.replace(server.engine._limits, max_logprobs=-1)
    async with paired(server.address, max_message_bytes=LIMIT) as pair:
        pair.session.add(asked("neighbour", max_tokens=100))
        pair.session.add(asked("wide", prompt=3, prompt_logprobs=12_000, max_tokens=50_000))
        _, wide = await pair.until_ended("neighbour", "wide")
        error = wide.error
        assert error is not None, wide
        assert (error.code, error.reason) == ("RESOURCE_EXHAUSTED", "MESSAGE_TOO_LARGE")
        assert "this frontend accepts" in error.message
        await pair.until(lambda: not server.engine.has_requests)  # ends long before the request has 50 000 tokens
    assert pair.tokens("neighbour") == oracle_tokens(3, 100, 20_000)


async def test_a_prompt_larger_than_a_message_comes_whole(serve: Serve) -> None:
    executor = generator()
    server = serve(executor)
    embeds = vectors(50_000)
    async with paired(server.address, max_message_bytes=LIMIT) as pair:
        pair.session.add(asked("large", embeds=embeds))
        pair.session.add(asked("neighbour", max_tokens=100))
        await pair.until_ended("neighbour", "large")
    assert pair.tokens("large") == oracle_tokens(3, 8, VOCAB)
    await neighbour(pair)
    (received,) = received_by(executor)
    assert received.data == embeds.data


def received_by(executor: FakeExecutor) -> list[PromptEmbeds]:
    news = (new.prompt_embeds for step in executor.steps for new in step.new_requests)
    return [embeds for embeds in news if embeds is not None]


async def test_the_sequences_of_a_request_share_one_prompt_in_the_engine(serve: Serve) -> None:
    executor = generator()
    server = serve(executor, max_num_seqs=16)
    embeds = vectors(5000)
    async with paired(server.address, max_message_bytes=LIMIT) as pair:
        for index in range(8):
            pair.session.add(asked(f"r-{index}", embeds=embeds))
        await pair.until_ended(*(f"r-{index}" for index in range(8)))
    received = received_by(executor)
    assert len(received) == 8
    assert len({id(each) for each in received}) == 1


async def test_the_sequences_of_a_request_send_their_prompt_once() -> None:
    async with FakeEngine(max_model_len=10_000) as engine:
        engine.ready.max_message_bytes, engine.ready.max_tensor_bytes = LIMIT, 2**20
        embeds = vectors(5000)
        async with paired(engine.address, max_message_bytes=LIMIT) as pair:
            for index in range(8):
                pair.session.add(asked(f"r-{index}", embeds=embeds))
            await engine.until(lambda e: len(e.requests) == 8)
        assert sum(len(chunk.data) for chunk in engine.chunks) == len(embeds.data)
        assert [each.prompt_embeds.chunks.keep for each in engine.requests] == [True] * 7 + [False]


async def test_a_request_larger_than_a_message_is_refused_before_it_is_sent(serve: Serve) -> None:
    server = serve(generator(), limit=64 * 1024)
    async with paired(server.address, max_message_bytes=LIMIT) as pair:
        pair.session.add(asked("neighbour", max_tokens=100))
        pair.session.add(msgspec.structs.replace(asked("long"), prompt_token_ids=[999] * 40_000))
        _, refused = await pair.until_ended("neighbour", "long")
        assert refused.error is not None
        assert (refused.error.code, refused.error.reason) == ("INVALID_ARGUMENT", "MESSAGE_TOO_LARGE")
        assert "engines accept messages of up to 65536" in refused.error.message
    await neighbour(pair)


async def test_a_request_that_cannot_be_encoded_ends_alone(serve: Serve) -> None:
    server = serve(generator())
    async with paired(server.address, max_message_bytes=LIMIT) as pair:
        pair.session.add(asked("neighbour", max_tokens=100))
        pair.session.add(msgspec.structs.replace(asked("bad"), context=RequestContext(priority=2**40)))
        _, refused = await pair.until_ended("neighbour", "bad")
        assert refused.error is not None
        assert refused.error.code == "INTERNAL"
    await neighbour(pair)


async def test_a_prompt_is_not_sent_to_its_end_once_its_request_is_aborted() -> None:
    async with FakeEngine(max_model_len=10_000) as engine:
        engine.ready.max_message_bytes, engine.ready.max_tensor_bytes = LIMIT, 2**30
        async with paired(engine.address, max_message_bytes=LIMIT) as pair:
            pair.session.add(asked("large", embeds=vectors(1_000_000)))
            pair.session.abort(["large"], "the client is gone")
            pair.session.add(asked("next"))
            await engine.until(lambda e: e.requests)
        assert [each.request_id for each in engine.requests] == ["next"]
        assert engine.aborted == []


async def test_an_engine_that_does_not_say_what_it_takes_gets_whole_rows_inline() -> None:
    async with FakeEngine(max_model_len=10_000) as engine:
        embeds = PromptEmbeds(dtype="float32", num_tokens=3, hidden_size=1, data=b"aaaabbbb", is_token=bytes([0, 1, 0]))
        async with paired(engine.address, max_message_bytes=LIMIT) as pair:
            pair.session.add(asked("r", embeds=embeds))
            await engine.until(lambda e: e.requests)
    (got,) = engine.requests
    assert got.prompt_embeds.inline == b"aaaa\0\0\0\0bbbb"
    assert list(got.prompt_embeds.shape) == [3, 1]
    assert list(got.prompt_is_token_ids) == [False, True, False]


async def test_a_mixed_prompt_that_would_grow_beyond_a_message_is_refused() -> None:
    async with FakeEngine(max_model_len=10_000) as engine:
        data = bytes(4 * 10_000)
        embeds = PromptEmbeds(
            dtype="float32", num_tokens=100, hidden_size=10_000, data=data, is_token=b"\0" + b"\1" * 99
        )
        async with paired(engine.address, max_message_bytes=LIMIT) as pair:
            pair.session.add(asked("r", embeds=embeds))
            (refused,) = await pair.until_ended("r")
    assert refused.error is not None
    assert (
        refused.error.message == f"the embeddings of the prompt have 4000000 bytes; engines accept up to {LIMIT} bytes"
    )


async def test_a_frontend_that_does_not_say_what_it_takes_gets_vectors_inline(serve: Serve) -> None:
    server = serve(PoolingExecutor(64, model_max_len=2000), limit=256 * 1024)
    async with connected(server.address) as client:
        for request_id, prompt in (("fits", 900), ("large", 1999)):
            await client._send(pooling_message(request_id, prompt))
        await client.until_ended("fits", "large")
    assert client.ends["fits"].pooling_output.inline == pooled_bytes(900 * 64 * 4)
    assert client.ends["large"].error.reason == "MESSAGE_TOO_LARGE"


def pooling_message(request_id: str, prompt: int) -> Any:
    return add_request(pooling(request_id, prompt))


async def test_chunks_out_of_order_end_their_own_request_alone(serve: Serve) -> None:
    server = serve(generator())
    async with connected(server.address) as client:
        await client.add("neighbour", max_tokens=100, seed=3)
        for offset in (0, 32):
            chunk = tensor_pb2.TensorChunk(transfer_id=1, offset=offset, data=bytes(16))
            await client._send(pb.SessionRequest(tensor_chunk=chunk))
        for request_id, transfer_id in (("disordered", 1), ("unknown", 2)):
            tensor = tensor_pb2.Tensor(
                dtype=tensor_pb2.DATA_TYPE_FLOAT32, shape=[2, HIDDEN], chunks={"transfer_id": transfer_id, "size": 32}
            )
            await client.add(request_id, prompt=(), prompt_embeds=tensor)
        await client.until_ended("neighbour", "disordered", "unknown")
    assert "are not valid: " in client.ends["disordered"].error.message
    assert "no chunk of this tensor has arrived" in client.ends["unknown"].error.message
    assert client.ends["neighbour"].finish_reason == FinishReason.LENGTH
    assert client.tokens["neighbour"] == oracle_tokens(3, 100, VOCAB)


def names(root: Path) -> list[str]:
    return [path.name for path in root.iterdir()]


def segments(incarnation: str) -> list[str]:
    return [name for name in names(ROOT) if owner_of(incarnation) in name]


async def test_a_prompt_lies_in_shared_memory_of_the_same_host(serve: Serve) -> None:
    executor, transport = generator(), MediaTransport("1")
    server = serve(executor)
    embeds = vectors(50_000)
    async with paired(server.address, max_message_bytes=LIMIT, media=transport) as pair:
        pair.session.add(asked("large", embeds=embeds))
        pair.session.add(asked("small", embeds=vectors(5)))
        pair.session.add(asked("neighbour", max_tokens=100))
        await pair.until_ended("neighbour", "large", "small")
        assert segments("1") == [f"penstock-{owner_of('1')}.lock"]
    transport.close()
    assert segments("1") == []
    assert pair.tokens("large") == oracle_tokens(3, 8, VOCAB)
    await neighbour(pair)
    assert embeds.data in [received.data for received in received_by(executor)]
    assert transport.counts.num_bytes == {"shared_memory": 800_000, "inline": 80}


async def test_sequences_that_share_a_prompt_get_it_in_chunks_once(serve: Serve) -> None:
    executor, transport = generator(), MediaTransport("1")
    server = serve(executor, max_num_seqs=16)
    embeds = vectors(5000)
    async with paired(server.address, max_message_bytes=LIMIT, media=transport) as pair:
        for index in range(4):
            pair.session.add(asked(f"r-{index}", embeds=embeds))
        await pair.until_ended(*(f"r-{index}" for index in range(4)))
        pair.session.add(asked("alone", embeds=embeds))
        await pair.until_ended("alone")
    transport.close()
    received = received_by(executor)
    assert len({id(each) for each in received[:4]}) == 1
    assert transport.counts.num_bytes == {"chunks": 4 * 80_000, "shared_memory": 80_000}


async def test_a_prompt_that_cannot_be_read_where_it_lies_comes_in_chunks(serve: Serve, tmp_path: Path) -> None:
    server, transport = serve(generator()), MediaTransport("1")
    async with paired(server.address, max_message_bytes=LIMIT, media=transport) as pair:
        (session,) = server.io.sessions._sessions.values()
        assert session.prompts.segments is not None
        session.prompts.segments._root = tmp_path
        for request_id in ("first", "second"):
            pair.session.add(asked(request_id, embeds=vectors(50_000)))
            (end,) = await pair.until_ended(request_id)
            assert end.error is None
            assert pair.tokens(request_id) == oracle_tokens(3, 8, VOCAB)
    transport.close()
    assert segments("1") == []
    assert transport.counts.num_resent == 1
    assert transport.counts.num_bytes == {"shared_memory": 800_000, "chunks": 1_600_000}


async def test_memory_that_the_engine_does_not_read_is_not_used(serve: Serve, tmp_path: Path) -> None:
    server, transport = serve(generator()), MediaTransport("1", root=tmp_path)
    async with paired(server.address, max_message_bytes=LIMIT, media=transport) as pair:
        assert names(tmp_path) == [f"penstock-{owner_of('1')}.lock"], "the probe is there"
        pair.session.add(asked("large", embeds=vectors(50_000)))
        await pair.until_ended("large")
    assert transport.counts.num_bytes == {"chunks": 800_000}


async def test_an_engine_of_an_earlier_version_gets_prompts_in_chunks() -> None:
    transport = MediaTransport("1")
    engine = FakeEngine(max_model_len=10_000).serve_media(shared_memory=True)
    async with engine, paired(engine.address, media=transport) as pair:
        pair.session.add(asked("large", embeds=vectors(5000)))
        await pair.until_ended("large")
    transport.close()
    assert transport.counts.num_bytes == {"chunks": 80_000}


async def test_a_large_prompt_holds_up_no_other_request() -> None:
    async with FakeEngine(max_model_len=10_000) as engine:
        wide = PromptEmbeds(dtype="float32", num_tokens=1000, hidden_size=4000, data=bytes(16_000_000))
        engine.ready.max_message_bytes, engine.ready.max_tensor_bytes = LIMIT, 2**30
        async with paired(engine.address, max_message_bytes=LIMIT) as pair:
            pair.session.add(asked("large", embeds=wide))
            for index in range(20):
                pair.session.add(asked(f"r-{index}"))
            await engine.until(lambda e: len(e.requests) == 20)
            assert len(engine.chunks) < 25, "chunks went ahead of other messages"
            await engine.until(lambda e: len(e.requests) == 21)
        assert engine.requests[-1].request_id == "large"
        assert sum(len(chunk.data) for chunk in engine.chunks) == 16_000_000


async def test_segments_of_others_end_their_own_request_alone(serve: Serve) -> None:
    server = serve(generator())
    others = SegmentWriter("other")
    foreign = others.write(bytes(32))
    assert foreign is not None
    places = {
        "foreign": (foreign.name, 32),
        "path": ("../../etc/passwd", 32),
        "gone": (f"penstock-{owner_of('')}-7", 32),
        "huge": (f"penstock-{owner_of('')}-8", 2**40),
    }
    async with connected(server.address) as client:
        await client.add("neighbour", max_tokens=100, seed=3)
        for request_id, (name, size) in places.items():
            tensor = tensor_pb2.Tensor(
                dtype=tensor_pb2.DATA_TYPE_FLOAT32, shape=[2, HIDDEN], shared_memory={"name": name, "size": size}
            )
            await client.add(request_id, prompt=(), prompt_embeds=tensor)
        await client.until_ended("neighbour", *places)
    assert foreign.name in segments("other")
    others.close()
    ends = {request_id: client.ends[request_id].error for request_id in places}
    assert all(error.field.startswith("prompt_embeds.shared_memory") for error in ends.values())
    assert foreign.name in ends["foreign"].message
    assert "which is not a segment of this session" in ends["path"].message
    assert ends["gone"].reason == UNREADABLE
    assert f"size is {2**40}; the limit is {MAX_TENSOR_BYTES}" in ends["huge"].message
    assert client.tokens["neighbour"] == oracle_tokens(3, 100, VOCAB)
