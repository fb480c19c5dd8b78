"""``/metrics`` endpoint for services without their own HTTP server."""

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
"""Maximum seconds without data from a client. The limit also applies to the TLS handshake."""
MAX_CONNECTIONS = 32
"""Maximum number of open connections. Each connection has a thread.

For a new connection above the limit, the oldest connection is closed. Closing it is safe, because a scrape takes
milliseconds.
"""
_NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_PAUSE = 0.1
"""Seconds until the next accept if the system has no resources for another connection."""


class MetricsServer:
    """Serves ``/metrics`` from a thread until ``stop``."""

    def __init__(
        self, config: MetricsConfig, registry: CollectorRegistry, certificates: Certificates | None = None
    ) -> None:
        """Bind the port of the metrics endpoint. Raises ConfigError if the port is in use.

        ``certificates`` receives the expiry times of this listener's certificates.
        """
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
                f"cannot bind metrics.port {config.port} on {config.host}: {e.strerror or e}; set another port, or "
                "-1 to disable the endpoint"
            ) from None
        self._server.tls = context
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()
        get_logger().info("serving metrics", address=with_port(config.host, self._server.server_port))

    def stop(self) -> None:
        """Close the port and stop serving metrics. Idempotent."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            self._server = None


class _WithoutPages:
    """WSGI wrapper that refuses calls from web pages of other origins. The headers of such calls differ from the
    headers of a scraper's calls.
    """

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
        """Do nothing: scrapes are not logged."""


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    """Server with one thread per connection. The thread also performs the TLS handshake, so that a slow client does not
    delay other clients.
    """

    daemon_threads = True
    tls: ssl.SSLContext | None = None

    def __init__(self, address: tuple[str, int], handler: type[WSGIRequestHandler]) -> None:
        self._open: dict[socket.socket, None] = {}
        self._lock = threading.Lock()
        self.address_family, resolved = resolve(*address)
        super().__init__(resolved, handler)

    def server_bind(self) -> None:
        """Bind the socket. ``::`` accepts both IPv4 and IPv6."""
        take_both_families(self.socket)
        super().server_bind()

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection. Raises OSError if the connection cannot be accepted."""
        try:
            return super().get_request()
        except OSError as e:
            if (
                e.errno in _NO_ROOM
            ):  # the connection still waits, so the server would call this method again without a pause
                time.sleep(_PAUSE)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve one connection on its own thread."""
        with self._lock:
            if len(self._open) >= MAX_CONNECTIONS:
                oldest = next(iter(self._open))
                with contextlib.suppress(OSError):  # The client may have disconnected.
                    oldest.shutdown(socket.SHUT_RDWR)
                del self._open[oldest]
            self._open[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a served connection."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore the error: the client disconnected, or its connection was closed in favor of a new connection."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Serve one connection."""
        if self.tls is None:
            super().finish_request(request, client_address)
            return
        request.settimeout(_READ_TIMEOUT)
        connection = self.tls.wrap_socket(request, server_side=True, do_handshake_on_connect=False)
        with self._lock:  # The SSL connection now owns the request's file descriptor.
            self._open.pop(request, None)
            self._open[connection] = None
        # OSError: the client does not speak TLS, or has no certificate.
        with contextlib.suppress(OSError), connection:
            connection.do_handshake()
            super().finish_request(connection, client_address)
        with self._lock:
            self._open.pop(connection, None)
