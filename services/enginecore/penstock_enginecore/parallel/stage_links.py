"""Links of a pipeline stage to other stages, over which hidden states and sampled tokens are sent.

In a step that computes something, each stage sends one message of hidden states to the next stage. The last stage sends
one message of tokens to the first stage, which embeds the tokens in a later step. The other stages need no tokens. A
stage in which a step has failed also sends the step's messages, marked as failed. Therefore no stage waits forever for
a message, and each message belongs to the step that the receiver expects.

A stage starts to receive a message before the step that needs the message. So a stage's output can be transferred while
the next stage still runs an earlier step. The buffers are large enough for any step, and each message contains its
number of rows.
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

# Transfer of messages between pipeline stages, while the stages run steps.


class Pending(Protocol):
    """Message that is being sent or received."""

    def wait(self) -> None:
        """Wait until the transfer has ended. Afterwards the buffer of a received message is filled, and the memory of a
        sent message may be changed.
        """


class StageTransport(Protocol):
    """Transfers messages between any two stages. Messages of the same ``channel`` arrive in order.

    A received message may be shorter than its buffer. If a stage sends messages of several channels to another stage,
    the other stage must call ``receive`` in the order in which the messages are sent.
    """

    stage: int
    num_stages: int

    def send(self, message: torch.Tensor, stage: int, channel: int) -> Pending:
        """Start to send ``message``, uint8 ``[bytes]``, to ``stage``. The message must not change until the transfer
        ends.
        """

    def receive(self, buffer: torch.Tensor, stage: int, channel: int) -> Pending:
        """Start to receive a message from ``stage`` into ``buffer``, uint8 ``[bytes]``."""

    def close(self) -> None:
        """Free resources of the transport that would outlive the process. Idempotent."""


class GlooTransport:
    """``StageTransport`` for pipeline stages on one host, with gloo over the loopback interface. Waiting uses no CPU
    time.
    """

    def __init__(self, meeting: Meeting, stage: int, num_stages: int, name: str = "stages") -> None:
        """Wait until all stages have joined the group; see ``gloo_group``."""
        self.stage, self.num_stages = stage, num_stages
        self._group: Any = gloo_group(meeting, name, stage, num_stages)

    def send(self, message: torch.Tensor, stage: int, channel: int) -> Pending:
        return _Work(self._group.send([message], stage, channel), message)

    def receive(self, buffer: torch.Tensor, stage: int, channel: int) -> Pending:
        return _Work(self._group.recv([buffer], stage, channel), buffer)

    def close(self) -> None:
        """Do nothing. Closing a gloo group would wait for messages whose receive was started, so the group is not
        closed before the process ends.
        """


class _Work:
    """``Pending`` of a gloo operation, which keeps the message's memory allocated until the transfer ends."""

    def __init__(self, work: Any, buffer: torch.Tensor) -> None:
        self._work = work
        self._buffer = buffer

    def wait(self) -> None:
        self._work.wait()


_STATES, _TOKENS = 0, 1
"""Numbers of the channel for hidden states and the channel for tokens."""
_HEADER_BYTES = 64
"""Size of a message's header in bytes. The header has three int64 values: the number of the message, the number of
rows, and whether the step has failed. The remaining bytes are for alignment.
"""
_NUM_POSTED = 2
_MOST_AHEAD = 256
"""Upper bound of the number of steps by which the first stage is ahead of the last stage. The bound is larger than the
number of steps in flight.
"""


class StageFailedError(Exception):
    """Raised if the step has failed in another stage."""


class _Owed(Flag):
    NOTHING = 0
    RECEIVE = auto()
    SEND = auto()
    TOKENS = auto()


