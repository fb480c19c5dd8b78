"""Access control: it checks the credentials of gRPC and HTTP calls, and refuses calls from web pages of other origins."""

from collections.abc import Callable, Collection, Mapping

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock_common.errors import PermissionDenied, Unauthenticated
from penstock_common.security.cross_site import CallerRules, refusal
from penstock_frontend import call_types
from penstock_frontend.api.anthropic import errors as anthropic
from penstock_frontend.api.anthropic.errors import is_anthropic
from penstock_frontend.api.http.endpoint import id_headers, send_error
from penstock_frontend.api.openai import errors as openai
from penstock_frontend.authenticator import Authenticator
from penstock_frontend.call_types import current_principal

_HEALTH = "/grpc.health."
_VLLM = "/vllm.grpc.engine.VllmEngine/"
OPERATORS_METHODS = frozenset(
    # These methods affect or reveal the requests of other callers. SubscribeKvEvents reveals the prompts of all
    # callers.
    _VLLM + name
    for name in ("Abort", "FlushCache", "StartProfile", "StopProfile", "SubscribeKvEvents")
)
"""Methods of the public server that require the scope ``admin``."""


def grpc_check(
    authenticator: Authenticator, *, scope: call_types.Scope, operators: Collection[str] = ()
) -> Callable[[str, Mapping[str, str]], None]:
    """Return a check of gRPC calls for CallerGuard. Methods in ``operators`` require the scope ``admin``, and other
    methods require ``scope``.

    The health service requires no credentials.
    """

    def check(method: str, metadata: Mapping[str, str]) -> None:
        if not method.startswith(_HEALTH):
            needed: call_types.Scope = "admin" if method in operators else scope
            current_principal.set(authenticator.principal(metadata, scope=needed))

    return check


class HttpAuthentication:
    """ASGI middleware that requires credentials for all paths except ``open_paths``.

    Paths in ``operators_paths`` require the scope ``admin``.
    """

    def __init__(
        self,
        app: ASGIApp,
        authenticator: Authenticator,
        *,
        open_paths: Collection[str],
        operators_paths: Collection[str] = (),
    ) -> None:
        self._app = app
        self._authenticator = authenticator
        self._open_paths = frozenset(open_paths)
        self._operators_paths = frozenset(operators_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, if its credentials are valid."""
        if scope["type"] != "http" or scope["path"] in self._open_paths:
            await self._app(scope, receive, send)
            return
        headers = HTTPConnection(scope).headers
        try:
            needed: call_types.Scope = "admin" if scope["path"] in self._operators_paths else "inference"
            caller = self._authenticator.principal(headers, scope=needed)
        except (Unauthenticated, PermissionDenied) as e:
            shape = anthropic.answer if is_anthropic(scope) else openai.answer
            await send_error(send, e, id_headers(headers), shape)
            return
        current_principal.set(caller)
        await self._app(scope, receive, send)


# The code below refuses calls from web pages of other origins.

PROBES = frozenset(("/health", "/ping"))
"""Paths that report only whether the server is up. Probes may call these paths under any address, such as the IP
address of a pod.
"""


class WebCallers:
    """ASGI middleware that refuses calls according to ``rules``, before it reads their bodies."""

    def __init__(self, app: ASGIApp, rules: CallerRules) -> None:
        self._app = app
        self._rules = rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or refuse it according to the rules."""
        if scope["type"] == "http" and scope["path"] not in PROBES:
            refused = refusal(scope["method"], scope["headers"], self._rules)
            if refused is not None:
                shape = anthropic.answer if anthropic.is_anthropic(scope) else openai.answer
                await send_error(send, openai.HttpError(*refused), id_headers(Headers(scope=scope)), shape)
                return
        await self._app(scope, receive, send)
