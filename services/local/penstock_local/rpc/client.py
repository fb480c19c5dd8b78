"""Calls of the public API through ``penstock_client``, and the failures of calls in words."""

import contextlib
from collections.abc import AsyncIterator, Collection, Mapping
from typing import Any

from penstock.common.v1 import sampling_pb2
from penstock_client import AsyncClient, Media, Model
from penstock_client import PenstockError as CallError
from penstock_client.requests import MixedPrompt
from penstock_common.errors import ConfigError, PenstockError, RequestFailed, Unimplemented, request_failed
from penstock_common.rpc.credentials import is_of_tls
from penstock_local.media_files import MediaFile
from penstock_local.rpc.connect import ADMIN, API_KEY, PUBLIC, api_key, connect, is_http_port, mismatch


class ServerUnreachableError(PenstockError):
    """Nothing answers at the address, or the connection broke."""


class WrongAddressError(PenstockError):
    """There is no gRPC API at the address. The message says which address to give."""


class TlsMismatchError(PenstockError):
    """A server is there; one side speaks TLS and the other does not. The message says what to set."""


def make_client(address: str) -> AsyncClient:
    """Return a client of a running server, with TLS and key of the environment. Raises ConfigError."""
    try:
        return AsyncClient(address, key=api_key(), channel=connect(address))
    except ValueError as e:
        raise ConfigError(f"--address {address}, {API_KEY}: {e}") from None


@contextlib.asynccontextmanager
async def client_of(address: str) -> AsyncIterator[AsyncClient]:
    """The same, closed at the end. Calls inside fail as inside ``explained``."""
    async with make_client(address) as client, explained(address):
        yield client


@contextlib.asynccontextmanager
async def explained(address: str, *, prefix: str = PUBLIC) -> AsyncIterator[None]:
    """Raise RequestFailed for an error of the server, ServerUnreachableError when there is none, WrongAddressError and
    TlsMismatchError, where a call inside has failed. ``prefix``: of the API that is called.
    """
    try:
        yield
    except CallError as e:
        raise await call_failure(e, address, prefix=prefix) from None


def pools(model: Model) -> bool:
    """Return whether a model makes vectors or scores, and no text."""
    return bool(model.capabilities) and "generate" not in model.capabilities


def with_media(prompt: str, files: Collection[MediaFile]) -> MixedPrompt:
    """Return a prompt with media before it."""
    media: list[str | Media] = [file.message() for file in files]
    return [*media, prompt] if files else prompt


def _takes(address: str, prefix: str) -> str:
    """Which flag takes which address of the same host."""
    host = address.split("://")[-1].split("/")[0].rpartition(":")[0] or "localhost"
    if prefix == ADMIN:
        return f"--admin-address is the operators' gRPC API, {host}:50053 unless --admin-port of penstock serve says another"
    return f"--address is the gRPC API, {host}:50051 unless --grpc-port of penstock serve says another"


async def call_failure(error: CallError, address: str, *, prefix: str = PUBLIC) -> PenstockError:
    """Errors of a Penstock server have a reason; an UNAVAILABLE without one is the connection's, an UNIMPLEMENTED that of a
    server that has no such call.
    """
    if error.code == "UNAVAILABLE" and not error.reason:
        if why := await mismatch(address, prefix=prefix):
            return TlsMismatchError(why)
        if address.startswith(("http://", "https://")):
            return WrongAddressError(f"{address} is a URL; {_takes(address, prefix)}")
        if await is_http_port(address):
            return WrongAddressError(f"{address} is an HTTP port; {_takes(address, prefix)}")
        return ServerUnreachableError(f"no connection to {address}: {error.message}")
    if error.code == "UNIMPLEMENTED" and not error.reason:
        here = "public API listens on --grpc-port" if prefix == PUBLIC else "operators' API listens on --admin-port"
        return Unimplemented(f"{address} does not know this call: the {here} of penstock serve, or the server is older")
    failed = request_failed(error.code, error.message or error.code, field=error.field, reason=error.reason)
    failed.retry_after, failed.quota_subject = error.retry_after, error.quota_subject
    return failed


def sampling_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of ``values`` that are SamplingParams fields and are given."""
    known = sampling_pb2.SamplingParams.DESCRIPTOR.fields_by_name
    return {name: value for name, value in values.items() if name in known and value is not None}


def describe_failure(error: RequestFailed) -> str:
    """The server's message with the field at fault, if one is, and when to try again."""
    field = f" ({error.field})" if error.field and error.field not in error.message else ""
    retry = f"; try again in {error.retry_after:g} s" if error.retry_after is not None else ""
    return f"{error.code}: {error.message}{field}{retry}"


def unreachable(error: ServerUnreachableError) -> str:
    """Why no server answers, and how to start one, unless one has answered and it is TLS that fails."""
    told = str(error)
    return told if is_of_tls(told) else f"{told}\nIs a server running? Start one with: penstock serve MODEL"


def one_line(error: PenstockError) -> str:
    """The same, also of errors that no server has sent."""
    return describe_failure(error) if isinstance(error, RequestFailed) else str(error)


def of_operators_api(error: PenstockError) -> str:
    """The same of a call to the operators' API, with where that listens when nothing answers."""
    if isinstance(error, ServerUnreachableError):
        return (
            f"{one_line(error)}\nIs a frontend running? Its operators' port listens on its own machine alone, as a rule; "
            "--admin-address says where."
        )
    return one_line(error)
