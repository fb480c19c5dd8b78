"""Kubernetes API server with the calls that the coordinator uses."""

import asyncio
import json
from types import TracebackType

from lightkube.config.kubeconfig import KubeConfig
from lightkube.config.models import User

REASONS = {403: "Forbidden", 404: "NotFound", 409: "Conflict", 500: "InternalError"}


class Server:
    """API server with one Deployment. It answers with ``status``; 0: it does not answer; -1: it sends no JSON."""

    def __init__(self) -> None:
        self.status = 200
        self.replicas = 2
        self.requests: list[tuple[str, str, object]] = []
        self._writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> "Server":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    @property
    def url(self) -> str:
        """URL at which the server listens."""
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        self._server.close()
        for writer in self._writers:
            writer.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        lengths = [line.split(":")[1] for line in head.splitlines() if line.lower().startswith("content-length:")]
        body = await reader.readexactly(int(lengths[0])) if lengths else b""
        method, path, _ = head.split(" ", 2)
        self.requests.append((method, path.partition("?")[0], json.loads(body) if body else None))
        if self.status == 0:
            return
        answer = b"<html>" if self.status == -1 else json.dumps(self._answer(path, body)).encode()
        kind = "text/html" if self.status == -1 else "application/json"
        writer.write(
            f"HTTP/1.1 {502 if self.status == -1 else self.status} x\r\ncontent-type: {kind}\r\nconnection: close\r\n"
            f"content-length: {len(answer)}\r\n\r\n".encode()
            + answer
        )
        await writer.drain()
        writer.close()

    def _answer(self, path: str, body: bytes) -> object:
        if self.status != 200:
            reason = REASONS[self.status]
            return {"kind": "Status", "code": self.status, "reason": reason, "message": f"it is {reason}"}
        if path.endswith("/scale") or "/scale?" in path:
            if body:
                self.replicas = json.loads(body)["spec"]["replicas"]
            return {
                "kind": "Scale",
                "apiVersion": "autoscaling/v1",
                "metadata": {"name": "d"},
                "spec": {"replicas": self.replicas},
            }
        return {"kind": "Pod", "apiVersion": "v1", "metadata": {"name": "a"}}


def account_at(url: str) -> KubeConfig:
    """Return the service account config of a pod in the namespace ``serving``."""
    cluster = KubeConfig.from_server(url).get().cluster
    return KubeConfig.from_one(cluster=cluster, user=User(token="t"), namespace="serving")
