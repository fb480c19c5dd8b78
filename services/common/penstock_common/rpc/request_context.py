"""A request's context to ``penstock.enginecore.v1.EngineCoreRequest`` and back: both ends of the wire in one place."""

import math
import time

from penstock.enginecore.v1 import messages_pb2 as pb
from penstock_common.errors import InvalidArgument
from penstock_common.types.request_context import RequestContext


def fill_context(message: pb.EngineCoreRequest, context: RequestContext) -> None:
    """Write the context's fields into a message that has none of them yet. ``time_left`` is set when the message is sent."""
    message.external_request_id = context.external_request_id
    if context.data_parallel_rank is not None:
        message.data_parallel_rank = context.data_parallel_rank
    message.priority = context.priority
    message.tenant = context.tenant
    if context.tenant_weight != 1.0:
        message.tenant_weight = context.tenant_weight
    message.cache_salt = context.cache_salt
    message.arrival_time = context.arrival_time
    if context.deadline is not None:
        message.deadline = context.deadline
    message.trace_context.update(context.trace_context)


def context_from_proto(message: pb.EngineCoreRequest) -> RequestContext:
    """The context; unset fields take the domain's defaults. Raises InvalidArgument for a ``time_left`` that is not finite."""
    return RequestContext(
        external_request_id=message.external_request_id,
        data_parallel_rank=message.data_parallel_rank if message.HasField("data_parallel_rank") else None,
        priority=message.priority,
        tenant=message.tenant,
        tenant_weight=message.tenant_weight if message.HasField("tenant_weight") else 1.0,
        cache_salt=message.cache_salt,
        arrival_time=message.arrival_time,
        deadline=_deadline(message),
        trace_context=dict(message.trace_context),
    )


def _deadline(message: pb.EngineCoreRequest) -> float | None:
    """Seconds since the Unix epoch by this machine's clock, with which alone it is compared. Raises InvalidArgument."""
    if not message.HasField("time_left"):
        return message.deadline if message.HasField("deadline") else None
    if not math.isfinite(message.time_left):
        raise InvalidArgument(f"time_left is {message.time_left}; it must be finite", field="time_left")
    return time.time() + message.time_left
