"""Views as the bytes that streams send, and a server that sends bytes as they are."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

import grpc

from penstock_common.rpc.cluster import delta_to_proto, groups_to_proto, view_to_proto
from penstock_common.types.cluster import ClusterView
from penstock_common.types.view_delta import ViewDelta

Handlers: TypeAlias = "Mapping[str, grpc.RpcMethodHandler[Any, Any]]"


class ProtoEncoder:
    """``ClusterView`` messages."""

    def whole(self, view: ClusterView, version: int) -> bytes:
        message = view_to_proto(view)
        message.version = version
        return message.SerializeToString()

    def delta(self, view: ClusterView, delta: ViewDelta, version: int) -> bytes:
        message = groups_to_proto(view)
        message.version = version
        message.delta.CopyFrom(delta_to_proto(delta, base_version=version - 1))
        return message.SerializeToString()


class PreEncoded:
    """Passes a server what generated code adds to it, but for the responses of some methods: these are bytes already."""

    def __init__(self, server: grpc.aio.Server, methods: Collection[str]) -> None:
        self._server = server
        self._methods = methods

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Nothing: they are made of the registered ones."""

    def add_registered_method_handlers(self, service: str, handlers: Handlers) -> None:
        """Add the handlers of a service by the names of its methods; those of ``methods`` are streams of streams."""
        own = dict(handlers)
        for name in self._methods:
            given: Any = handlers[name]
            own[name] = grpc.stream_stream_rpc_method_handler(given.stream_stream, given.request_deserializer)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, own),))
        self._server.add_registered_method_handlers(service, own)
