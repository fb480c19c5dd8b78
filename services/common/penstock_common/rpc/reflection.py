"""Server reflection (``grpc.reflection.v1`` and ``.v1alpha``): describes a server's services to tools without proto
files.

grpcio-reflection supports only v1alpha. v1 has the same messages under another package name. In addition,
grpcio-reflection looks up symbols in protobuf's descriptor pool, which does not find methods and fields. The load
generator ghz needs to look up a method.
"""

from collections.abc import Sequence
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.descriptor import FileDescriptor
from grpc_reflection.v1alpha import reflection, reflection_pb2

V1ALPHA = reflection.SERVICE_NAME
V1 = "grpc.reflection.v1.ServerReflection"


class SymbolPool:
    """Descriptor pool that also finds methods, fields, oneofs and enum values. Unknown symbols raise KeyError."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self.FindFileByName = pool.FindFileByName
        self.FindMessageTypeByName = pool.FindMessageTypeByName
        self.FindExtensionByNumber = pool.FindExtensionByNumber
        self.FindAllExtensions = pool.FindAllExtensions

    def FindFileContainingSymbol(self, symbol: str) -> FileDescriptor:
        """Return the file that defines a service, message, enum, method, field, oneof or enum value."""
        try:
            return self._pool.FindFileContainingSymbol(symbol)  # type: ignore[no-any-return]
        except KeyError:
            holder, _, member = symbol.rpartition(".")
            file = self._pool.FindFileContainingSymbol(holder)
            if not _has(self._pool, holder, member):
                raise
            return file  # type: ignore[no-any-return]


def serve(server: grpc.aio.Server, service_names: Sequence[str]) -> None:
    """Serve reflection in both versions for these services and for reflection itself."""
    _define_v1()
    names = (*service_names, V1, V1ALPHA)
    servicer = reflection.aio.ReflectionServicer(names, SymbolPool(descriptor_pool.Default()))
    info = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler(version, {"ServerReflectionInfo": info}) for version in (V1, V1ALPHA)]
    )


def _define_v1() -> None:
    """Derive v1's file descriptor from that of v1alpha. Does nothing if the pool already has v1."""
    pool = descriptor_pool.Default()
    try:
        pool.FindServiceByName(V1)
    except KeyError:
        file = descriptor_pb2.FileDescriptorProto()
        reflection_pb2.DESCRIPTOR.CopyToProto(file)
        alpha, file.package, file.name = file.package, V1.rpartition(".")[0], "grpc/reflection/v1/reflection.proto"
        for field in (field for message in file.message_type for field in message.field if field.type_name):
            field.type_name = field.type_name.replace(f".{alpha}.", f".{file.package}.")
        for method in (method for service in file.service for method in service.method):
            method.input_type = method.input_type.replace(f".{alpha}.", f".{file.package}.")
            method.output_type = method.output_type.replace(f".{alpha}.", f".{file.package}.")
        pool.AddSerializedFile(file.SerializeToString())


def _has(pool: Any, holder: str, member: str) -> bool:
    for find, members in (
        (pool.FindServiceByName, ("methods_by_name",)),
        (pool.FindMessageTypeByName, ("fields_by_name", "oneofs_by_name")),
        (pool.FindEnumTypeByName, ("values_by_name",)),
    ):
        try:
            found = find(holder)
        except KeyError:
            continue
        return any(member in getattr(found, each) for each in members)
    return False
