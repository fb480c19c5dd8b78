"""Memory needs of recurrent layers, and the size of the state pool.

Time is divided into spans of ``SPAN`` tokens at absolute positions. For each request and layer, memory holds the
*closed state*, which is the state at the end of the last whole span, and *open rows*, which are the inputs of the tokens
since then. A closed state is written once and then only read. Rejected drafts are therefore overwritten by position,
and a request that hits a cached prefix reads a closed state of another request in place.
"""

from typing import Literal

import msgspec

SPAN = 16
"""Tokens of a span. The block size of models with states equals it."""
MAX_DRAFTS = SPAN - 1
"""Maximum number of drafted tokens in a step, so that a step with drafts closes at most one span."""
ZERO_SLOT = 0
"""Slot with the state of an empty sequence. It is zero and is never written."""
SLOTS_PER_REQUEST = 2
"""Slots that a running request owns: one with its last closed state, one for its next."""

Decay = Literal["head", "row", "rate"]
"""Decays of a recurrence. ``head``: one for the state of a head. ``row``: one for each row of the state of a head.
``rate``: one for each row, which is a token's decay for the head times a constant rate of the row.
"""


class StateSpec(msgspec.Struct, frozen=True, kw_only=True):
    """State of one layer.

    Attributes:
        channels: Channels of the causal convolution.
        kernel: Taps of the convolution. The state keeps the last ``kernel - 1`` inputs.
        input_size: Bytes of one input of the convolution.
        num_heads: Heads of the recurrent state. 0 for a short convolution, which has no other state.
        num_key_heads: Heads of keys and queries. Each serves ``num_heads / num_key_heads`` consecutive heads.
        key_size: Rows of the state of a head.
        value_size: Columns of the state of a head.
        decay: Decays of the recurrent state.
    """

    channels: int
    kernel: int
    input_size: int
    num_heads: int = 0
    num_key_heads: int = 0
    key_size: int = 0
    value_size: int = 0
    decay: Decay = "head"

    @property
    def decay_size(self) -> int:
        """Decays of a head in an open row. Rates are not in rows, because they are weights."""
        return self.key_size if self.decay == "row" else 1

    @property
    def slot_bytes(self) -> int:
        """Bytes of one closed state. Numbers of the recurrent state are float32."""
        tail = self.channels * (self.kernel - 1) * self.input_size
        return tail + self.num_heads * self.key_size * self.value_size * 4

    @property
    def row_bytes(self) -> int:
        """Bytes of the open row of one token: an input of the convolution, a key, an update and decays."""
        numbers = self.num_key_heads * self.key_size + self.num_heads * (self.value_size + self.decay_size)
        return self.channels * self.input_size + numbers * 4


class StateNeeds(msgspec.Struct, frozen=True, kw_only=True):
    """Memory needs of all recurrent layers of a model.

    Attributes:
        num_layers: Number of recurrent layers.
        slot_bytes: Bytes of one closed state of all layers.
        row_bytes: Bytes of the open rows of one token in all layers.
    """

    num_layers: int
    slot_bytes: int
    row_bytes: int

    def request_bytes(self, num_rows: int) -> int:
        """Return the bytes that a running request owns: two slots, and a ring of ``num_rows`` open rows."""
        return SLOTS_PER_REQUEST * self.slot_bytes + num_rows * self.row_bytes


class StatePoolConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Size of the state pool.

    Attributes:
        num_slots: Number of slots, including ``ZERO_SLOT``.
        num_requests: Maximum number of running requests. Each has open rows and two slots.
        rows_per_request: Positions of a request's ring of open rows.
        interval: Tokens between kept states of a sequence, a multiple of the block size.
    """

    num_slots: int
    num_requests: int
    rows_per_request: int
    interval: int

    @property
    def num_kept(self) -> int:
        """Number of slots that remain for kept states when ``num_requests`` requests run."""
        return self.num_slots - 1 - SLOTS_PER_REQUEST * self.num_requests


class StateStep(msgspec.Struct, frozen=True, array_like=True):
    """States of one request in one step.

    Attributes:
        rows: Number of the request's ring of open rows.
        closed: Slot of the closed state before the step's first token.
        writes: Ends of spans in the step whose states are written, in order, with their slots.
    """

    rows: int
    closed: int
    writes: list[tuple[int, int]] = []


def span_start(position: int) -> int:
    """Return the start of the span that contains ``position``."""
    return position // SPAN * SPAN


def rows_per_request(num_drafts: int) -> int:
    """Return the positions of a ring of open rows, for steps with up to ``num_drafts`` drafts.

    Without drafts, no row outlives its span. Drafts can reach into the next span while the rows of the current span are
    still needed.
    """
    return 2 * SPAN if num_drafts else SPAN
