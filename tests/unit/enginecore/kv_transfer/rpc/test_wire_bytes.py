"""Overhead in bytes of a pull over gRPC: messages at both ends, and all traffic of the connections."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest

from penstock_common.types.kv_transfer import BlockName
from penstock_enginecore.kv_transfer.rpc.transports import MESSAGE_BYTES, GrpcSender
from tests.fakes.kv_engines import FakeKvEngine, content, names_of
from tests.fakes.network.tcp_proxy import TcpProxy

BLOCKS = 64
MOST = 1.02
FRAME = 5
"""Number of bytes before each gRPC message."""
Codec = Callable[[Any], Any]


class Counted:
    """Counts the bytes of a stream's messages, with their frames, by end and direction."""

    def __init__(self) -> None:
        self.num_bytes: Counter[str] = Counter()
        self._codecs: list[Codec] = []

    def count(self, where: str, codec: Codec) -> Codec:
        if codec in self._codecs:  # the codec belongs to a handler that an observer has wrapped
            return codec

        def counting(message: Any) -> Any:
            result = codec(message)
            data = message if isinstance(message, bytes) else result
            self.num_bytes[where] += len(data) + FRAME
            return result

        self._codecs.append(counting)
        return counting

    def channel(self, channel: grpc.aio.Channel) -> Any:
        """Return a channel whose streams are counted at the pulling end."""
        of_the_channel = channel.stream_stream

        def stream_stream(method: str, request_serializer: Codec, response_deserializer: Codec, **more: Any) -> Any:
            return of_the_channel(
                method,
                request_serializer=self.count("target, out", request_serializer),
                response_deserializer=self.count("target, in", response_deserializer),
                **more,
            )

        channel.stream_stream = stream_stream  # type: ignore[method-assign]
        return channel

    def handlers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Count the streams of engines that start from now on as sources."""
        made = grpc.stream_stream_rpc_method_handler

        def handler(behavior: Any, request_deserializer: Codec, response_serializer: Codec) -> Any:
            return made(
                behavior,
                request_deserializer=self.count("source, in", request_deserializer),
                response_serializer=self.count("source, out", response_serializer),
            )

        monkeypatch.setattr(grpc, "stream_stream_rpc_method_handler", handler)


@pytest.mark.parametrize("block_bytes", [5, MESSAGE_BYTES, 2 * MESSAGE_BYTES + 3])
def test_blocks_of_gpus_and_of_cpus_are_the_same_messages(block_bytes: int) -> None:
    """A GPU's block is a memoryview, and a CPU's block is bytes."""
    name, data = BlockName(0, b"hash"), bytes(range(251)) * (block_bytes // 251) + bytes(block_bytes % 251)
    of_cpu, of_gpu = (
        [message.SerializeToString(deterministic=True) for message in GrpcSender().messages(1, name, each)]
        for each in (data, memoryview(bytearray(data)))
    )
    assert of_cpu == of_gpu


@pytest.mark.parametrize("block_bytes", [8 << 10, 384 << 10, 5 << 19], ids=["8 KiB", "384 KiB", "2.5 MiB, in chunks"])
async def test_a_pull_takes_little_more_than_its_blocks(
    block_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block has 384 KiB, like 16 tokens of a model with 100 million parameters."""
    counted, count = Counted(), BLOCKS if block_bytes < 1 << 20 else 8
    with ExitStack() as ends:
        counted.handlers(monkeypatch)
        source, target = (
            ends.enter_context(FakeKvEngine(name, block_bytes=block_bytes, num_blocks=2 * BLOCKS + 1, root=tmp_path))
            for name in "ab"
        )
        connect = target.peers._connect
        target.peers._connect = lambda address: counted.channel(connect(address))
        cable = TcpProxy(source.transfer.port)
        await cable.start()
        names = names_of("prompt", count)
        given = msgspec.structs.replace(source.grant(names, time.monotonic()), address=f"127.0.0.1:{cable.port}")
        request = target.request(given)
        target.peers.opened(request)
        found = await asyncio.to_thread(target.fetch(request, names).wait)
        assert found == {name: content(name, block_bytes) for name in names}
        on_the_cable = cable.num_bytes
        target.peers.closed(request)
        await cable.close()
    payload = count * block_bytes
    assert source.counts.num_bytes["out", "grpc"] == target.counts.num_bytes["in", "grpc"] == payload
    messages, at_the_target = counted.num_bytes["source, out"], counted.num_bytes["target, in"]
    assert messages >= at_the_target >= payload  # the target may not have read the last message
    assert messages - at_the_target <= 64
    both_ways = messages + counted.num_bytes["target, out"]
    assert payload <= both_ways <= MOST * payload, f"messages: {both_ways / payload:.5f} times the blocks"
    assert payload <= on_the_cable <= MOST * payload, f"on the cable: {on_the_cable / payload:.5f} times the blocks"
