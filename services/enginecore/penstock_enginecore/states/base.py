"""Calls that recurrent layers make in a forward pass, the states that a step reads and writes, and the interface of
code that computes the calls.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from penstock_enginecore.attention.base import IntArray
from penstock_enginecore.states.core.spec import SPAN, ZERO_SLOT, Decay, StateStep, span_start


@dataclass(frozen=True, slots=True)
class ConvCall:
    """Call of a layer for a causal convolution over each channel separately.

    Attributes:
        mixer: The module that calls.
        inputs: ``[tokens, channels]``.
        weight: ``[channels, kernel]``. The last weight of each channel is for the newest input.
        bias: ``[channels]``, or None.
        activation: Name of transformers' activation function, or None.
    """

    mixer: torch.nn.Module
    inputs: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    activation: str | None


@dataclass(frozen=True, slots=True)
class ScanCall:
    """Call of a layer for a linear recurrence in float32.

    The state S ``[heads, key size, value size]`` changes with every token: ``S = exp(decay) * S + key * update``. The
    output is ``query * S``. If ``beta`` is given, ``update`` is ``beta * (value - key * exp(decay) * S)``. Otherwise,
    ``update`` is ``value``.

    With ``beta`` and a decay for each head, the recurrence is the gated delta rule (arXiv:2412.06464). With ``beta`` and a
    decay for each row of S, it is Kimi delta attention, KDA (arXiv:2510.26692). Without ``beta`` and ``rates``, it is the
    state space duality of Mamba-2 (arXiv:2405.21060). With ``rates``, it is the selective scan of Mamba-1
    (arXiv:2312.00752), whose channels are the heads.

    Attributes:
        mixer: The module that calls.
        query: ``[tokens, key heads, key size]``.
        key: ``[tokens, key heads, key size]``. A key head serves ``heads / key heads`` consecutive heads.
        value: ``[tokens, heads, value size]``.
        decay: ``[tokens, heads]``, or ``[tokens, heads, key size]`` for each row of the state. All numbers are at most
            0.
        beta: ``[tokens, heads]``, or None.
        rates: ``[heads, key size]``, at least 0, or None. If given, row ``n`` of the state of a head decays by ``decay *
            rates[n]``, there is one key head, and ``value size`` is 1.
    """

    mixer: torch.nn.Module
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    decay: torch.Tensor
    beta: torch.Tensor | None
    rates: torch.Tensor | None = None

    @property
    def kind(self) -> Decay:
        """Kind of the decays of the recurrence."""
        if self.rates is not None:
            return "rate"
        return "row" if self.decay.dim() == 3 else "head"


class StateContext(Protocol):
    """Interface of objects that compute the calls of recurrent layers in a forward pass."""

    def convolve(self, call: ConvCall) -> torch.Tensor:
        """Return the result of the convolution and its activation function, ``[tokens, channels]``, in the dtype of the
        inputs.
        """

    def scan(self, call: ScanCall) -> torch.Tensor:
        """Return the outputs of the recurrence, float32 ``[tokens, heads, value size]``."""


_context: ContextVar[StateContext | None] = ContextVar("penstock_state_context", default=None)


@contextmanager
def use_states(context: StateContext | None) -> Iterator[None]:
    """Return a context manager in which ``context`` handles the calls of recurrent layers."""
    token = _context.set(context)
    try:
        yield
    finally:
        _context.reset(token)


def current_states() -> StateContext | None:
    """Return the StateContext that ``use_states`` set, or None."""
    return _context.get()


@dataclass(frozen=True, slots=True)
class SequenceStep:
    """The tokens of one request in a step, and the request's recurrent states.

    Attributes:
        first: Index of the request's first token in the flat batch.
        start: Position of the same token in the request.
        count: Number of tokens of the request in the step.
        state: The request's ring of open rows (stored inputs of tokens after the last closed state), and its slots of
            states.
    """

    first: int
    start: int
    count: int
    state: StateStep

    @property
    def base(self) -> int:
        """Position of the closed state (the state at the end of a span) from which the computation of the tokens
        starts.
        """
        return span_start(self.start)

    @property
    def end(self) -> int:
        """Position after the last token of the request in the step."""
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class StateMetadata:
    """States of all requests in a step, in the order of the flat batch.

    Attributes:
        broken: Indices of requests whose new states contain a number that is not finite. The forward pass adds the
            indices.
        flags: Tensors on a device, ``[requests]``, whose elements are not 0 for such requests. The forward pass adds
            tensors instead of indices if reading the tensors would wait for the device.
    """

    sequences: Sequence[SequenceStep]
    broken: set[int] = field(default_factory=set)
    flags: list[torch.Tensor] = field(default_factory=list)

    @classmethod
    def of(
        cls, request_ids: Sequence[str], query_start_loc: IntArray, starts: IntArray, states: Mapping[str, StateStep]
    ) -> "StateMetadata":
        """Return the states of requests whose tokens begin at ``query_start_loc`` ``[requests + 1]`` of the batch and at
        positions ``starts`` ``[requests]``.
        """
        firsts, counts = query_start_loc[:-1].tolist(), np.diff(query_start_loc).tolist()
        return cls(
            [
                SequenceStep(first, start, count, states[request_id])
                for request_id, first, start, count in zip(request_ids, firsts, starts.tolist(), counts, strict=True)
            ]
        )

    @classmethod
    def alone(cls, query_start_loc: IntArray, seq_lens: IntArray) -> "StateMetadata":
        """Return the states of a step that no scheduler planned, for test runs of the model. Request ``i`` owns the
        ring ``i`` and the slots ``2 * i + 1`` and ``2 * i + 2``. The request writes its two slots alternately.
        """
        sequences = []
        for i, (first, end) in enumerate(zip(query_start_loc[:-1].tolist(), query_start_loc[1:].tolist(), strict=True)):
            count = end - first
            start = int(seq_lens[i]) - count
            closed, last = span_start(start), span_start(start + count)
            writes = [(last, _slot_of(i, last))] if last > closed else []
            state = StateStep(i, _slot_of(i, closed) if closed else ZERO_SLOT, writes)
            sequences.append(SequenceStep(first, start, count, state))
        return cls(sequences)

    @property
    def num_slots(self) -> int:
        """Number of slots that the requests of ``alone`` need."""
        return 2 * len(self.sequences) + 1


def _slot_of(request: int, position: int) -> int:
    return 2 * request + 1 + position // SPAN % 2
