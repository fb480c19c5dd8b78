"""``/metrics`` of a service without an HTTP server of its own."""

import contextlib
import errno
import socket
import socketserver
import ssl
import sys
import threading
import time
from collections.abc import Iterable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

from penstock_common.addresses import resolve, take_both_families, warn_of_plaintext, with_port
from penstock_common.config.sections import MetricsConfig
from penstock_common.errors import ConfigError
from penstock_common.observability.logging import get_logger
from penstock_common.security.cross_site import CallerRules, caller_rules, refusal
from penstock_common.security.tls import Certificates, server_context

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication

_READ_TIMEOUT = 10.0
"""Seconds that a client may be silent, in its TLS handshake too."""
MAX_CONNECTIONS = 32
"""Connections at once, each with a thread. A scrape takes milliseconds; where there are more, the oldest is closed."""
_NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_PAUSE = 0.1
"""Seconds before the next try to accept a connection where the system has no room for one."""


class MetricsServer:
    """Serves ``/metrics`` from a thread until ``stop``."""

    def __init__(
        self, config: MetricsConfig, registry: CollectorRegistry, certificates: Certificates | None = None
    ) -> None:
        """``certificates``: told when those of this listener end. Raises ConfigError when the port is taken."""
        self._server: _Server | None = None
        if config.port < 0:
            return
        if not config.tls.enabled:
            warn_of_plaintext(config.host, field="metrics", reads=True)
            context = None
        else:
            context = server_context(config.tls, field="metrics.tls", certificates=certificates)
        try:
            rules = caller_rules("metrics", config.host, config.allowed_hosts)
            app = _WithoutPages(make_wsgi_app(registry), rules)
            self._server = make_server(config.host, config.port, app, server_class=_Server, handler_class=_Handler)
        except OSError as e:
            raise ConfigError(
                f"metrics.port {config.port} on {config.host}: {e.strerror or e}; set another port, or -1 for none"
            ) from None
        self._server.tls = context
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()
        get_logger().info("metrics", address=with_port(config.host, self._server.server_port))

    def stop(self) -> None:
        """Close the port. Idempotent."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            self._server = None


class _WithoutPages:
    """Wraps an application: calls that a browser makes for a page of another origin end here. Scrapers send no such headers."""

    def __init__(self, app: "WSGIApplication", rules: CallerRules) -> None:
        self._app = app
        self._rules = rules

    def __call__(self, environ: dict[str, Any], start_response: "StartResponse") -> Iterable[bytes]:
        """Serve or refuse one request."""
        headers = [
            (name.removeprefix("HTTP_").replace("_", "-").lower().encode(), value.encode("latin-1"))
            for name, value in environ.items()
            if name.startswith("HTTP_")
        ]
        refused = refusal(environ["REQUEST_METHOD"], headers, self._rules)
        if refused is None:
            return self._app(environ, start_response)
        body = f"{refused.message}\n".encode()
        start_response(
            f"{refused.status} {HTTPStatus(refused.status).phrase}",
            [("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(body)))],
        )
        return [body]


class _Handler(WSGIRequestHandler):
    timeout = _READ_TIMEOUT

    def log_message(self, *_: Any) -> None:
        """Scrapes are no news."""


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    """A thread per connection, which does the TLS handshake as well: a client that is slow at it holds nobody up."""

    daemon_threads = True
    tls: ssl.SSLContext | None = None

    def __init__(self, address: tuple[str, int], handler: type[WSGIRequestHandler]) -> None:
        self._open: dict[socket.socket, None] = {}
        self._lock = threading.Lock()
        self.address_family, resolved = resolve(*address)
        super().__init__(resolved, handler)

    def server_bind(self) -> None:
        """Bind, on ``::`` to both families."""
        take_both_families(self.socket)
        super().server_bind()

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection. Raises OSError."""
        try:
            return super().get_request()
        except OSError as e:
            if e.errno in _NO_ROOM:  # it is asked again at once, since the connection still waits
                time.sleep(_PAUSE)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve one connection on a thread of its own."""
        with self._lock:
            if len(self._open) >= MAX_CONNECTIONS:
                oldest = next(iter(self._open))
                with contextlib.suppress(OSError):  # its client may have gone
                    oldest.shutdown(socket.SHUT_RDWR)
                del self._open[oldest]
            self._open[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection that was served."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has gone, or was closed to make room, is nothing to report."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Serve one connection."""
        if self.tls is None:
            super().finish_request(request, client_address)
            return
        request.settimeout(_READ_TIMEOUT)
        connection = self.tls.wrap_socket(request, server_side=True, do_handshake_on_connect=False)
        with self._lock:  # the connection has taken the request's descriptor over
            self._open.pop(request, None)
            self._open[connection] = None
        # What may fail: a client that speaks no TLS, or shows no certificate.
        with contextlib.suppress(OSError), connection:
            connection.do_handshake()
            super().finish_request(connection, client_address)
        with self._lock:
            self._open.pop(connection, None)
