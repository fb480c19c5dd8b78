"""Keeps web pages of other origins from calling the HTTP listener."""

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock_common.security.cross_site import CallerRules, refusal
from penstock_frontend.api.anthropic import errors as anthropic
from penstock_frontend.api.openai import errors as openai
from penstock_frontend.api.openai.endpoint import id_headers, send_error

PROBES = frozenset(("/health", "/ping"))
"""Paths that tell only whether the server serves. Probes call them by any address, of a pod among others."""


class WebCallers:
    """Wraps an application: calls that the rules refuse end here, before their bodies are read."""

    def __init__(self, app: ASGIApp, rules: CallerRules) -> None:
        self._app = app
        self._rules = rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve or refuse one request."""
        if scope["type"] == "http" and scope["path"] not in PROBES:
            refused = refusal(scope["method"], scope["headers"], self._rules)
            if refused is not None:
                shape = anthropic.answer if anthropic.is_anthropic(scope) else openai.answer
                await send_error(send, openai.HttpError(*refused), id_headers(Headers(scope=scope)), shape)
                return
        await self._app(scope, receive, send)
