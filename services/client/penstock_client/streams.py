"""Answers as they come: iterators that end the work in the engine when they are left."""

from collections.abc import AsyncIterator, Callable, Iterator
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import grpc

from penstock_client.errors import of_call

Response = TypeVar("Response")
Piece = TypeVar("Piece")


class Stream(Iterator[Piece], Generic[Response, Piece]):
    """Pieces of an answer. Leaving the loop, or the ``with``, cancels the call; so does letting go of the stream.

    Raises PenstockError where the call fails.
    """

    def __init__(self, call: Any, read: Callable[[Response], Piece]) -> None:
        self._call = call
        self._read = read
        self._closed = False

    def __next__(self) -> Piece:
        if self._closed:
            raise StopIteration
        try:
            return self._read(next(self._call))
        except grpc.RpcError as error:
            raise of_call(error) from None

    def close(self) -> None:
        """Cancel the call, unless it has ended. Does nothing the second time."""
        self._closed = True
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        self._call.cancel()


class AsyncStream(AsyncIterator[Piece], Generic[Response, Piece]):
    """The same for asyncio. Cancelling the task that waits for a piece cancels the call as well."""

    def __init__(self, call: grpc.aio.UnaryStreamCall[Any, Response], read: Callable[[Response], Piece]) -> None:
        self._call = call
        self._read = read
        self._closed = False

    async def __anext__(self) -> Piece:
        if self._closed:
            raise StopAsyncIteration
        try:
            response = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise of_call(error) from None
        if response is grpc.aio.EOF:
            raise StopAsyncIteration
        return self._read(response)  # type: ignore[arg-type]  # the stub's EOF is a class, not its only object

    def close(self) -> None:
        """Cancel the call, unless it has ended. Does nothing the second time."""
        self._closed = True
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self._call.cancel()
