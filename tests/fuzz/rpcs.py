"""All RPCs of the system, with valid messages for each."""

from collections.abc import Sequence
from random import Random
from typing import Any, NamedTuple

from google.protobuf.descriptor import Descriptor, ServiceDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from smg_grpc_proto.generated import vllm_engine_pb2

from penstock.admin.v1 import service_pb2 as admin
from penstock.coordinator.v1 import service_pb2 as coordinator
from penstock.enginecore.v1 import service_pb2 as enginecore
from penstock.inference.v1 import service_pb2 as inference
from tests.fuzz.mutate import mutated
from tests.fuzz.seeds import SEEDS, VLLM_SEEDS

CONTROL = ("Pause", "Resume", "Sleep", "WakeUp", "StartProfile", "StopProfile", "CollectiveRpc")
"""RPCs that affect the whole system. They are called without other load, and undone."""
_CONTROL_UTILITIES = (b"pause", b"resume", b"sleep", b"wake_up", b"profile", b"collective_rpc", b"shutdown")
_OURS = (b"engine-0", b"engine-1", b"penstock-tiny")
"""Names that hostile peers must not use, because only certificates protect the identity of the serving engine."""


class Rpc(NamedTuple):
    """An RPC. ``port`` is its server: frontend, admin, engine or coordinator. ``weight`` is its relative frequency."""

    port: str
    path: str
    request: Descriptor
    response: Descriptor
    client_stream: bool
    server_stream: bool
    seeds: Sequence[bytes]
    weight: float

    @property
    def name(self) -> str:
        """Name of service and method, for tables."""
        service, method = self.path.strip("/").split("/")
        return f"{'.'.join(service.split('.')[:-1]).removeprefix('penstock.')}.{method}"

    @property
    def method(self) -> str:
        """Name of the method."""
        return self.path.rpartition("/")[2]


def rpcs() -> list[Rpc]:
    """Return all RPCs."""
    health, reflection = health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR
    asks = {
        "Check": (health_pb2.HealthCheckRequest(service="liveness"),),
        "Watch": (health_pb2.HealthCheckRequest(service="liveness"),),
        "ServerReflectionInfo": (
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol="penstock.inference.v1.InferenceService"),
            reflection_pb2.ServerReflectionRequest(file_by_filename="no/such.proto"),
        ),
    }
    found = [
        *_of("frontend", inference.DESCRIPTOR.services_by_name["InferenceService"], SEEDS, 6.0),
        *_of("frontend", vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"], VLLM_SEEDS, 2.0),
        *_of("admin", admin.DESCRIPTOR.services_by_name["AdminService"], {}, 0.7),
        *_of("engine", enginecore.DESCRIPTOR.services_by_name["EngineCoreService"], SEEDS, 5.0),
        *_of("coordinator", coordinator.DESCRIPTOR.services_by_name["CoordinatorService"], SEEDS, 4.0),
    ]
    for port in ("frontend", "admin", "engine", "coordinator"):
        found += _of(port, health.services_by_name["Health"], asks, 0.5)
        found += _of(port, reflection.services_by_name["ServerReflection"], asks, 0.5)
    return found


def _of(port: str, service: ServiceDescriptor, seeds: dict[str, Any], weight: float) -> list[Rpc]:
    return [
        Rpc(
            port=port,
            path=f"/{service.full_name}/{method.name}",
            request=method.input_type,
            response=method.output_type,
            client_stream=method.client_streaming,
            server_stream=method.server_streaming,
            seeds=[message.SerializeToString() for message in seeds.get(method.name, ())] or [b""],
            weight=weight if method.name in seeds else weight / 4,
        )
        for method in service.methods
    ]


def messages(rpc: Rpc, rng: Random) -> tuple[list[bytes], int]:
    """Return the messages of a call, and the index of the seed of the last message.

    The messages are one message, or a stream with a valid or invalid beginning.
    """
    if not rpc.client_stream:
        message, seed = _allowed(rpc, rng)
        return [message], seed
    sent: list[bytes] = []
    seed = 0
    if rng.random() < 0.75:
        sent.append(rpc.seeds[0])  # a hello
    for _ in range(rng.choice((0, 1, 1, 2, 4, 8))):
        message, seed = _allowed(rpc, rng)
        sent.append(message)
    if sent and rng.random() < 0.2:
        sent.append(sent[-1])
    return sent, seed


def _allowed(rpc: Rpc, rng: Random) -> tuple[bytes, int]:
    while True:
        seed = rng.randrange(len(rpc.seeds))
        message = mutated(rpc.seeds[seed], rpc.request, rng)
        if rpc.port == "coordinator" and any(name in message for name in _OURS):
            continue
        if rpc.method == "Session" and any(name in message for name in _CONTROL_UTILITIES):
            continue
        return message, seed


def cheap(rpc: Rpc) -> list[bytes]:
    """Return a valid call."""
    return [rpc.seeds[0]]
