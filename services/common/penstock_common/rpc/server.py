"""The gRPC server of every service, with its sockets, connections and running calls."""

import asyncio
import contextlib
import json
import logging
import os
import socket
import stat
import sys
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import grpc_health.v1.health as health
import msgspec
from grpc._cython import cygrpc  # type: ignore[attr-defined]  # where grpcio-channelz has them from
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock_common.addresses import resolve, take_both_families, warn_of_plaintext, with_port
from penstock_common.config.sections import ServerConfig
from penstock_common.errors import ConfigError
from penstock_common.in_flight import BytesInFlight
from penstock_common.observability.logging import get_logger
from penstock_common.rpc import interceptor, reflection
from penstock_common.rpc.channel import Keepalive
from penstock_common.rpc.credentials import server_credentials
from penstock_common.rpc.interceptor import CallObserver, ErrorInterceptor
from penstock_common.security.tls import Certificates

# Connections of a gRPC server, according to gRPC's own statistics (channelz).

OPTIONS = [("grpc.enable_channelz", 1)]
"""Options for servers whose connections are counted."""


class Connections:
    """Connections of the newest server of this process. Create this object directly after the server."""

    def __init__(self) -> None:
        self._server_id = max(_servers())

    def open(self) -> frozenset[int]:
        """Return a unique number for each open connection, or an empty set if the server has ended."""
        try:
            return frozenset(_channelz_sockets(self._server_id))
        except ValueError:  # gRPC raises this for an unknown server
            return frozenset()


def _servers() -> Iterator[int]:
    return _listed(cygrpc.channelz_get_servers, "server", lambda entry: entry["ref"]["serverId"])


def _channelz_sockets(server_id: int) -> Iterator[int]:
    return _listed(
        lambda start: cygrpc.channelz_get_server_sockets(server_id, start, 0),
        "socketRef",
        lambda entry: entry["socketId"],
    )


def _listed(ask: Callable[[int], str], field: str, number: Callable[[Any], str]) -> Iterator[int]:
    """Yield the connection numbers in gRPC's list, from all pages of the list. ``ask`` returns the page that begins at
    a number.
    """
    last = -1
    while True:
        page: dict[str, Any] = json.loads(ask(last + 1))
        for entry in page.get(field, ()):
            last = int(number(entry))
            yield last
        if page.get("end") or not page.get(field):
            return


# Running calls of a server, so that a service can wait for their end before it exits.

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"


class RunningCalls(grpc.aio.ServerInterceptor):
    """Interceptor that tracks the task of each call until the call's status is sent or its handler is cancelled.

    ``server.stop`` of ``grpc.aio`` does not wait for the handlers that it cancels. If the event loop ends before these
    handlers, the handlers are cancelled again, and gRPC prints a traceback for each handler.

    Args:
        lasting: Methods whose calls last until the server stops, in addition to gRPC's own services (health,
            reflection).
    """

    def __init__(self, lasting: Collection[str] = ()) -> None:
        self._lasting = frozenset(lasting)
        self._tasks: dict[asyncio.Task[Any], str] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Record the current task as the call's task. gRPC looks up a handler in the same task that runs it."""
        if (task := asyncio.current_task()) is not None:
            self._tasks[task] = str(handler_call_details.method)
            task.add_done_callback(self._tasks.pop)
        return await continuation(handler_call_details)

    @property
    def num_running(self) -> int:
        """Number of running calls. Calls that last until the server stops are not included."""
        return sum(not self._lasts(name) for name in self._tasks.values())

    def _lasts(self, method: str) -> bool:
        return method.startswith("/grpc.") or method in self._lasting

    async def ended(self, seconds: float, *, lasting: bool = True) -> None:
        """Wait up to ``seconds`` until no call runs. Log a warning if calls still run after that time.

        If ``lasting`` is False, calls that last until the server stops are ignored.
        """
        running = {task: name for task, name in self._tasks.items() if lasting or not self._lasts(name)}
        if not running:
            return
        _, left = await asyncio.wait(running, timeout=seconds)
        if left:
            methods = sorted({running[task] for task in left})
            get_logger().warning(
                "gRPC calls did not end within the time limit of the shutdown",
                count=len(left),
                methods=methods,
                seconds=seconds,
            )


# Access to the sockets of gRPC's server, which has no API for that.


def accept_no_more(port: int) -> None:
    """Refuse connections to ``port`` from now on.

    Each listening socket is replaced by a socket that no client can reach. gRPC does not notice the change; it would
    treat a closed socket as an error. Does nothing on systems other than Linux. A packet filter would also work, but a
    process without capabilities may not use packet filters.
    """
    if sys.platform != "linux":
        return
    for number in [number for number, _ in _sockets(port, listening=True)]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
            silent.setblocking(False)
            silent.bind("")  # the system chooses a name outside the file system
            silent.listen(0)
            os.dup2(silent.fileno(), number, inheritable=False)


