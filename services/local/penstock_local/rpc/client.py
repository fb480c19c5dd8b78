"""Calls of the public API through ``penstock_client``, and error messages for failed calls."""

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
    """Error if no server answers at the address, or the connection broke."""


class WrongAddressError(PenstockError):
    """Error if the address has no gRPC API. The message suggests another address."""


class TlsMismatchError(PenstockError):
    """Error if only the client or only the server uses TLS. The message names the variable to change."""


def make_client(address: str) -> AsyncClient:
    """Return a client of a running server, with TLS files and API key from the environment. Raises ConfigError if the
    address or the API key is not valid.
    """
    try:
        return AsyncClient(address, key=api_key(), channel=connect(address))
    except ValueError as e:
        raise ConfigError(f"--address {address}, {API_KEY}: {e}") from None


@contextlib.asynccontextmanager
async def client_of(address: str) -> AsyncIterator[AsyncClient]:
    """Yield a client of a running server, and close it at the end. Errors of calls are converted as by ``explained``."""
    async with make_client(address) as client, explained(address):
        yield client


@contextlib.asynccontextmanager
async def explained(address: str, *, prefix: str = PUBLIC) -> AsyncIterator[None]:
    """Convert failures of calls inside the ``with`` block.

    ``prefix`` is the prefix of the API's TLS variables. Raises RequestFailed for a server error,
    ServerUnreachableError, WrongAddressError or TlsMismatchError.
    """
    try:
        yield
    except CallError as e:
        raise await call_failure(e, address, prefix=prefix) from None


def pools(model: Model) -> bool:
    """Return whether a model computes embeddings or scores instead of text."""
    return bool(model.capabilities) and "generate" not in model.capabilities


def check_chosen(models: Collection[Model], address: str) -> None:
    """Raise ConfigError if a server has several models, so that a call must name one. ``models`` has all names."""
    # An alias has the root of its model. An adapter has a parent.
    names = {model.root: model.name for model in reversed([model for model in models if not model.parent])}
    if len(names) > 1:
        raise ConfigError(
            f"{address} serves several models; choose one with --model: {', '.join(sorted(names.values()))}"
        )


def with_media(prompt: str, files: Collection[MediaFile]) -> MixedPrompt:
    """Return the prompt with the media items before the text."""
    media: list[str | Media] = [file.message() for file in files]
    return [*media, prompt] if files else prompt


def _takes(address: str, prefix: str) -> str:
    """Return a hint for the correct address on the same host."""
    host = address.split("://")[-1].split("/")[0].rpartition(":")[0] or "localhost"
    if prefix == ADMIN:
        return f"--admin-address takes the admin gRPC API, {host}:50053 unless penstock serve has another --admin-port"
    return f"--address takes the gRPC API, {host}:50051 unless penstock serve has another --grpc-port"


async def call_failure(error: CallError, address: str, *, prefix: str = PUBLIC) -> PenstockError:
    """Convert the error of a call.

    Errors of a Penstock server have a reason. UNAVAILABLE without a reason is a connection error. UNIMPLEMENTED without
    a reason comes from a server that does not have the method.
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
        here = "public API listens on --grpc-port" if prefix == PUBLIC else "admin API listens on --admin-port"
        return Unimplemented(
            f"{address} does not support this call: the {here} of penstock serve, or the server has an older version"
        )
    failed = request_failed(error.code, error.message or error.code, field=error.field, reason=error.reason)
    failed.retry_after, failed.quota_subject = error.retry_after, error.quota_subject
    return failed


def sampling_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of ``values`` that are SamplingParams fields and not None."""
    known = sampling_pb2.SamplingParams.DESCRIPTOR.fields_by_name
    return {name: value for name, value in values.items() if name in known and value is not None}


def describe_failure(error: RequestFailed) -> str:
    """Return the server's message, with the name of the wrong field and the retry delay, if the error has them."""
    field = f" ({error.field})" if error.field and error.field not in error.message else ""
    retry = f"; try again in {error.retry_after:g} s" if error.retry_after is not None else ""
    return f"{error.code}: {error.message}{field}{retry}"


def unreachable(error: ServerUnreachableError) -> str:
    """Return the error message. If TLS is not the cause, add a hint to start a server."""
    told = str(error)
    return told if is_of_tls(told) else f"{told}\nIs a server running? Start one with: penstock serve MODEL"


def one_line(error: PenstockError) -> str:
    """Return the message of an error, whether or not a server sent the error."""
    return describe_failure(error) if isinstance(error, RequestFailed) else str(error)


def of_operators_api(error: PenstockError) -> str:
    """Return the message of an error from the admin API, with a hint about its address if nothing answers."""
    if isinstance(error, ServerUnreachableError):
        return (
            f"{one_line(error)}\nIs a frontend running? Its admin port usually accepts only connections from its "
            "own machine; set --admin-address to the right address."
        )
    return one_line(error)
