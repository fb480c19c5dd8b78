"""Load target for the public API of a server in another process."""

from collections.abc import AsyncIterator
from types import TracebackType

from penstock.common.v1.sampling_pb2 import SamplingParams
from penstock.inference.v1 import messages_pb2 as pb
from penstock.inference.v1 import service_pb2_grpc
from penstock_common.rpc.channel import make_channel


class PublicClient:
    """Client of ``Generate``: sends token ids and yields the pieces of the stream."""

    def __init__(self, address: str) -> None:
        self._address = address

    async def __aenter__(self) -> "PublicClient":
        self._channel = make_channel(self._address)
        self._stub = service_pb2_grpc.InferenceServiceStub(self._channel)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._channel.close()

    async def stream(self, prompt: list[int], output_len: int) -> AsyncIterator[int]:
        """Greedy, to the full length."""
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=prompt),
            sampling_params=SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True),
        )
        async for response in self._stub.Generate(request):
            if response.token_ids:
                yield len(response.token_ids)
