"""Device plugin with fake GPUs, to run on a node: ``python -m tests.cluster.gpus nvidia.com/gpu=4``.

The plugin uses the kubelet's protocol ``deviceplugin/v1beta1``. Its stubs are generated from the Go module that
publishes the protocol. A container gets only an environment variable with the names of its devices.
"""

import importlib
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
from grpc_tools import protoc

from tests.cluster.tools.build import download
from tests.cluster.tools.components import READ

PLUGINS = Path("/var/lib/kubelet/device-plugins")
VARIABLE = "FAKE_GPUS"
LOOK_SECONDS = 1.0


def stubs(directory: Path) -> tuple[Any, Any]:
    """Generate the protocol's Python modules into ``directory``, and return the messages and the services."""
    module = download("k8s.io/kubelet", READ["k8s.io/kubelet"])
    source = module / "pkg/apis/deviceplugin/v1beta1"
    status = protoc.main(
        ["protoc", f"-I{source}", f"--python_out={directory}", f"--grpc_python_out={directory}", "api.proto"]
    )
    if status != 0:
        raise SystemExit(f"protoc cannot compile {source}/api.proto: exit status {status}")
    sys.path.insert(0, str(directory))
    return importlib.import_module("api_pb2"), importlib.import_module("api_pb2_grpc")


def plugin(pb: Any, rpc: Any, ids: list[str], over: threading.Event) -> Any:
    """Return a servicer that offers healthy devices with these ids until ``over`` is set."""

    class DevicePlugin(rpc.DevicePluginServicer):  # type: ignore[misc]
        def GetDevicePluginOptions(self, request: Any, context: Any) -> Any:
            return pb.DevicePluginOptions()

        def ListAndWatch(self, request: Any, context: Any) -> Iterator[Any]:
            yield pb.ListAndWatchResponse(devices=[pb.Device(ID=each, health="Healthy") for each in ids])
            over.wait()

        def Allocate(self, request: Any, context: Any) -> Any:
            answers = [
                pb.ContainerAllocateResponse(envs={VARIABLE: ",".join(each.devices_ids)})
                for each in request.container_requests
            ]
            return pb.AllocateResponse(container_responses=answers)

    return DevicePlugin()


class Offer:
    """Devices of a resource. The devices are registered after each start of the kubelet, because the kubelet clears the
    folder of sockets when it starts.
    """

    def __init__(self, pb: Any, rpc: Any, argument: str, over: threading.Event) -> None:
        """Prepare an offer.

        Args:
            argument: Resource and number of devices, as ``RESOURCE=COUNT``.
        """
        self._resource, _, self._count = argument.partition("=")
        self._name = self._resource.replace("/", "-")
        self._pb, self._rpc, self._over = pb, rpc, over
        self._server: Any = None  # keeps a reference, because gRPC stops servers without references

    def tell(self) -> None:
        """Serve the devices and register them with the kubelet. Does nothing while the plugin's socket exists."""
        socket = PLUGINS / f"{self._name}.sock"
        if socket.exists():
            return
        if self._server is not None:
            self._server.stop(grace=None).wait()  # otherwise the old server would later remove the new server's socket
        ids = [f"{self._name}-{number}" for number in range(int(self._count))]
        self._server = grpc.server(ThreadPoolExecutor(8))
        self._rpc.add_DevicePluginServicer_to_server(plugin(self._pb, self._rpc, ids, self._over), self._server)
        self._server.add_insecure_port(f"unix://{socket}")
        self._server.start()
        with grpc.insecure_channel(f"unix://{PLUGINS}/kubelet.sock") as channel:
            request = self._pb.RegisterRequest(version="v1beta1", endpoint=socket.name, resource_name=self._resource)
            self._rpc.RegistrationStub(channel).Register(request, timeout=30, wait_for_ready=True)
        print(f"{self._count} x {self._resource}", flush=True)


def main() -> None:
    """Offer the devices that the command line names, until a signal arrives."""
    over = threading.Event()
    for sign in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sign, lambda *_: over.set())
    with tempfile.TemporaryDirectory() as directory:
        pb, rpc = stubs(Path(directory))
        offers = [Offer(pb, rpc, argument, over) for argument in sys.argv[1:]]
        while True:
            for offer in offers:
                offer.tell()
            if over.wait(LOOK_SECONDS):
                return


if __name__ == "__main__":
    main()
