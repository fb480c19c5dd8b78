"""Buffer between the steps of engines and the client that reads the output. A slow client does not delay the steps."""

import asyncio

from penstock_common.errors import RequestFailed
from penstock_common.types.outputs import Logprobs
from penstock_common.types.sampling import OutputKind
from penstock_frontend.call_types import Finish, RequestOutput
from penstock_frontend.processing.outputs.detokenizer import TextDelta


class OutputCollector:
    """Buffer for the outputs of a request's sequences that the client has not read yet.

    A new piece of output is merged into the buffered output.

    The memory for a slow client is proportional to its output, and a slow client delays no other request. The collector
    also decides when output is ready to be read. If the output kind is FINAL, output is ready at the end of a sequence.
    For other output kinds, output is ready at the first token, every ``stream_interval`` tokens, and at the end.
    Sequences with ready output take turns.
    """

    __slots__ = ("_due", "_error", "_num_unfinished", "_reader", "_slots", "cumulative")

    def __init__(self, kind: OutputKind, stream_interval: int, num_sequences: int = 1) -> None:
        self.cumulative = kind is OutputKind.CUMULATIVE
        self._slots = [_Slot(index, kind, stream_interval) for index in range(num_sequences)]
        # indices of sequences with ready output, in the order in which their output became ready
        self._due: dict[int, None] = {}
        self._reader: asyncio.Future[None] | None = None  # the waiting reader; at most one reader waits
        self._num_unfinished = num_sequences
        self._error: RequestFailed | None = None

    @property
    def finished(self) -> bool:
        """Whether the client has read the last output of every sequence."""
        return self._num_unfinished == 0

    @property
    def ready(self) -> bool:
        """Whether there is output to read now, or an error."""
        return bool(self._due) or self._error is not None

    def put(
        self,
        delta: TextDelta,
        finish: Finish | None = None,
        *,
        index: int = 0,
        prompt_logprobs: Logprobs | None = None,
    ) -> None:
        """Add new output of a sequence to the buffer.

        ``finish`` is set in the last output of the sequence. ``prompt_logprobs`` must be added before the first token.
        """
        if self._slots[index].put(delta, finish, prompt_logprobs):
            self._due[index] = None
            self._wake()

    def fail(self, error: RequestFailed) -> None:
        """End all sequences of the request with ``error``. Output that was not read yet is dropped. Later errors are
        ignored.
        """
        self._error = self._error or error
        self._wake()

    async def get(self) -> RequestOutput:
        """Wait until output is ready, and return this output.

        Raises the error of the request. The caller must not call this method once ``finished`` is True.
        """
        if not self.ready:
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        if self._error is not None:
            raise self._error
        index = next(iter(self._due))
        del self._due[index]
        output = self._slots[index].take()
        if output.finish is not None:
            self._num_unfinished -= 1
        return output

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class _Slot:
    """Output of one sequence that the client has not read yet.

    If the output kind is CUMULATIVE, the slot also keeps the output that was already read.
    """

    __slots__ = (
        "_finish",
        "_index",
        "_interval",
        "_kind",
        "_logprobs",
        "_num_untaken",
        "_prompt_logprobs",
        "_started",
        "_text",
        "_token_ids",
    )

    def __init__(self, index: int, kind: OutputKind, stream_interval: int) -> None:
        self._index = index
        self._kind = kind
        self._interval = stream_interval
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: Logprobs | None = None
        self._prompt_logprobs: Logprobs | None = None
        self._num_untaken = 0  # number of tokens that the client has not read yet
        self._started = False
        self._finish: Finish | None = None

    def put(self, delta: TextDelta, finish: Finish | None, prompt_logprobs: Logprobs | None) -> bool:
        """Add new output of the sequence. Return whether output is ready to be read now."""
        if delta.text:
            self._text.append(delta.text)
        self._token_ids.extend(delta.token_ids)
        self._num_untaken += len(delta.token_ids)
        self._logprobs = _joined(self._logprobs, delta.logprobs)
        self._prompt_logprobs = _joined(self._prompt_logprobs, prompt_logprobs)
        if finish is not None:
            self._finish = finish
            return True
        if self._kind is OutputKind.FINAL or not (delta.text or delta.token_ids) or not self._is_due():
            return False
        self._started = True
        return True

    def take(self) -> RequestOutput:
        """Return the output that the client must receive now."""
        output = RequestOutput(
            index=self._index,
            text="".join(self._text),
            token_ids=self._token_ids,
            logprobs=self._logprobs,
            prompt_logprobs=self._prompt_logprobs,
            finish=self._finish,
        )
        self._num_untaken = 0
        self._prompt_logprobs = None
        if self._kind is OutputKind.CUMULATIVE:
            self._text, self._token_ids = [output.text], self._token_ids.copy()
            self._logprobs = None if self._logprobs is None else self._logprobs.slice(0, len(self._logprobs))
        else:
            self._text, self._token_ids, self._logprobs = [], [], None
        return output

    def _is_due(self) -> bool:
        return not self._started or self._interval == 1 or self._num_untaken >= self._interval


def _joined(before: Logprobs | None, new: Logprobs | None) -> Logprobs | None:
    if before is None or new is None:
        return new if before is None else before
    before.extend(new)
    return before
