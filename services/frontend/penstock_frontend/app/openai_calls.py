"""The OpenAI API for callers in the same process: what its routes answer, without a listener."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from starlette.types import ASGIApp, Message

from penstock_frontend.api.http.endpoint import Gate
from penstock_frontend.api.http.request_body import Bodies
from penstock_frontend.api.openai import app
from penstock_frontend.app.assembly import Assembly
from penstock_frontend.config import FrontendConfig, HttpConfig, ModelConfig


class HttpAnswer(NamedTuple):
    """``request_id``: as the header says it."""

    status: int
    body: bytes
    request_id: str


class OpenAICalls:
    """Bodies in, answers out, errors included. Belongs to the event loop's thread."""

    def __init__(self, assembly: Assembly[Any], model: ModelConfig, http: HttpConfig) -> None:
        config = FrontendConfig(
            model=model, http=http, engines=("localhost:1",)
        )  # the routes do not look at the engines
        llm, chat, limits = assembly.llm, assembly.chat, assembly.settings.limits
        gate = Gate(http, assembly.settings.fairness, llm.refused)
        bodies = Bodies(http, warnings=assembly.warnings)
        routes = app.routes(llm, chat, config, limits, assembly.labels, gate=gate, bodies=bodies)
        self._apps: Mapping[str, ASGIApp] = {
            route.path: route.app for route in routes if route.methods and "POST" in route.methods
        }

    @property
    def paths(self) -> Sequence[str]:
        """What bodies can be posted to."""
        return list(self._apps)

    async def post(self, path: str, body: bytes) -> HttpAnswer:
        """What the route at ``path``, one of ``paths``, answers. Cancelling this ends what engines compute for it."""
        call = _Call(body)
        scope = {"type": "http", "headers": [], "path_params": {}, "path": path}
        try:
            await self._apps[path](scope, call.receive, call.send)
        finally:
            call.gone.set()
        return HttpAnswer(call.status, b"".join(call.parts), call.request_id)


class _Call:
    """Both ends of an ASGI call."""

    def __init__(self, body: bytes) -> None:
        self.gone = asyncio.Event()
        self.status = 500
        self.request_id = ""
        self.parts: list[bytes] = []
        self._body: bytes | None = body

    async def receive(self) -> Message:
        """The body; then nothing until the call is over."""
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        """Take a part of the answer."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.request_id = dict(message["headers"]).get(b"x-request-id", b"").decode("latin-1")
        else:
            self.parts.append(message.get("body", b""))
