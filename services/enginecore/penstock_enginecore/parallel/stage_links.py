"""What a stage of a pipeline gets from the one before, gives to the one behind, and learns of the tokens.

A step that computes something is one message of hidden states from each stage to the next, and one of tokens from the last to the
first, which embeds them in a later step; the stages between need none. Each step has its messages also where it fails: then they
say so. So the streams stay in step whatever fails where, and no stage waits for what does not come.

Receives are begun before the step that they are for, so that what a stage puts out travels while the next is still at another
step: their buffers are as large as any step, and a message says how many rows it has.
"""

import time
from collections import deque
from collections.abc import Sequence
from enum import Flag, auto
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from penstock_enginecore.parallel.collectives import gloo_group
from penstock_enginecore.parallel.meeting import Meeting

# Bytes between the stages of a pipeline: sent and received in the background.


class Pending(Protocol):
    """A message on its way."""

    def wait(self) -> None:
        """Until the buffer is filled, or may be written to again."""


class StageTransport(Protocol):
    """Messages between any two stages arrive in the order in which they were sent, by ``channel``. A message may be shorter than
    the buffer that it is received into. Where a stage sends another one messages of several channels, that one has to begin to
    receive them in the order in which they are sent.
    """

    stage: int
    num_stages: int

    def send(self, message: torch.Tensor, stage: int, channel: int) -> Pending:
        """Begin to send uint8 ``[bytes]``, which is not to change before the end of it."""

    def receive(self, buffer: torch.Tensor, stage: int, channel: int) -> Pending:
        """Begin to receive into uint8 ``[bytes]``."""

    def close(self) -> None:
        """Give back what the transport holds, where that does not end with the process. Idempotent."""


class GlooTransport:
    """Between stages of one host, over the loopback interface. One that waits for a message takes no time of a processor."""

    def __init__(self, meeting: Meeting, stage: int, num_stages: int, name: str = "stages") -> None:
        """Waits for all stages. See ``gloo_group``."""
        self.stage, self.num_stages = stage, num_stages
        self._group: Any = gloo_group(meeting, name, stage, num_stages)

    def send(self, message: torch.Tensor, stage: int, channel: int) -> Pending:
        return _Work(self._group.send([message], stage, channel), message)

    def receive(self, buffer: torch.Tensor, stage: int, channel: int) -> Pending:
        return _Work(self._group.recv([buffer], stage, channel), buffer)

    def close(self) -> None:
        """See ``StageTransport``. The group ends with the process: gloo waits for messages that it has begun to receive."""


class _Work:
    """Keeps the memory until it is waited for."""

    def __init__(self, work: Any, buffer: torch.Tensor) -> None:
        self._work = work
        self._buffer = buffer

    def wait(self) -> None:
        self._work.wait()


_STATES, _TOKENS = 0, 1
"""Channels."""
_HEADER_BYTES = 64
"""int64: number of the message, rows, whether the step has failed. The rest is for alignment."""
_NUM_POSTED = 2
_MOST_AHEAD = 256
"""Steps that the first stage is never ahead of the last: more than an engine has in flight."""


class StageFailedError(Exception):
    """Another stage has failed in the step."""


class _Owed(Flag):
    NOTHING = 0
    RECEIVE = auto()
    SEND = auto()
    TOKENS = auto()


