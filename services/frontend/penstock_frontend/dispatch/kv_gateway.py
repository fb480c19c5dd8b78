"""Request parameters ``kv_transfer_params``, with which external gateways split a request between two servers. The
format is that of vLLM's NIXL connector.
"""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from penstock_common.addresses import split, with_port
from penstock_common.errors import InvalidArgument, Unimplemented, quoted
from penstock_common.types.kv_transfer import MAX_PARAMS_BYTES, KvParams, KvSource
from penstock_frontend.call_types import Finish
from penstock_frontend.config import DisaggregationConfig
from penstock_frontend.interfaces import EngineView

CONNECTOR = "NixlConnector"
"""Name of the connector that external gateways receive if the engines have no custom connector."""
_ID_BYTES = 16
_FLAGS = ("do_remote_decode", "do_remote_prefill")
_OWN = "penstock"
"""Key in ``kv_transfer_params`` under which the values are that only Penstock uses."""
_NONE = KvParams()


class KvGateway:
    """Reads ``kv_transfer_params`` of requests, and writes ``kv_transfer_params`` of responses.

    If ``do_remote_decode`` is true in a request, the engine keeps the request's KV blocks when the request ends. The
    client copies ``kv_transfer_params`` from the response into the second request. The engine of the second request
    then fetches the blocks. Engines fetch blocks only from engines in ``view``, and from the addresses in
    ``allowed_addresses``. If the engines have a custom connector, this connector gets ``kv_transfer_params`` unchanged.
    """

    def __init__(self, config: DisaggregationConfig, view: EngineView) -> None:
        self._config = config
        self._view = view

    @property
    def serves(self) -> bool:
        """True if this frontend accepts ``kv_transfer_params`` in requests."""
        return self._config.gateway

    @property
    def connector(self) -> str:
        """Name of the connector that defines the format of ``kv_transfer_params``."""
        return self._config.connector or CONNECTOR

    def read(self, given: Any, *, n: int, field: str, of: str = "n") -> KvParams:
        """Return the parsed ``kv_transfer_params`` of a request. JSON null and an empty object mean that the request
        has no such parameters.

        Args:
            given: the decoded JSON value of the parameters.
            n: number of sequences that the request asks for.
            field: name of the field with the parameters, for error messages.
            of: name of the field that ``n`` comes from, for error messages.

        Raises:
            Unimplemented: this frontend does not accept the parameters.
            InvalidArgument: the parameters are not valid.
        """
        if given is None or given == {}:
            return _NONE
        if not self.serves:
            raise Unimplemented(f"{field} is not supported: disaggregation.gateway is false", field=field)
        if not isinstance(given, dict):
            raise InvalidArgument(f"{field} is not a JSON object", field=field)
        text = msgspec.json.encode(given)
        if len(text) > MAX_PARAMS_BYTES:
            raise _too_long(field, len(text))
        if self._config.connector:
            return KvParams(params=text.decode())
        flags = {name: _flag(given, name, field) for name in _FLAGS}
        if all(flags.values()):
            raise InvalidArgument(f"{field} sets both {' and '.join(_FLAGS)}; set only one of them", field=field)
        if flags["do_remote_decode"] and n > 1:
            raise InvalidArgument(
                f"{field}.do_remote_decode is true and {of} is {n}; only one sequence can be handed over, "
                f"so {of} must be 1",
                field=of,
            )
        source = _source(given, field) if flags["do_remote_prefill"] else None
        return KvParams(lease=flags["do_remote_decode"], source=source if self._may_ask(source) else None)

    def read_json(self, text: str, *, n: int, field: str) -> KvParams:
        """Return the parsed ``kv_transfer_params`` of a request from their JSON text, as described in ``read``."""
        if not text:
            return _NONE
        if not self.serves:
            raise Unimplemented(f"{field} is not supported: disaggregation.gateway is false", field=field)
        if (size := len(text.encode())) > MAX_PARAMS_BYTES:
            raise _too_long(field, size)
        try:
            return self.read(msgspec.json.decode(text), n=n, field=field)
        except (msgspec.DecodeError, RecursionError) as e:
            raise InvalidArgument(f"{field} is not valid JSON: {e}", field=field) from None

    def _may_ask(self, source: KvSource | None) -> bool:
        if source is None:
            return False
        if any(source.address == each.kv_address for each in self._view.cluster()):
            return True
        allowed = self._config.allowed_addresses
        return source.address in allowed or split(source.address)[0] in allowed


def answer_of(finish: Finish) -> dict[str, Any] | None:
    """Return ``kv_transfer_params`` for the response of a finished sequence. Return None if the response has no such
    parameters.
    """
    if finish.kv_params:
        said: dict[str, Any] = msgspec.json.decode(finish.kv_params)
        return said
    return None if finish.kv_source is None else params_of(finish.kv_source)


def params_of(source: KvSource) -> dict[str, Any]:
    """Return ``kv_transfer_params`` that name the engine with the KV blocks, in the format of vLLM's NIXL connector."""
    host, port = split(source.address)
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": source.engine_id,
        "remote_block_ids": [],
        "remote_host": host,
        "remote_port": port,
        _OWN: {
            "incarnation": source.incarnation,
            "lease_id": source.lease_id.hex(),
            "num_tokens": source.num_tokens,
            "fingerprint": source.fingerprint.hex(),
        },
    }


def _too_long(field: str, size: int) -> InvalidArgument:
    return InvalidArgument(f"{field} has {size} bytes; it must have at most {MAX_PARAMS_BYTES}", field=field)


def _flag(given: dict[str, Any], name: str, field: str) -> bool:
    value = given.get(name)
    if value is None or isinstance(value, bool):
        return bool(value)
    raise InvalidArgument(f"{field}.{name} is {quoted(value)}; it must be true or false", field=f"{field}.{name}")


def _source(given: dict[str, Any], field: str) -> KvSource | None:
    """Return the engine that keeps the KV blocks, as named in ``kv_transfer_params``.

    Return None if the parameters come from another connector. The engine then recomputes the prompt.
    """
    own = given.get(_OWN)
    if own is None:
        return None
    try:
        said = msgspec.convert(own, _Own)
        known = msgspec.convert(given, _Remote)
        address = with_port(known.remote_host, known.remote_port)
        split(address)
        return KvSource(
            engine_id=known.remote_engine_id,
            incarnation=said.incarnation,
            address=address,
            lease_id=_id(said.lease_id),
            num_tokens=said.num_tokens,
            fingerprint=_id(said.fingerprint),
        )
    except (msgspec.ValidationError, ValueError) as e:
        raise InvalidArgument(
            f"{field} is not valid: {e}; copy it unchanged from the first request's response", field=field
        ) from None


def _id(text: str) -> bytes:
    value = bytes.fromhex(text)
    if len(value) != _ID_BYTES:
        raise ValueError(f"{text!r} has {len(value)} bytes; expected {_ID_BYTES} bytes")
    return value


_Name = Annotated[str, Meta(min_length=1, max_length=256)]


class _Own(msgspec.Struct, frozen=True):
    incarnation: _Name
    lease_id: str
    num_tokens: Annotated[int, Meta(ge=0, le=2**32 - 1)]
    fingerprint: str


class _Remote(msgspec.Struct, frozen=True):
    remote_engine_id: _Name
    remote_host: Annotated[str, Meta(min_length=1, max_length=250)]
    remote_port: int
