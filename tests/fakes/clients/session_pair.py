"""A frontend's session with an engine, and the outputs that the frontend has received on it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec

from penstock_common.tensors.chunks import DEFAULT_MAX_MESSAGE_BYTES
from penstock_common.types.outputs import EngineCoreOutput, EngineCoreOutputs
from penstock_common.types.request import EngineCoreRequest
from penstock_frontend.rpc.engine_session import EngineSession
from penstock_frontend.rpc.media_transport import MediaTransport
from tests.fakes.patience import PATIENCE


class Pair:
    """Session of a frontend with an engine, and the outputs received on it."""

    def __init__(
        self, address: str, max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES, media: MediaTransport | None = None
    ) -> None:
        self.outputs: dict[str, list[EngineCoreOutput]] = {}
        self.finished: list[str] = []
        self.frames: list[EngineCoreOutputs] = []
        self.numbered: dict[int, str] = {}
        self._changed = asyncio.Event()
        self.session = EngineSession(
            address,
            frontend_id="f",
            incarnation="1",
            on_outputs=self._take,
            on_draining=lambda time_left: None,
            media=media,
            max_message_bytes=max_message_bytes,
        )

    def _take(self, frame: EngineCoreOutputs) -> None:
        self.frames.append(frame)
        for number, offset, token_ids in frame.tokens.rows() if frame.tokens is not None else ():
            row = EngineCoreOutput(request_id=self.numbered[number], offset=offset, new_token_ids=token_ids)
            self.outputs.setdefault(row.request_id, []).append(row)
        for output in frame.outputs:
            self.outputs.setdefault(output.request_id, []).append(output)
        self.finished += frame.finished_requests
        self._changed.set()

    def add(self, request: EngineCoreRequest) -> None:
        """Start a request with a unique request number."""
        number = len(self.numbered) + 1
        self.numbered[number] = request.request_id
        self.session.add(msgspec.structs.replace(request, request_number=number))

    def end(self, request_id: str) -> EngineCoreOutput | None:
        """Return the output that ended a request. Later outputs, sent before the engine knew of the end, are ignored."""
        ends = (output for output in self.outputs.get(request_id, []) if output.finish_reason is not None)
        return next(ends, None)

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait until a condition is true. Raises AssertionError if the session ends before."""
        async with asyncio.timeout(PATIENCE):
            while not condition():
                self._changed.clear()
                changed = asyncio.ensure_future(self._changed.wait())
                await asyncio.wait({changed, self.running}, timeout=0.1, return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
                assert not self.running.done(), f"the session has ended: {self.running.result()}"

    async def until_ended(self, *request_ids: str) -> list[EngineCoreOutput]:
        """Wait until the requests have ended, and return the outputs that ended them."""
        await self.until(lambda: all(map(self.end, request_ids)))
        return [end for request_id in request_ids if (end := self.end(request_id)) is not None]

    def tokens(self, request_id: str) -> list[int]:
        return [token for output in self.outputs[request_id] for token in output.new_token_ids]


@contextlib.asynccontextmanager
async def paired(address: str, **options: Any) -> AsyncIterator[Pair]:
    pair = Pair(address, **options)
    await pair.session.open()
    pair.running = asyncio.create_task(pair.session.run())
    try:
        yield pair
    finally:
        pair.running.cancel()
        await asyncio.gather(pair.running, return_exceptions=True)
        await pair.session.close()