class StageLinks:
    """The links of one stage. All methods belong to one thread.

    ``open`` comes before the first pass. A step is ``begin``, then ``receive``, ``release`` and ``send``, then ``send_tokens`` in
    the last stage and ``tokens`` in the first; ``fail`` makes up for what of these has not come. Passes without sampling have
    neither ``begin`` nor tokens.
    """

    def __init__(self, transport: StageTransport) -> None:
        self.stage, self.num_stages = transport.stage, transport.num_stages
        self.is_first = self.stage == 0
        self.is_last = self.stage == self.num_stages - 1
        self.waited = 0.0
        """Seconds that this stage has waited for others, since the start."""
        self._transport = transport
        self._posted: deque[tuple[torch.Tensor, Pending]] = deque()
        self._held: torch.Tensor | None = None
        self._sending: deque[Pending] = deque()
        self._asked: deque[StageTokens] = deque()
        self._num_received = self._num_sent = self.num_asked = self._num_told = 0
        self._owed = _Owed.NOTHING
        self._shape: tuple[int, int, int, torch.dtype] | None = None

    def open(self, *, max_tokens: int, max_seqs: int, width: int, dtype: torch.dtype) -> None:
        """Begin to receive. A pass has ``max_tokens`` hidden states of ``width`` numbers of ``dtype`` at most, a step
        ``max_seqs`` tokens. Idempotent; ValueError for other sizes than before.
        """
        shape = max_tokens, max_seqs, width, dtype
        if self._shape is not None:
            if self._shape != shape:
                raise ValueError(f"the links are open for {self._shape} and not for {shape}")
            return
        self._shape = shape
        if not self.is_first:
            for _ in range(_NUM_POSTED):
                self._post(_buffer(max_tokens * width * dtype.itemsize))

    def begin(self) -> None:
        """A step that computes something."""
        self._owed = _Owed.TOKENS if self.is_first or self.is_last else _Owed.NOTHING
        if not self.is_first:
            self._owed |= _Owed.RECEIVE
        if not self.is_last:
            self._owed |= _Owed.SEND

    def fail(self) -> None:
        """The step fails here: take what comes for it, and tell the others."""
        if _Owed.RECEIVE in self._owed:
            self._receive_message()
            self.release()
        if _Owed.SEND in self._owed:
            self._send_states(None)
        if _Owed.TOKENS in self._owed:
            if self.is_first:
                self.tokens()
            else:
                self._send_tokens(None)
        self._owed = _Owed.NOTHING

    def receive(self, num_tokens: int) -> torch.Tensor:
        """Hidden states ``[num_tokens, width]`` of the stage before; they may be overwritten after ``release``. Raises
        StageFailedError.
        """
        self._owed &= ~_Owed.RECEIVE
        buffer, count = self._receive_message()
        if count != num_tokens:
            self.release()
        if count is None:
            raise StageFailedError(f"a stage before stage {self.stage} failed")
        if count != num_tokens:
            raise RuntimeError(f"stage {self.stage} expects {num_tokens} tokens and gets {count}")
        _, _, width, dtype = self._opened()
        num_bytes = count * width * dtype.itemsize
        return buffer[_HEADER_BYTES : _HEADER_BYTES + num_bytes].view(dtype).view(count, width)

    def release(self) -> None:
        """What was received is not needed any more."""
        if self._held is not None:
            buffer, self._held = self._held, None
            self._post(buffer)

    def send(self, states: torch.Tensor) -> None:
        """Begin to send hidden states ``[tokens, width]`` to the next stage. They are copied."""
        self._owed &= ~_Owed.SEND
        self._send_states(states)

    def send_tokens(self, token_ids: Sequence[int]) -> None:
        """Begin to tell the first stage a step's tokens."""
        self._owed &= ~_Owed.TOKENS
        self._send_tokens(token_ids)

    def tokens(self) -> "StageTokens":
        """The tokens of the step, int32 ``[1, tokens]``; to wait for them raises StageFailedError where a stage has failed."""
        self._owed &= ~_Owed.TOKENS
        _, max_seqs, _, _ = self._opened()
        buffer = _buffer(4 * max_seqs)
        pending = self._transport.receive(buffer, self.num_stages - 1, _TOKENS)
        self.num_asked += 1
        asked = StageTokens(self, buffer, pending, self.num_asked)
        self._asked.append(asked)
        while self._asked[0].finished():  # those that nobody wanted to know
            self._asked.popleft()
        return asked

    def close(self) -> None:
        """No step follows."""
        self._transport.close()

    def wait(self, pending: Pending) -> None:
        """Wait for a message of another stage."""
        since = time.perf_counter()
        pending.wait()
        self.waited += time.perf_counter() - since

    def _opened(self) -> tuple[int, int, int, torch.dtype]:
        if self._shape is None:
            raise RuntimeError("open must come before the first pass")
        return self._shape

    def _post(self, buffer: torch.Tensor) -> None:
        self._posted.append((buffer, self._transport.receive(buffer, self.stage - 1, _STATES)))

    def _receive_message(self) -> tuple[torch.Tensor, int | None]:
        """A message and its rows, None where the step has failed."""
        self._opened()
        buffer, pending = self._posted.popleft()
        self.wait(pending)
        self._held = buffer
        self._num_received += 1
        return buffer, _rows_of(buffer, self._num_received)

    def _send_states(self, states: torch.Tensor | None) -> None:
        self._num_sent += 1
        self._send(None if states is None else states.contiguous(), self._num_sent, self.stage + 1, _STATES)

    def _send_tokens(self, token_ids: Sequence[int] | None) -> None:
        self._num_told += 1
        tokens = None if token_ids is None else torch.tensor(token_ids, dtype=torch.int32)
        self._send(tokens, self._num_told, 0, _TOKENS)

    def _send(self, rows: torch.Tensor | None, number: int, stage: int, channel: int) -> None:
        """``rows``: contiguous; None: the step has failed."""
        content = torch.empty(0, dtype=torch.uint8) if rows is None else rows.flatten().view(torch.uint8)
        message = torch.empty(_HEADER_BYTES + len(content), dtype=torch.uint8)
        header = message[:_HEADER_BYTES].view(torch.int64)
        header[0], header[1], header[2] = number, 0 if rows is None else len(rows), rows is None
        message[_HEADER_BYTES:] = content
        self._sending.append(self._transport.send(message, stage, channel))
        while len(self._sending) > 2 * _NUM_POSTED:
            self._sending.popleft().wait()


class StageTokens:
    """Tokens on their way from the last stage: an ``Arrival``."""

    def __init__(self, links: StageLinks, buffer: torch.Tensor, pending: Pending, number: int) -> None:
        self._links = links
        self._buffer = buffer
        self._pending: Pending | None = pending
        self._number = number

    def arrived(self) -> bool:
        """Whether they were waited for, or are so old that they must have come."""
        return self._pending is None or self._links.num_asked - self._number >= _MOST_AHEAD

    def wait(self) -> npt.NDArray[np.int32]:
        """int32 ``[1, tokens]``."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._links.wait(pending)
        count = _rows_of(self._buffer, self._number)
        if count is None:
            raise StageFailedError("a stage behind the first failed")
        return self._buffer[_HEADER_BYTES : _HEADER_BYTES + 4 * count].view(torch.int32).numpy()[None]

    def finished(self) -> bool:
        """Whether the buffer may be let go of."""
        if self._pending is not None and self.arrived():
            pending, self._pending = self._pending, None
            self._links.wait(pending)
        return self._pending is None


def _buffer(num_bytes: int) -> torch.Tensor:
    """For a message of so many bytes. It may be written to outside of inference mode as well."""
    with torch.inference_mode(mode=False):
        return torch.empty(_HEADER_BYTES + num_bytes, dtype=torch.uint8)


def _rows_of(buffer: torch.Tensor, number: int) -> int | None:
    """The rows of message ``number``; None: the step has failed. RuntimeError for another message."""
    found, count, failed = buffer[:24].view(torch.int64).tolist()
    if found != number:
        raise RuntimeError(f"message {found} of a stage comes in the place of message {number}")
    return None if failed else count
