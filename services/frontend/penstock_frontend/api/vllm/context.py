"""The context of requests of ``vllm.grpc.engine``."""

from collections.abc import Mapping

import msgspec
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from penstock_common.errors import InvalidArgument
from penstock_common.types.request_context import RequestContext
from penstock_frontend.api.call_context import context_of_call, deadline_after


def context_of(
    message: pb.GenerateRequest | pb.EmbedRequest, metadata: Mapping[str, str], time_left: float | None
) -> RequestContext:
    """What the message and its call say. ``time_left``: seconds until the call's deadline. Raises InvalidArgument."""
    context = msgspec.structs.replace(
        context_of_call(metadata, deadline=deadline_after(time_left)), external_request_id=message.request_id
    )
    if isinstance(message, pb.GenerateRequest) and message.HasField("data_parallel_rank"):
        context = msgspec.structs.replace(context, data_parallel_rank=_rank(message.data_parallel_rank))
    return context


def _rank(rank: int) -> int:
    if rank < 0:
        raise InvalidArgument(
            f"data_parallel_rank is {rank}; it must not be negative: leave it unset for any engine",
            field="data_parallel_rank",
        )
    return rank
