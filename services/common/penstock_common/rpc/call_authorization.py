"""Authorization of calls: interceptors that refuse calls, and checks of the shared secret on internal ports."""

import asyncio
import contextlib
import hashlib
import hmac
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeAlias

import grpc

from penstock_common.errors import PermissionDenied, RequestFailed, Unauthenticated
from penstock_common.observability.logging import get_logger
from penstock_common.rpc.status import abort
from penstock_common.security.shared_secret import SECRET_SETTING, SharedSecret

Context = grpc.aio.ServicerContext[Any, Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"
Continuation: TypeAlias = Callable[[grpc.HandlerCallDetails], Awaitable[Handler]]
INFRASTRUCTURE = "/grpc."
"""Prefix of the methods of gRPC's own services: health and reflection."""

_FIRST_MESSAGE_TIMEOUT = 1.0
"""Timeout in seconds for a client's first message."""


class CallerGuard(grpc.aio.ServerInterceptor):
    """Interceptor that calls ``check(method, metadata)`` for each call. ``check`` raises RequestFailed to refuse the
    call.

    The messages of a refused call are not read. ``check`` runs in the task of the call, so the handler can read context
    variables that ``check`` sets.
    """

    def __init__(self, check: Callable[[str, Mapping[str, str]], None]) -> None:
        self._check = check

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler:
        """Check the call, then serve or refuse it."""
        metadata = handler_call_details.invocation_metadata or ()
        texts = {str(key): value for key, value in metadata if isinstance(value, str)}
        try:
            self._check(str(handler_call_details.method), texts)
        except RequestFailed as e:
            return _refusal(e)
        return await continuation(handler_call_details)


class PeerGuard(grpc.aio.ServerInterceptor):
    """Interceptor that authorizes callers by the names in their certificates (SAN): DNS names and URIs.

    ``PeersConfig`` defines the allowed names. gRPC's own services are open to every peer whose certificate the
    listener's authority has issued.

    Args:
        allowed: Allowed names by method (``/package.Service/Method``). A peer needs one of the method's names. No peer
            may call methods that are not in ``allowed``.
    """

    def __init__(self, allowed: Mapping[str, Sequence[str]]) -> None:
        self._allowed = {method: frozenset(map(_folded, names)) for method, names in allowed.items()}

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler:
        """Wrap the handler so that it checks the peer, if the method exists and is not open to all peers."""
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
    """Return the DNS names and URIs in the peer's certificate, or an empty sequence if the peer has no certificate."""
    found: Mapping[str, Iterable[bytes]] = context.auth_context() or {}
    return [name.decode("utf-8", "replace") for key in ("peer_dns", "peer_uri") for name in found.get(key, ())]


def _check_peer(context: Context, method: str, allowed: frozenset[str]) -> None:
    names = peer_names(context)
    if allowed.isdisjoint(map(_folded, names)):
        seen = ", ".join(names) or "no name"
        get_logger().warning(
            "refused a call, because the caller's certificate has no allowed name",
            method=method,
            peer=context.peer(),
            names=seen,
            allowed=sorted(allowed),
        )
        raise PermissionDenied(
            f"the peer's certificate has the names {seen}; {method} requires one of {', '.join(sorted(allowed)) or 'none'}",
            reason="PEER_NOT_ALLOWED",
        )


async def read_first(messages: AsyncIterator[object]) -> None:
    """Wait until a stream's client has finished its first write.

    If the server refused a Python client's call during a write, the client would report INTERNAL instead of the
    server's status.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_FIRST_MESSAGE_TIMEOUT):
            await anext(messages, None)


def _folded(name: str) -> str:
    """Return the name in a form that can be compared. DNS names are case-insensitive; URIs are case-sensitive."""
    return name if "://" in name else name.lower()


def _refusal(error: RequestFailed) -> Handler:
    """Return a handler that ends any call with this error. The handler decodes no messages, so it works for all kinds
    of methods.
    """

    async def refuse(_: Any, context: Context) -> NoReturn:
        await abort(context, error)

    return grpc.stream_unary_rpc_method_handler(refuse)


# The shared secret on an internal gRPC port. Callers send a token, and the server proves that it also knows the secret.

TOKEN_KEY = "penstock-port-token"  # noqa: S105 - the name of a metadata entry
NONCE_KEY = "penstock-port-nonce"
PROOF_KEY = "penstock-port-proof"
_NONCE_BYTES = 32
_PROOF_TIMEOUT = 30.0
"""Seconds in which a server must prove that it knows the secret."""

Metadata: TypeAlias = "tuple[tuple[str, str], ...]"


class PortSecret:
    """Tokens and proofs for one internal port, derived from the shared secret. ``purpose`` names the port.

    Other ports do not accept the token of this port.
    """

    def __init__(self, secret: SharedSecret, purpose: str) -> None:
        self._secret = secret
        self._purpose = purpose
        self._key = secret.key(f"{purpose} proof")

    def accepts(self, token: str) -> bool:
        """Return whether ``token`` is the token of the port. The comparison takes constant time."""
        return self._secret.accepts(self._purpose, token)

    def proof(self, nonce: str) -> str:
        """Return the server's answer to a nonce. Only a server that knows the secret can compute the answer."""
        return hmac.digest(self._key, nonce.encode(), hashlib.sha256).hex()

    def metadata(self) -> Metadata:
        """Return the metadata for a client's call: the token and a new nonce."""
        return ((TOKEN_KEY, self._secret.token(self._purpose)), (NONCE_KEY, secrets.token_hex(_NONCE_BYTES)))

    async def check_server(self, call: "grpc.aio.StreamStreamCall[Any, Any]", sent: Metadata) -> None:
        """Wait until the server has proved that it knows the secret. Send nothing on the call before this method
        returns.

        Args:
            call: The call, which was started with the metadata ``sent``.
            sent: The result of ``metadata``.

        Raises:
            Unauthenticated: The server does not have the shared secret.
            AioRpcError: The server refused the call, or cannot be reached.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PROOF_TIMEOUT):
                answered = dict(_texts(await call.initial_metadata() or ())).get(PROOF_KEY, "")
                if hmac.compare_digest(answered.encode(), self.proof(dict(sent)[NONCE_KEY]).encode()):
                    return
                if not answered and await call.code() is not grpc.StatusCode.OK:
                    await call.read()  # read() raises the call's error
        call.cancel()
        raise Unauthenticated(
            f"the server does not have the secret in {SECRET_SETTING}; give both sides the same secret",
            reason="SERVER_UNKNOWN",
        )


class SecretGuard(grpc.aio.ServerInterceptor):
    """Interceptor that refuses calls without the port's token, and proves that the server knows the secret.

    The check comes before any other work on the call. gRPC's own services need no token. If no secret is configured,
    calls with a token are refused, because their clients wait for a proof.
    """

    def __init__(self, secret: PortSecret | None) -> None:
        self._secret = secret

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler:
        """Refuse the call, or prove the secret and serve the call."""
        method = str(handler_call_details.method)
        if method.startswith(INFRASTRUCTURE):
            return await continuation(handler_call_details)
        sent = dict(_texts(handler_call_details.invocation_metadata or ()))
        token = sent.get(TOKEN_KEY, "")
        if self._secret is None:
            if not token:
                return await continuation(handler_call_details)
            return _secret_refusal(
                method, "the caller uses {0}, but {0} is not set in this process", "SECRET_NOT_SET", token
            )
        if not self._secret.accepts(token):
            return _secret_refusal(
                method,
                "the caller does not have the secret in {}",
                "SECRET_WRONG" if token else "SECRET_MISSING",
                token,
            )
        handler: Any = await continuation(handler_call_details)
        if handler is None or handler.stream_stream is None:
            return handler  # type: ignore[no-any-return]
        proof = self._secret.proof(sent.get(NONCE_KEY, ""))

        async def proven(requests: Any, context: Context) -> Any:
            await context.send_initial_metadata(((PROOF_KEY, proof),))
            async for response in handler.stream_stream(requests, context):
                yield response

        return grpc.stream_stream_rpc_method_handler(proven, handler.request_deserializer, handler.response_serializer)


def _secret_refusal(method: str, why: str, reason: str, token: str) -> Handler:
    async def refuse(requests: Any, context: Context) -> NoReturn:
        get_logger().warning(
            "refused a call, because the caller and this service do not have the same shared secret",
            method=method,
            peer=context.peer(),
            reason=reason,
        )
        if not token:  # clients with a token wait for the answer before they send anything
            await read_first(requests)  # read the bytes without decoding them
        message = f"{method}: {why.format(SECRET_SETTING)}; give both sides the same secret"
        await abort(context, Unauthenticated(message, reason=reason))

    # The handler decodes no messages, so it works for all kinds of methods.
    return grpc.stream_unary_rpc_method_handler(refuse)


def _texts(metadata: Iterable[Any]) -> Iterable[tuple[str, str]]:
    entries = metadata.items() if isinstance(metadata, Mapping) else metadata
    return ((str(key), value) for key, value in entries if isinstance(value, str))
