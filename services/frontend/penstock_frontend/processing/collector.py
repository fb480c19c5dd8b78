"""Between the engine's steps and a client's reading: one slot, whatever the client's speed."""

import asyncio

from penstock_common.errors import RequestFailed
from penstock_common.types.sampling import OutputKind
from penstock_frontend.processing.output_text import TextDelta
from penstock_frontend.processing.request import Finish, RequestOutput


class OutputCollector:
    """Holds what the client has not taken yet; a new delta merges into it.

    A slow client thus costs memory proportional to its output, and holds up nobody. Also decides when there is something
    to take: for FINAL at the end only; else at the first output, every ``stream_interval`` tokens, and at the end.
    """

    __slots__ = ("_error", "_event", "_finish", "_interval", "_kind", "_num_untaken", "_started", "_text", "_token_ids")

    def __init__(self, kind: OutputKind, stream_interval: int) -> None:
        self._kind = kind
        self._interval = stream_interval
        self._event = asyncio.Event()
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._num_untaken = 0  # of these tokens; CUMULATIVE keeps those that were taken
        self._started = False
        self._finish: Finish | None = None
        self._error: RequestFailed | None = None

    def put(self, delta: TextDelta, finish: Finish | None = None) -> None:
        """Add what is new. ``finish`` with the last of it."""
        if delta.text:
            self._text.append(delta.text)
        self._token_ids.extend(delta.token_ids)
        self._num_untaken += len(delta.token_ids)
        if finish is not None:
            self._finish = finish
            self._event.set()
        elif self._kind is not OutputKind.FINAL and (delta.text or delta.token_ids) and self._is_due():
            self._started = True
            self._event.set()

    def fail(self, error: RequestFailed) -> None:
        """End with ``error`` instead of more output. What was not taken is lost."""
        self._error = error
        self._event.set()

    async def get(self) -> RequestOutput:
        """Wait for output and take it. After one with ``finish`` there is no more. Raises what the request failed with."""
        await self._event.wait()
        self._event.clear()
        if self._error is not None:
            raise self._error
        output = RequestOutput(text="".join(self._text), token_ids=self._token_ids, finish=self._finish)
        self._num_untaken = 0
        if self._kind is OutputKind.CUMULATIVE:
            self._text, self._token_ids = [output.text], self._token_ids.copy()
        else:
            self._text, self._token_ids = [], []
        return output

    def _is_due(self) -> bool:
        return not self._started or self._interval == 1 or self._num_untaken >= self._interval