def end_output(port: int) -> None:
    """Stop sending on connections that were accepted on ``port``. Peers can still read all data that was already sent."""
    for _, connection in _sockets(port, listening=False):
        with contextlib.suppress(OSError):  # the peer has already closed the connection
            connection.shutdown(socket.SHUT_WR)


def _sockets(port: int, *, listening: bool) -> Iterator[tuple[int, socket.socket]]:
    """Yield the descriptor, and a duplicate, of each TCP socket of this process with this local port.

    The duplicate is closed at the next iteration.
    """
    for entry in Path("/dev/fd").iterdir():
        try:
            number = int(entry.name)
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            duplicate = os.dup(number)
        except OSError:  # the socket was closed in the meantime
            continue
        with socket.socket(fileno=duplicate) as found:
            if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
                listens = bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
                if listens == listening and found.getsockname()[1] == port:
                    yield number, found


MAX_METADATA_BYTES = 64 * 1024
HANDSHAKE_TIMEOUT = 15.0
"""Seconds that a client has to complete its TLS handshake and to send the HTTP/2 preface and settings."""
CLEANUP_TIMEOUT = 5.0
"""Seconds that the handlers of cancelled calls have to clean up."""
_FLUSH = 0.05
"""Seconds that gRPC's own threads need to write the ends of calls and to accept pending connections."""
LIVENESS = "liveness"
"""Health name for whether the process makes progress, regardless of whether it accepts requests."""
STARTUP = "startup"
"""Health name for whether the process has finished loading."""


CLIENTS = Keepalive(30.0, 10.0)
"""Keepalive for clients anywhere. A dead client is detected within 40 s."""
SERVICES = Keepalive(5.0, 5.0)
"""Keepalive for clients that are Penstock services. The resources of a dead service are freed within 10 s, even if its
connection does not break.
"""


def server_options(config: ServerConfig, keepalive: Keepalive = CLIENTS) -> list[tuple[str, int]]:
    """Return gRPC's options for limits, keepalive and connection age. Idle streams stay open: clients may ping every 5
    s.

    gRPC varies the maximum age at random, and lets calls on an old connection complete.
    """
    age = [("grpc.max_connection_age_ms", max(1, int(config.max_connection_age * 1000)))]
    return [
        *OPTIONS,
        *interceptor.GZIP_ONLY,
        ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_TIMEOUT * 1000)),
        *(age if config.max_connection_age else []),
        ("grpc.max_receive_message_length", config.max_message_bytes),
        ("grpc.max_send_message_length", config.max_message_bytes),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.max_concurrent_streams", config.max_concurrent_streams),
        *keepalive.options(),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.so_reuseport", int(config.reuse_port)),
    ]


def _of_the_gone(record: logging.LogRecord) -> bool:
    """Return False for log records about an answer that gRPC could not send because the client has disconnected."""
    return not (record.exc_info and isinstance(record.exc_info[1], grpc.aio.InternalError))


logging.getLogger("grpc._cython.cygrpc").addFilter(_of_the_gone)


