"""The shared secret on an internal gRPC port: callers show a token, and the server proves that it knows the secret as well."""

import asyncio
import contextlib
import hashlib
import hmac
import secrets
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn, TypeAlias

import grpc

from penstock_common.errors import Unauthenticated
from penstock_common.observability.logging import get_logger
from penstock_common.rpc.guard import INFRASTRUCTURE, Context, Continuation, Handler, read_first
from penstock_common.rpc.status import abort
from penstock_common.security.shared_secret import SECRET_SETTING, SharedSecret

TOKEN_KEY = "penstock-port-token"  # noqa: S105 - the name of a metadata entry
NONCE_KEY = "penstock-port-nonce"
PROOF_KEY = "penstock-port-proof"
_NONCE_BYTES = 32
_PROOF_TIMEOUT = 30.0
"""Seconds that a server has to prove that it knows the secret."""

Metadata: TypeAlias = "tuple[tuple[str, str], ...]"


class PortSecret:
    """The secret of a deployment, for one internal port. ``purpose`` names the port: its token is worth nothing on others."""

    def __init__(self, secret: SharedSecret, purpose: str) -> None:
        self._secret = secret
        self._purpose = purpose
        self._key = secret.key(f"{purpose} proof")

    def accepts(self, token: str) -> bool:
        """Return whether a token is the token of the port. The time this takes tells nothing about the right token."""
        return self._secret.accepts(self._purpose, token)

    def proof(self, nonce: str) -> str:
        """Return the server's answer to a nonce, which only one who knows the secret can give."""
        return hmac.digest(self._key, nonce.encode(), hashlib.sha256).hex()

    def metadata(self) -> Metadata:
        """Return what a client sends with a call: the token, and a nonce of its own."""
        return ((TOKEN_KEY, self._secret.token(self._purpose)), (NONCE_KEY, secrets.token_hex(_NONCE_BYTES)))

    async def check_server(self, call: "grpc.aio.StreamStreamCall[Any, Any]", sent: Metadata) -> None:
        """Wait until the server has answered the nonce. Send nothing on the call before this returns.

        Args:
            call: The call, which was begun with the metadata ``sent``.
            sent: What ``metadata`` returned.

        Raises:
            Unauthenticated: The server does not know the secret.
            AioRpcError: The server refused the call, or cannot be reached.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PROOF_TIMEOUT):
                answered = dict(_texts(await call.initial_metadata() or ())).get(PROOF_KEY, "")
                if hmac.compare_digest(answered.encode(), self.proof(dict(sent)[NONCE_KEY]).encode()):
                    return
                if not answered and await call.code() is not grpc.StatusCode.OK:
                    await call.read()  # raises what the call failed with
        call.cancel()
        raise Unauthenticated(
            f"the server does not know the secret of {SECRET_SETTING}; give both sides the same secret",
            reason="SERVER_UNKNOWN",
        )


class SecretGuard(grpc.aio.ServerInterceptor):
    """Refuses calls without the token of the port before anything else is done for them, and proves to others that the server
    knows the secret. gRPC's own services are open. Without a secret it refuses calls that show a token: their clients wait for a
    proof.
    """

    def __init__(self, secret: PortSecret | None) -> None:
        self._secret = secret

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler:
        """Refuse the call, or prove the secret and let the call through."""
        method = str(handler_call_details.method)
        if method.startswith(INFRASTRUCTURE):
            return await continuation(handler_call_details)
        sent = dict(_texts(handler_call_details.invocation_metadata or ()))
        token = sent.get(TOKEN_KEY, "")
        if self._secret is None:
            if not token:
                return await continuation(handler_call_details)
            return _refusal(method, "the caller has the secret of {}, and this side has none", "SECRET_NOT_SET", token)
        if not self._secret.accepts(token):
            return _refusal(method, "{} is needed here", "SECRET_WRONG" if token else "SECRET_MISSING", token)
        handler: Any = await continuation(handler_call_details)
        if handler is None or handler.stream_stream is None:
            return handler  # type: ignore[no-any-return]
        proof = self._secret.proof(sent.get(NONCE_KEY, ""))

        async def proven(requests: Any, context: Context) -> Any:
            await context.send_initial_metadata(((PROOF_KEY, proof),))
            async for response in handler.stream_stream(requests, context):
                yield response

        return grpc.stream_stream_rpc_method_handler(proven, handler.request_deserializer, handler.response_serializer)


def _refusal(method: str, why: str, reason: str, token: str) -> Handler:
    async def refuse(requests: Any, context: Context) -> NoReturn:
        get_logger().warning(
            "refused a peer because of the shared secret", method=method, peer=context.peer(), reason=reason
        )
        if not token:  # those that show one wait for the answer before they send anything
            await read_first(requests)  # its bytes; nothing is decoded
        message = f"{method}: {why.format(SECRET_SETTING)}; give both sides the same secret"
        await abort(context, Unauthenticated(message, reason=reason))

    # Its messages stay undecoded, so its kind need not be the method's.
    return grpc.stream_unary_rpc_method_handler(refuse)


def _texts(metadata: Iterable[Any]) -> Iterable[tuple[str, str]]:
    entries = metadata.items() if isinstance(metadata, Mapping) else metadata
    return ((str(key), value) for key, value in entries if isinstance(value, str))
