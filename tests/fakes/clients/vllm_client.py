"""Client of ``vllm.grpc.engine.VllmEngine``, for tests of the protocol of gateways and load generators."""

from collections.abc import Sequence
from typing import Any

from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as rpc

from tests.fakes.frontends.frontend_server import FrontendServer, collect
from tests.fakes.patience import PATIENCE

PROMPT = (7, 8, 9)


class VllmClient:
    """Client. ``outputs(...)`` returns all messages of a Generate call; ``stub`` has all methods."""

    def __init__(self, frontend: FrontendServer) -> None:
        self.stub: Any = rpc.VllmEngineStub(frontend.channel)

    def generate(self, **fields: Any) -> Any:
        """Start a Generate call. Keywords that are not fields of GenerateRequest are sampling parameters."""
        return self.stub.Generate(make_request(**fields), timeout=PATIENCE)

    async def outputs(self, **fields: Any) -> list[Any]:
        """Return the chunks and ``complete`` messages of a Generate call. Raises RequestFailed if the call fails."""
        return [getattr(m, m.WhichOneof("response")) for m in await collect(self.generate(**fields))]


def make_request(**fields: Any) -> pb.GenerateRequest:
    """Return a GenerateRequest for token ids, or for ``text`` if it is given."""
    own = {name: fields.pop(name) for name in list(fields) if name in pb.GenerateRequest.DESCRIPTOR.fields_by_name}
    if not own.keys() & {"text", "tokenized"}:
        own["tokenized"] = pb.TokenizedInput(original_text="unused", input_ids=PROMPT)
    return pb.GenerateRequest(sampling_params=pb.SamplingParams(**fields), **own)


def chunks(outputs: Sequence[Any], index: int = 0) -> list[pb.GenerateStreamChunk]:
    """Return the chunks of one sequence."""
    return [o for o in outputs if isinstance(o, pb.GenerateStreamChunk) and o.index == index]


def completes(outputs: Sequence[Any]) -> list[pb.GenerateComplete]:
    """Return the last message of each sequence, sorted by index."""
    return sorted((o for o in outputs if isinstance(o, pb.GenerateComplete)), key=lambda o: o.index)


def joined(parts: Sequence[pb.GenerateStreamChunk]) -> list[int]:
    """Return the tokens of all chunks, concatenated."""
    return [token for part in parts for token in part.token_ids]