class RpcServer:
    """A ``grpc.aio`` server with error details, ``grpc.health.v1`` and reflection.

    Lifecycle: add servicers to ``server``, then call ``start``, ``set_serving`` when the service's state changes, and
    ``stop``.

    Health names: the empty name and the services' names report whether requests are accepted. ``liveness`` reports
    whether the process is healthy, also while the service drains. ``startup`` reports whether the process has finished
    loading. If ``loads`` is True, the service loads while it listens, and sets ``startup`` itself. Otherwise
    ``startup`` is SERVING from the start.

    Args:
        field: Name of this listener in the configuration.
        lasting: Full names of methods whose calls last as long as the server. gRPC's own services need not be named.
    """

    def __init__(
        self,
        config: ServerConfig,
        *,
        service_names: Sequence[str],
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
        observer: CallObserver | None = None,
        field: str = "server",
        keepalive: Keepalive = CLIENTS,
        loads: bool = False,
        check_responses: bool = False,
        in_flight: BytesInFlight | None = None,
        lasting: Collection[str] = (),
        certificates: Certificates | None = None,
    ) -> None:
        """Create the server without binding it.

        Args:
            config: Config of the listener.
            service_names: Names of the services, for health and reflection.
            interceptors: Interceptors that run after the server's own.
            observer: Observes calls, or None.
            field: Name of this listener in the configuration.
            keepalive: Keepalive of the server's connections.
            loads: Whether the service loads while it listens.
            check_responses: Whether a response that is too large ends its call with an error that states the limit.
            in_flight: Counts the bytes of large messages of calls, and refuses messages above its limit. None: no
                limit.
            lasting: Full names of methods whose calls last as long as the server.
            certificates: Tracks the expiry of this listener's certificates, or None.
        """
        self._config = config
        self._field = field
        self._loads = loads
        self._certificates = certificates
        self._service_names = tuple(service_names)
        self._calls = RunningCalls(lasting)
        limit = config.max_message_bytes if check_responses else None
        errors = ErrorInterceptor(
            observer,
            max_response_bytes=limit,
            in_flight=in_flight,
            max_decompressed_bytes=min(config.max_message_bytes, interceptor.MAX_DECOMPRESSED_BYTES),
        )
        self.server = grpc.aio.server(
            interceptors=[self._calls, errors, *interceptors],
            options=server_options(config, keepalive),
        )
        self._connections = Connections()
        self.health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.server)
        reflection.serve(self.server, (*self._service_names, health.SERVICE_NAME))
        self._health_server: grpc.aio.Server | None = None
        self.port = 0
        self.health_port = -1

    async def start(self) -> int:
        """Bind the port and serve, with the initial status NOT_SERVING. Returns the port.

        Raises ConfigError if the port is in use or a certificate is invalid.
        """
        credentials = self._credentials()
        self.port = self._bind(self.server, self._config.port, credentials, shared=self._config.reuse_port)
        if self._config.health_port >= 0:
            alone = msgspec.structs.replace(self._config, reuse_port=False)
            self._health_server = grpc.aio.server(options=[*server_options(alone), *interceptor.NOT_COMPRESSED])
            health_pb2_grpc.add_HealthServicer_to_server(self.health, self._health_server)
            self.health_port = self._bind(self._health_server, self._config.health_port, None)
            await self._health_server.start()
        await self.set_serving(False)
        await self.set_serving(True, LIVENESS)
        await self.set_serving(not self._loads, STARTUP)
        await self.server.start()
        return self.port

    async def set_serving(self, serving: bool, *names: str) -> None:
        """Set the health status of ``names``, or of the process and all its services. Watchers are notified."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in names or ("", *self._service_names):
            await self.health.set(name, status)

    @property
    def num_calls(self) -> int:
        """Number of running calls. Calls that last as long as the server are not included."""
        return self._calls.num_running

    def connections(self) -> frozenset[int]:
        """Return a unique number for each open connection."""
        return self._connections.open()

    async def calls_ended(self, seconds: float) -> None:
        """Wait up to ``seconds`` until the running calls have ended. The services must already be ending these calls."""
        await self._calls.ended(seconds, lasting=False)

    async def hang_up(self, seconds: float) -> None:
        """Close all connections once the running calls have ended, or after ``seconds``.

        After that, clients cannot send new calls. gRPC would answer new calls as cancelled while the server stops.
        """
        await self.calls_ended(seconds)
        accept_no_more(self.port)
        await asyncio.sleep(_FLUSH)
        end_output(self.port)

    async def stop(self, grace: float) -> None:
        """Accept no new calls, wait up to ``grace`` seconds for running calls, and cancel the calls that still run.
        Returns when all handlers have ended.
        """
        await self.health.enter_graceful_shutdown()
        await self.server.stop(grace)
        await self._calls.ended(CLEANUP_TIMEOUT)
        if self._health_server is not None:
            await self._health_server.stop(None)

    def _credentials(self) -> grpc.ServerCredentials | None:
        if not self._config.tls.enabled:
            warn_of_plaintext(self._config.host, field=self._field)
            return None
        return server_credentials(self._config.tls, field=f"{self._field}.tls", certificates=self._certificates)

    def _bind(
        self, server: grpc.aio.Server, port: int, credentials: grpc.ServerCredentials | None, *, shared: bool = False
    ) -> int:
        address = with_port(self._config.host, port)
        taken = f"cannot listen on {address}: {{}}; is another server running? Choose a free port"
        if (problem := _why_taken(self._config.host, port, shared=shared)) is not None:
            raise ConfigError(taken.format(problem))
        try:
            if credentials is None:
                return server.add_insecure_port(address)
            return server.add_secure_port(address, credentials)
        except RuntimeError as e:
            raise ConfigError(taken.format(e)) from None


def _why_taken(host: str, port: int, *, shared: bool) -> str | None:
    """Return the reason why the port cannot be bound, or None. gRPC's own bind error does not contain the reason.

    ``shared`` means that other processes with the same option may also use the port.
    """
    if port == 0:
        return None
    try:
        family, address = resolve(host, port)
    except OSError as e:
        return str(e)
    with contextlib.closing(socket.socket(family, socket.SOCK_STREAM)) as probe:
        take_both_families(probe)
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT if shared else socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as e:
            return e.strerror or str(e)
    return None
