"""How the commands connect to a server: what the environment says of TLS and credentials."""

import os
from collections.abc import Callable, Mapping
from typing import Any

import grpc

from penstock_common.config.sections import ClientTlsConfig
from penstock_common.rpc.channel import make_channel
from penstock_common.rpc.credentials import ClientCredentials

API_KEY = "PENSTOCK_API_KEY"
"""Variable with an API key or a token."""
PUBLIC, ADMIN = "PENSTOCK_TLS", "PENSTOCK_ADMIN_TLS"
"""How variables with the fields of ClientTlsConfig begin, for the public API and the operators'."""
_FIELDS = ("ca", "certificate", "key", "server_name")
VARIABLES = frozenset({API_KEY, *(f"{prefix}_{field.upper()}" for prefix in (PUBLIC, ADMIN) for field in _FIELDS)})


def connect(address: str, *, prefix: str = PUBLIC, environ: Mapping[str, str] = os.environ) -> grpc.aio.Channel:
    """A channel to a server. Raises ConfigError for files that cannot be used."""
    tls = ClientTlsConfig(**{field: environ.get(f"{prefix}_{field.upper()}", "") for field in _FIELDS})
    key = environ.get(API_KEY, "")
    interceptors = [_Unary(key), _Stream(key)] if key else []
    return make_channel(address, credentials=ClientCredentials(tls, field=prefix), interceptors=interceptors)


class _Unary(grpc.aio.UnaryUnaryClientInterceptor):
    def __init__(self, key: str) -> None:
        self._key = key

    async def intercept_unary_unary(
        self, continuation: Callable[..., Any], client_call_details: grpc.aio.ClientCallDetails, request: Any
    ) -> Any:
        """Show the key."""
        return await continuation(_with_key(client_call_details, self._key), request)


class _Stream(grpc.aio.UnaryStreamClientInterceptor):
    def __init__(self, key: str) -> None:
        self._key = key

    async def intercept_unary_stream(
        self, continuation: Callable[..., Any], client_call_details: grpc.aio.ClientCallDetails, request: Any
    ) -> Any:
        """Show the key."""
        return await continuation(_with_key(client_call_details, self._key), request)


def _with_key(details: grpc.aio.ClientCallDetails, key: str) -> grpc.aio.ClientCallDetails:
    metadata = grpc.aio.Metadata(*(details.metadata or ()), ("authorization", f"Bearer {key}"))
    return details._replace(metadata=metadata)  # type: ignore[attr-defined,no-any-return]  # a named tuple, says gRPC
