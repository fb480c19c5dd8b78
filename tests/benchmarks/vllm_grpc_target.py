"""Load target for any server of ``vllm.grpc.engine.VllmEngine``, with the stubs that the SMG project publishes."""

import itertools
import time
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any

import grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc


class VllmEngineClient:
    """Client of ``Generate``: sends token ids and yields the pieces of the stream."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._ids = itertools.count()

    async def __aenter__(self) -> "VllmEngineClient":
        self._channel = grpc.aio.insecure_channel(self._address, options=[("grpc.max_receive_message_length", -1)])
        self._stub: Any = vllm_engine_pb2_grpc.VllmEngineStub(self._channel)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._channel.close()

    async def stream(self, prompt: list[int], output_len: int) -> AsyncIterator[int]:
        """Greedy, to the full length."""
        request = pb.GenerateRequest(
            request_id=f"bench-{time.time_ns()}-{next(self._ids)}",
            stream=True,
            tokenized=pb.TokenizedInput(original_text="", input_ids=prompt),
            sampling_params=pb.SamplingParams(
                temperature=0.0,
                top_p=1.0,
                repetition_penalty=1.0,
                max_tokens=output_len,
                min_tokens=output_len,
                ignore_eos=True,
                n=1,
            ),
        )
        async for response in self._stub.Generate(request):
            if response.HasField("chunk") and response.chunk.token_ids:
                yield len(response.chunk.token_ids)
