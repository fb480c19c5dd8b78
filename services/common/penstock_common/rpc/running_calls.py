"""The calls that a server works on, so that a service can wait for their end before it ends itself."""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import Any, TypeAlias

import grpc

from penstock_common.observability.logging import get_logger

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"


class RunningCalls(grpc.aio.ServerInterceptor):
    """Remembers the task of each call from its begin until its last status is sent or its handler is cancelled.

    ``server.stop`` of ``grpc.aio`` does not wait for the handlers that it cancels. When the event loop ends before they
    have, they are cancelled once more, and gRPC prints a traceback for each.

    ``lasting``: methods whose calls last until the server stops, beside those of gRPC's own services (health, reflection).
    """

    def __init__(self, lasting: Collection[str] = ()) -> None:
        self._lasting = frozenset(lasting)
        self._tasks: dict[asyncio.Task[Any], str] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Note the call; gRPC looks its handler up in the task that then runs it."""
        if (task := asyncio.current_task()) is not None:
            self._tasks[task] = str(handler_call_details.method)
            task.add_done_callback(self._tasks.pop)
        return await continuation(handler_call_details)

    @property
    def num_running(self) -> int:
        """Calls that run, those aside that last until the server stops."""
        return sum(not self._lasts(name) for name in self._tasks.values())

    def _lasts(self, method: str) -> bool:
        return method.startswith("/grpc.") or method in self._lasting

    async def ended(self, seconds: float, *, lasting: bool = True) -> None:
        """Wait up to ``seconds`` until no call runs, then warn of those that do. Without ``lasting``, calls that last until the
        server stops do not count.
        """
        running = {task: name for task, name in self._tasks.items() if lasting or not self._lasts(name)}
        if not running:
            return
        _, left = await asyncio.wait(running, timeout=seconds)
        if left:
            methods = sorted({running[task] for task in left})
            get_logger().warning("calls still run", count=len(left), methods=methods, seconds=seconds)
