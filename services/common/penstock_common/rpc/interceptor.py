"""The one place where exceptions of a servicer become gRPC statuses."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias

import grpc

from penstock_common.errors import Internal, RequestFailed, Unimplemented
from penstock_common.logging import get_logger
from penstock_common.rpc.status import abort

Context = grpc.aio.ServicerContext[Any, Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """RequestFailed becomes its status with details; anything else is logged and becomes INTERNAL without its text."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Wrap the handler of the called method."""
        handler: Any = await continuation(handler_call_details)
        method = str(handler_call_details.method)
        if handler is None or method.startswith("/grpc."):
            return handler  # type: ignore[no-any-return]
        codecs = (handler.request_deserializer, handler.response_serializer)
        if handler.unary_unary:
            return grpc.unary_unary_rpc_method_handler(_single(handler.unary_unary, method), *codecs)
        if handler.stream_unary:
            return grpc.stream_unary_rpc_method_handler(_single(handler.stream_unary, method), *codecs)
        if handler.unary_stream:
            return grpc.unary_stream_rpc_method_handler(_stream(handler.unary_stream, method), *codecs)
        return grpc.stream_stream_rpc_method_handler(_stream(handler.stream_stream, method), *codecs)


def _single(behaviour: Any, method: str) -> Any:
    async def call(request: Any, context: Context) -> Any:
        try:
            return await behaviour(request, context)
        except (grpc.aio.AbortError, grpc.aio.BaseError):
            raise
        except Exception as e:
            await _abort(e, method, context)

    return call


def _stream(behaviour: Any, method: str) -> Any:
    async def call(request: Any, context: Context) -> AsyncIterator[Any]:
        try:
            async for response in behaviour(request, context):
                yield response
        except (grpc.aio.AbortError, grpc.aio.BaseError):
            raise
        except Exception as e:
            await _abort(e, method, context)

    return call


async def _abort(error: Exception, method: str, context: Context) -> None:
    if isinstance(error, NotImplementedError):
        error = Unimplemented(f"{method} is not served yet")
    if not isinstance(error, RequestFailed):
        get_logger().error("unexpected error", method=method, exc_info=error)
        error = Internal(f"internal error ({type(error).__name__})")
    await abort(context, error)
