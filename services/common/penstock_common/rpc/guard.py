"""Who may call what: interceptors that refuse a call before its handler runs."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeAlias

import grpc

from penstock_common.errors import PermissionDenied, RequestFailed
from penstock_common.observability.logging import get_logger
from penstock_common.rpc.status import abort

Context = grpc.aio.ServicerContext[Any, Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"
Continuation: TypeAlias = Callable[[grpc.HandlerCallDetails], Awaitable[Handler]]
INFRASTRUCTURE = "/grpc."
"""How the methods of gRPC's own services begin: health and reflection."""

_FIRST_MESSAGE_TIMEOUT = 1.0
"""Seconds."""


class CallerGuard(grpc.aio.ServerInterceptor):
    """Asks ``check(method, metadata)``, which raises RequestFailed for a call that is not to be served.

    A refused call's messages are not read. ``check`` runs in the task of the call: what it puts into a context variable is
    there for the handler.
    """

    def __init__(self, check: Callable[[str, Mapping[str, str]], None]) -> None:
        self._check = check

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler:
        """Check, then let the call through or refuse it."""
        metadata = handler_call_details.invocation_metadata or ()
        texts = {str(key): value for key, value in metadata if isinstance(value, str)}
        try:
            self._check(str(handler_call_details.method), texts)
        except RequestFailed as e:
            return _refusal(e)
        return await continuation(handler_call_details)


class PeerGuard(grpc.aio.ServerInterceptor):
    """Lets a method's callers in by the names in their certificates (SAN), DNS names and URIs; ``PeersConfig`` says whose.

    ``allowed``: by method (``/package.Service/Method``), names of which a peer must have one; what is not there is for nobody.
    gRPC's own services are open to every peer whose certificate the listener's authority issued.
    """

    def __init__(self, allowed: Mapping[str, Sequence[str]]) -> None:
        self._allowed = {method: frozenset(map(_folded, names)) for method, names in allowed.items()}

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler:
        """Wrap the handler of a method that is not open to all, if there is one."""
        handler: Any = await continuation(handler_call_details)
        method = str(handler_call_details.method)
        if handler is None or method.startswith(INFRASTRUCTURE):
            return handler  # type: ignore[no-any-return]
        allowed = self._allowed.get(method, frozenset())
        codecs = (handler.request_deserializer, handler.response_serializer)

        async def single(request: Any, context: Context) -> Any:
            _check_peer(context, method, allowed)
            return await (handler.unary_unary or handler.stream_unary)(request, context)

        async def stream(request: Any, context: Context) -> AsyncIterator[Any]:
            try:
                _check_peer(context, method, allowed)
            except PermissionDenied:
                if handler.stream_stream:
                    await read_first(request)
                raise
            async for response in (handler.unary_stream or handler.stream_stream)(request, context):
                yield response

        if handler.unary_unary:
            return grpc.unary_unary_rpc_method_handler(single, *codecs)
        if handler.stream_unary:
            return grpc.stream_unary_rpc_method_handler(single, *codecs)
        if handler.unary_stream:
            return grpc.unary_stream_rpc_method_handler(stream, *codecs)
        return grpc.stream_stream_rpc_method_handler(stream, *codecs)


def peer_names(context: Context) -> Sequence[str]:
    """DNS names and URIs of the peer's certificate; nothing without one."""
    found: Mapping[str, Iterable[bytes]] = context.auth_context() or {}
    return [name.decode("utf-8", "replace") for key in ("peer_dns", "peer_uri") for name in found.get(key, ())]


def _check_peer(context: Context, method: str, allowed: frozenset[str]) -> None:
    names = peer_names(context)
    if allowed.isdisjoint(map(_folded, names)):
        seen = ", ".join(names) or "no name"
        get_logger().warning("refused a peer", method=method, peer=context.peer(), names=seen, allowed=sorted(allowed))
        raise PermissionDenied(
            f"the peer's certificate is for {seen}; {method} is for {', '.join(sorted(allowed)) or 'nobody'}",
            reason="PEER_NOT_ALLOWED",
        )


async def read_first(messages: AsyncIterator[object]) -> None:
    """Let a stream's client finish its first write: a client in Python that is refused in the midst of one sees INTERNAL."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_FIRST_MESSAGE_TIMEOUT):
            await anext(messages, None)


def _folded(name: str) -> str:
    """DNS names do not tell upper from lower case; URIs do."""
    return name if "://" in name else name.lower()


def _refusal(error: RequestFailed) -> Handler:
    """A handler that ends any call with this error. Its messages stay undecoded, so its kind need not be the method's."""

    async def refuse(_: Any, context: Context) -> NoReturn:
        await abort(context, error)

    return grpc.stream_unary_rpc_method_handler(refuse)