class StageLinks:
    """Links of one pipeline stage to other stages. Only one thread may call the methods.

    Call ``open`` before the first forward pass. In each step, call ``begin``, then ``receive``, ``release`` and
    ``send``. After that, the last stage calls ``send_tokens``, and the first stage calls ``tokens``. If a step fails,
    call ``fail`` instead of the remaining calls. In forward passes without sampling, call neither ``begin`` nor the
    methods for tokens.
    """

    def __init__(self, transport: StageTransport) -> None:
        self.stage, self.num_stages = transport.stage, transport.num_stages
        self.is_first = self.stage == 0
        self.is_last = self.stage == self.num_stages - 1
        self.waited = 0.0
        """Time in seconds that this stage has waited for messages of other stages so far."""
        self._transport = transport
        self._posted: deque[tuple[torch.Tensor, Pending]] = deque()
        self._held: torch.Tensor | None = None
        self._sending: deque[Pending] = deque()
        self._asked: deque[StageTokens] = deque()
        self._num_received = self._num_sent = self.num_asked = self._num_told = 0
        self._owed = _Owed.NOTHING
        self._shape: tuple[int, int, int, torch.dtype] | None = None

    def open(self, *, max_tokens: int, max_seqs: int, width: int, dtype: torch.dtype) -> None:
        """Allocate buffers and start to receive hidden states. Idempotent. Raises ValueError if the sizes differ from
        the sizes of the first call.

        Args:
            max_tokens: Maximum number of tokens, and so of hidden states, in a forward pass.
            max_seqs: Maximum number of tokens that a step samples.
            width: Number of elements of a hidden state.
            dtype: Dtype of hidden states.
        """
        shape = max_tokens, max_seqs, width, dtype
        if self._shape is not None:
            if self._shape != shape:
                raise ValueError(f"the links were opened with sizes {self._shape}, but now the sizes are {shape}")
            return
        self._shape = shape
        if not self.is_first:
            for _ in range(_NUM_POSTED):
                self._post(_buffer(max_tokens * width * dtype.itemsize))

    def begin(self) -> None:
        """Begin a step that computes at least one token."""
        self._owed = _Owed.TOKENS if self.is_first or self.is_last else _Owed.NOTHING
        if not self.is_first:
            self._owed |= _Owed.RECEIVE
        if not self.is_last:
            self._owed |= _Owed.SEND

    def fail(self) -> None:
        """End a failed step: receive the step's remaining messages, and tell the other stages that the step has failed."""
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
        """Return the hidden states ``[num_tokens, width]`` that the previous stage has sent. The hidden states are
        valid until ``release`` is called. Raises StageFailedError if the step has failed in an earlier stage.
        """
        self._owed &= ~_Owed.RECEIVE
        buffer, count = self._receive_message()
        if count != num_tokens:
            self.release()
        if count is None:
            raise StageFailedError(f"a stage before stage {self.stage} failed")
        if count != num_tokens:
            raise RuntimeError(f"stage {self.stage} expects hidden states of {num_tokens} tokens, but got {count}")
        _, _, width, dtype = self._opened()
        num_bytes = count * width * dtype.itemsize
        return buffer[_HEADER_BYTES : _HEADER_BYTES + num_bytes].view(dtype).view(count, width)

    def release(self) -> None:
        """Use the memory of the last received hidden states for a later message."""
        if self._held is not None:
            buffer, self._held = self._held, None
            self._post(buffer)

    def send(self, states: torch.Tensor) -> None:
        """Start to send a copy of the hidden states ``[tokens, width]`` to the next stage."""
        self._owed &= ~_Owed.SEND
        self._send_states(states)

    def send_tokens(self, token_ids: Sequence[int]) -> None:
        """Start to send ``token_ids``, the tokens that this stage has sampled in a step, to the first stage."""
        self._owed &= ~_Owed.TOKENS
        self._send_tokens(token_ids)

    def tokens(self) -> "StageTokens":
        """Start to receive the tokens that the last stage samples in this step, int32 ``[1, tokens]``. If a stage has
        failed, the method ``wait`` of the returned object raises StageFailedError.
        """
        self._owed &= ~_Owed.TOKENS
        _, max_seqs, _, _ = self._opened()
        buffer = _buffer(4 * max_seqs)
        pending = self._transport.receive(buffer, self.num_stages - 1, _TOKENS)
        self.num_asked += 1
        asked = StageTokens(self, buffer, pending, self.num_asked)
        self._asked.append(asked)
        while self._asked[0].finished():  # Drop tokens that have arrived, even if they were never read.
            self._asked.popleft()
        return asked

    def close(self) -> None:
        """Close the links. Must be called after the last step."""
        self._transport.close()

    def wait(self, pending: Pending) -> None:
        """Wait for the message ``pending`` of another stage, and add the duration to ``waited``."""
        since = time.perf_counter()
        pending.wait()
        self.waited += time.perf_counter() - since

    def _opened(self) -> tuple[int, int, int, torch.dtype]:
        if self._shape is None:
            raise RuntimeError("a forward pass was started before open() was called")
        return self._shape

    def _post(self, buffer: torch.Tensor) -> None:
        self._posted.append((buffer, self._transport.receive(buffer, self.stage - 1, _STATES)))

    def _receive_message(self) -> tuple[torch.Tensor, int | None]:
        """Return a message of the previous stage and its number of rows. The number is None if the step has failed."""
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
        """Send the contiguous tensor ``rows``. If ``rows`` is None, send a message that the step has failed."""
        content = torch.empty(0, dtype=torch.uint8) if rows is None else rows.flatten().view(torch.uint8)
        message = torch.empty(_HEADER_BYTES + len(content), dtype=torch.uint8)
        header = message[:_HEADER_BYTES].view(torch.int64)
        header[0], header[1], header[2] = number, 0 if rows is None else len(rows), rows is None
        message[_HEADER_BYTES:] = content
        self._sending.append(self._transport.send(message, stage, channel))
        while len(self._sending) > 2 * _NUM_POSTED:
            self._sending.popleft().wait()


