"""Context of the requests of a call, read from the call's metadata. gRPC metadata and HTTP headers use the same names."""

import time
from collections.abc import Mapping

from penstock.inference.v1 import messages_pb2 as pb
from penstock_common.errors import InvalidArgument, quoted
from penstock_common.types.request import RequestContext
from penstock_frontend.call_types import tenant_of_caller

_INT32 = range(-(2**31), 2**31)
_UINT32 = range(2**32)
_TRACE_HEADERS = ("traceparent", "tracestate")
_RANK_HEADERS = ("x-penstock-data-parallel-rank", "x-data-parallel-rank")
"""Names of the header that chooses the engine's rank, in Penstock and in vLLM."""
_NO_HINTS = pb.RoutingHints()


def context_of_call(
    metadata: Mapping[str, str], *, deadline: float | None = None, hints: pb.RoutingHints = _NO_HINTS
) -> RequestContext:
    """Return the context for the requests of a call. A value in ``hints`` of the message overrides the value in the
    call's ``metadata``.

    ``deadline`` is the call's deadline in seconds since the Unix epoch. Raises InvalidArgument, which names the
    metadata key with the wrong value.
    """
    return RequestContext(
        data_parallel_rank=hints.data_parallel_rank
        if hints.HasField("data_parallel_rank")
        else _rank_of_call(metadata),
        priority=hints.priority
        if hints.HasField("priority")
        else _integer(metadata, "x-penstock-priority", _INT32) or 0,
        tenant=tenant_of_message(hints, metadata),
        trace_context=dict(hints.trace_context) or {k: metadata[k] for k in _TRACE_HEADERS if k in metadata},
        deadline=deadline,
    )


def tenant_of_call(metadata: Mapping[str, str]) -> str:
    """Return the tenant of a call before the message of the call is read. The result is the caller's own tenant, or the
    tenant that ``metadata`` names.
    """
    return tenant_of_caller(metadata.get("x-penstock-tenant", ""))


def tenant_of_message(hints: pb.RoutingHints, metadata: Mapping[str, str]) -> str:
    """Return the tenant that ``hints`` of a message name. If ``hints`` name no tenant, return the tenant of the call."""
    return tenant_of_caller(hints.tenant) if hints.tenant else tenant_of_call(metadata)


def deadline_after(time_left: float | None) -> float | None:
    """Return the deadline that is ``time_left`` seconds from now, in seconds since the Unix epoch. None means no
    deadline.
    """
    return None if time_left is None else time.time() + time_left


def _rank_of_call(metadata: Mapping[str, str]) -> int | None:
    ranks = (_integer(metadata, key, _UINT32) for key in _RANK_HEADERS)
    return next((rank for rank in ranks if rank is not None), None)


def _integer(metadata: Mapping[str, str], key: str, allowed: range) -> int | None:
    text = metadata.get(key)
    if text is None:
        return None
    try:
        value = int(text)
    except ValueError:
        value = allowed.stop
    if value not in allowed:
        raise InvalidArgument(
            f"metadata {key} is {quoted(text)}; it must be an integer from {allowed.start} to {allowed.stop - 1}",
            field=key,
        )
    return value
