"""Bytes between the stages of a pipeline: sent and received in the background."""

from typing import Any, Protocol

import torch

from penstock_enginecore.parallel.gloo import gloo_group
from penstock_enginecore.parallel.meeting import Meeting


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
