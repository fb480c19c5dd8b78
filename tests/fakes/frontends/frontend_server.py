"""Real frontend in the test's event loop, on free loopback ports, and its public client."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock.admin.v1 import messages_pb2 as admin_pb
from penstock.admin.v1 import service_pb2_grpc as admin_grpc
from penstock.common.v1 import sampling_pb2
from penstock.inference.v1 import messages_pb2 as pb
from penstock.inference.v1 import service_pb2_grpc
from penstock_common.config.sections import ServerConfig
from penstock_common.errors import RequestFailed
from penstock_common.rpc.credentials import NO_TLS, ClientCredentials
from penstock_common.rpc.status import from_rpc_error
from penstock_frontend.app.app import Frontend
from penstock_frontend.config import FrontendConfig, HttpConfig, ModelConfig
from tests.fakes.patience import PATIENCE

LOOPBACK = ServerConfig(host="127.0.0.1", port=0)
SERVICE = "penstock.inference.v1.InferenceService"


class FrontendServer:
    """Frontend in this process: ``async with FrontendServer(model_path, engines=[address])``. Options are fields of
    FrontendConfig. ``client`` is the class of its engine clients.
    """

    def __init__(
        self, model_path: Path, *, engines: Sequence[str] = (), client: ClientCredentials = NO_TLS, **options: Any
    ) -> None:
        self._client = client
        self.config = FrontendConfig(
            **{
                "model": ModelConfig(path=str(model_path), served_model_name="model"),
                "frontend_id": "frontend-0",
                "engines": tuple(engines),
                "server": LOOPBACK,
                "admin": LOOPBACK,
                "http": HttpConfig(port=-1),
                "drain_timeout": 5.0,
                **options,
            }
        )

    async def __aenter__(self) -> "FrontendServer":
        self.frontend = Frontend(self.config)
        await self.frontend.startup()
        self.running = asyncio.create_task(self._run())
        self.channel = self._client.channel(f"127.0.0.1:{self.frontend.port}", [])
        self.admin_channel = self._client.channel(f"127.0.0.1:{self.frontend.admin_port}", [])
        self.stub = service_pb2_grpc.InferenceServiceStub(self.channel)
        self.admin = admin_grpc.AdminServiceStub(self.admin_channel)
        return self

    async def __aexit__(self, *_: object) -> None:
        if not self.running.done():
            self.frontend.stop()
            self.frontend.stop()  # stop without draining
        await self.running
        await self.channel.close()
        await self.admin_channel.close()

    async def _run(self) -> None:
        await self.frontend.main_loop()
        await self.frontend.shutdown()

    def generate(self, text: str = "hi", *, timeout: float | None = PATIENCE, **fields: Any) -> Any:
        """Start a Generate call. Keywords that are not fields of GenerateRequest are sampling parameters."""
        return self.stub.Generate(make_request(text, **fields), timeout=timeout)

    async def outputs(self, text: str = "hi", **fields: Any) -> list[pb.GenerateResponse]:
        """Return all messages of a Generate call. Raises RequestFailed if it fails."""
        return await collect(self.generate(text, **fields))

    async def until_engines(self, count: int) -> None:
        """Wait until the frontend may send requests to ``count`` engines."""
        await eventually(lambda: self.frontend._models[0].assembly.engines.view.num_engines == count)

    async def until_health(self, *, serving: bool, service: str = SERVICE) -> None:
        """Watch the health service until it reports this status."""
        want = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        stub: Any = health_pb2_grpc.HealthStub(self.channel)
        async with asyncio.timeout(PATIENCE):
            call = stub.Watch(health_pb2.HealthCheckRequest(service=service))
            async for status in call:
                if status.status == want:
                    break
            call.cancel()


async def until_states(frontend: FrontendServer, want: Mapping[str, int]) -> admin_pb.GetClusterResponse:
    """Poll the cluster until the engines have these states."""
    async with asyncio.timeout(PATIENCE):
        while True:
            response = await frontend.admin.GetCluster(admin_pb.GetClusterRequest())
            if {e.engine_id: e.state for e in response.engines} == want:
                return response


def make_request(text: str = "hi", **fields: Any) -> pb.GenerateRequest:
    """Return a GenerateRequest. Keywords that are not its fields are sampling parameters."""
    own = {name: fields.pop(name) for name in list(fields) if name in pb.GenerateRequest.DESCRIPTOR.fields_by_name}
    request = pb.GenerateRequest(**({"text": text} | own if "token_ids" not in own else own))
    request.sampling_params.MergeFrom(sampling_pb2.SamplingParams(**fields))
    return request


async def collect(call: Any) -> list[Any]:
    """Return all messages of a stream. Raises RequestFailed if it fails."""
    try:
        return [message async for message in call]
    except grpc.aio.AioRpcError as e:
        raise from_rpc_error(e) from e


async def eventually(condition: Callable[[], object]) -> None:
    """Poll a condition until it is true. Raises TimeoutError after 10 s."""
    async with asyncio.timeout(PATIENCE):
        while True:
            if condition():
                return
            await asyncio.sleep(0.005)


async def failure(call: Any) -> RequestFailed:
    """Return the error of a call."""
    try:
        if isinstance(call, grpc.aio.UnaryStreamCall):
            await collect(call)
        else:
            await call
    except grpc.aio.AioRpcError as e:
        return from_rpc_error(e)
    except RequestFailed as e:
        return e
    raise AssertionError("the call did not fail")
