"""Validation of a request's KV source and ``kv_transfer_params``. Pure checks, safe on any thread."""

from typing import Any

import msgspec

from penstock_common.addresses import split
from penstock_common.errors import InvalidArgument, Unimplemented, quoted
from penstock_common.types.kv_transfer import MAX_PARAMS_BYTES, KvSource
from penstock_common.types.request import EngineCoreRequest
from penstock_enginecore.kv_transfer.core.base import KVConnector

PARAMS_FIELD = "kv_transfer_params"
"""Name of the request field with parameters for a plugin's KV connector."""
ID_BYTES = 16
"""Length in bytes of a lease id, and of a fingerprint."""
MAX_NAME_LENGTH = 256
"""Maximum length of ids, incarnations and addresses, in characters."""


def read_params(text: str, connector: KVConnector | None) -> dict[str, Any]:
    """Parse a request's ``kv_transfer_params``.

    Raises:
        Unimplemented: No connector accepts parameters.
        InvalidArgument: The text is not a JSON object, is too long, or is refused by the connector.
    """
    if not text:
        return {}
    field = PARAMS_FIELD
    if connector is None:
        raise Unimplemented(
            f"{field} is set, but this engine's kv_transfer.connector does not accept parameters", field=field
        )
    if (size := len(text.encode())) > MAX_PARAMS_BYTES:
        raise InvalidArgument(f"{field} has {size} bytes; it must have at most {MAX_PARAMS_BYTES}", field=field)
    try:
        params = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as e:
        raise InvalidArgument(f"{field} is not valid JSON: {e}", field=field) from None
    if not isinstance(params, dict):
        raise InvalidArgument(f"{field} is not a JSON object", field=field)
    connector.check(params)
    return params


def check_kv_transfer(request: EngineCoreRequest) -> None:
    """Raise InvalidArgument, with the name of the field, if the KV transfer fields are invalid."""
    if request.pooling_params is not None and (request.handoff_after_tokens or request.context.kv.lease):
        name = "handoff_after_tokens" if request.handoff_after_tokens else "lease_kv"
        raise InvalidArgument(f"{name} is set, but a pooling request has no output to resume", field=name)
    if request.kv_source is not None:
        _check_source(request.kv_source)


def _check_source(source: KvSource) -> None:
    for name in ("engine_id", "incarnation", "address"):
        value: str = getattr(source, name)
        if not value or len(value) > MAX_NAME_LENGTH:
            raise InvalidArgument(
                f"kv_source.{name} has {len(value)} characters; it must have 1 to {MAX_NAME_LENGTH}",
                field=f"kv_source.{name}",
            )
    try:
        split(source.address)
    except ValueError as e:
        raise InvalidArgument(
            f"kv_source.address is {quoted(source.address)}; it {e}", field="kv_source.address"
        ) from None
    for name in ("lease_id", "fingerprint"):
        if (size := len(getattr(source, name))) != ID_BYTES:
            raise InvalidArgument(
                f"kv_source.{name} has {size} bytes; it must have {ID_BYTES}", field=f"kv_source.{name}"
            )
