"""OpenAI API for callers in the same process, which need no network listener."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from starlette.types import ASGIApp, Message

from penstock_frontend.api.http.endpoint import Gate
from penstock_frontend.api.http.request_body import Bodies
from penstock_frontend.api.openai import app
from penstock_frontend.app.assembly import Assembly, served_model
from penstock_frontend.config import HttpConfig, LoraConfig, ModelConfig
from penstock_frontend.served_models import ServedModels


class HttpAnswer(NamedTuple):
    """Response of a route of the OpenAI API. ``request_id`` is the value of the response header x-request-id."""

    status: int
    body: bytes
    request_id: str


class OpenAICalls:
    """Passes request bodies to the routes of the OpenAI API, and returns the routes' responses.

    All methods must be called on the event loop's thread.
    """

    def __init__(self, assembly: Assembly[Any], model: ModelConfig, http: HttpConfig) -> None:
        models = ServedModels([served_model(assembly, model, LoraConfig())])
        gate = Gate(http, assembly.settings.fairness, assembly.llm.refused)
        bodies = Bodies(http, warnings=assembly.warnings)
        routes = app.routes(models, http, assembly.settings.limits, gate=gate, bodies=bodies)
        self._apps: Mapping[str, ASGIApp] = {
            route.path: route.app for route in routes if route.methods and "POST" in route.methods
        }

    @property
    def paths(self) -> Sequence[str]:
        """Paths of the routes to which a request body can be posted."""
        return list(self._apps)

    async def post(self, path: str, body: bytes) -> HttpAnswer:
        """Return the response of the route at ``path``, which must be in ``paths``.

        If the caller cancels the call, the request is aborted on the engine.
        """
        call = _Call(body)
        scope = {"type": "http", "headers": [], "path_params": {}, "path": path}
        try:
            await self._apps[path](scope, call.receive, call.send)
        finally:
            call.gone.set()
        return HttpAnswer(call.status, b"".join(call.parts), call.request_id)


class _Call:
    """The receive and send functions of one ASGI call."""

    def __init__(self, body: bytes) -> None:
        self.gone = asyncio.Event()
        self.status = 500
        self.request_id = ""
        self.parts: list[bytes] = []
        self._body: bytes | None = body

    async def receive(self) -> Message:
        """Return the request body at the first call. Later calls wait until the response is complete."""
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        """Record a part of the response that the route sends."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.request_id = dict(message["headers"]).get(b"x-request-id", b"").decode("latin-1")
        else:
            self.parts.append(message.get("body", b""))