class StageTokens:
    """``Arrival`` of sampled tokens that the first stage receives from the last stage."""

    def __init__(self, links: StageLinks, buffer: torch.Tensor, pending: Pending, number: int) -> None:
        self._links = links
        self._buffer = buffer
        self._pending: Pending | None = pending
        self._number = number

    def arrived(self) -> bool:
        """Return whether the tokens are known to have arrived: ``wait`` has returned, or at least ``_MOST_AHEAD`` later
        steps have started to receive tokens.
        """
        return self._pending is None or self._links.num_asked - self._number >= _MOST_AHEAD

    def wait(self) -> npt.NDArray[np.int32]:
        """Wait until the tokens have arrived, and return the tokens, int32 ``[1, tokens]``."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._links.wait(pending)
        count = _rows_of(self._buffer, self._number)
        if count is None:
            raise StageFailedError("a stage after the first stage failed")
        return self._buffer[_HEADER_BYTES : _HEADER_BYTES + 4 * count].view(torch.int32).numpy()[None]

    def finished(self) -> bool:
        """Return whether the tokens have arrived, so that their buffer may be freed."""
        if self._pending is not None and self.arrived():
            pending, self._pending = self._pending, None
            self._links.wait(pending)
        return self._pending is None


def _buffer(num_bytes: int) -> torch.Tensor:
    """Allocate memory for a message of ``num_bytes`` bytes. The memory may also be written to outside torch's inference
    mode.
    """
    with torch.inference_mode(mode=False):
        return torch.empty(_HEADER_BYTES + num_bytes, dtype=torch.uint8)


def _rows_of(buffer: torch.Tensor, number: int) -> int | None:
    """Return the number of rows in message ``number``, or None if its step has failed. Raises RuntimeError if
    ``buffer`` contains a message with another number.
    """
    found, count, failed = buffer[:24].view(torch.int64).tolist()
    if found != number:
        raise RuntimeError(f"message {found} of a stage arrived, but message {number} was expected")
    return None if failed else count
