"""Memory needs of recurrent layers, and the size of the state pool.

A sequence is divided into spans of ``SPAN`` tokens at absolute positions. For each request and layer, memory holds the
*closed state* and *open rows*. The closed state is the state at the end of the last whole span. Open rows are the
stored inputs of the tokens after that span. A closed state is written once and then only read. Rejected drafts are
therefore overwritten by position, and a request that hits a cached prefix reads a closed state of another request in
place.
"""

from typing import Literal

import msgspec

SPAN = 16
"""Number of tokens in a span. The block size of models with recurrent states equals this number."""
MAX_DRAFTS = SPAN - 1
"""Maximum number of drafted tokens in a step, so that a step with drafts closes at most one span."""
ZERO_SLOT = 0
"""Number of the slot with the state of an empty sequence. The slot contains zeros and is never written."""
SLOTS_PER_REQUEST = 2
"""Number of slots that a running request owns: one slot with its last closed state, and one slot for its next closed
state.
"""

Decay = Literal["head", "row", "rate"]
"""Kind of the decays of a recurrence. ``head``: one decay for the complete state of a head. ``row``: one decay for each
row of the state of a head. ``rate``: one decay for each row, computed as a token's decay for the head times a constant
rate of the row.
"""


class StateSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Shape of the recurrent state of one layer.

    Attributes:
        channels: Number of channels of the causal convolution.
        kernel: Kernel size of the convolution. The state contains the last ``kernel - 1`` inputs.
        input_size: Size in bytes of one input number of the convolution.
        num_heads: Number of heads of the recurrent state. 0 for a layer with only a short convolution, which has no
            other state.
        num_key_heads: Number of heads of keys and queries. Each key head serves ``num_heads / num_key_heads``
            consecutive heads.
        key_size: Number of rows of the state of a head.
        value_size: Number of columns of the state of a head.
        decay: Kind of the decays of the recurrent state.
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
        """Number of decays of one head in an open row. Constant rates are not stored in open rows, because they are
        weights.
        """
        return self.key_size if self.decay == "row" else 1

    @property
    def slot_bytes(self) -> int:
        """Size in bytes of one closed state of the layer. The numbers of the recurrent state are float32."""
        tail = self.channels * (self.kernel - 1) * self.input_size
        return tail + self.num_heads * self.key_size * self.value_size * 4

    @property
    def row_bytes(self) -> int:
        """Size in bytes of the open row of one token. The row contains an input of the convolution, a key, an update
        and decays.
        """
        numbers = self.num_key_heads * self.key_size + self.num_heads * (self.value_size + self.decay_size)
        return self.channels * self.input_size + numbers * 4


class StateNeeds(msgspec.Struct, frozen=True, kw_only=True):
    """Memory needs of all recurrent layers of a model.

    Attributes:
        num_layers: Number of recurrent layers.
        slot_bytes: Size in bytes of one closed state in all layers together.
        row_bytes: Size in bytes of the open rows of one token in all layers together.
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
        num_requests: Maximum number of running requests. Each request has a ring of open rows and two slots.
        rows_per_request: Number of positions in a request's ring of open rows.
        interval: Number of tokens between kept states of a sequence, a multiple of the block size.
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
    """States that one request reads and writes in one step.

    Attributes:
        rows: Index of the request's ring of open rows.
        closed: Number of the slot with the last closed state before the step's first token.
        writes: States that the step writes, in order: the position of the end of a span, and the number of the slot.
    """

    rows: int
    closed: int
    writes: list[tuple[int, int]] = []


def span_start(position: int) -> int:
    """Return the position of the first token of the span that contains ``position``."""
    return position // SPAN * SPAN


def rows_per_request(num_drafts: int) -> int:
    """Return the number of positions in a ring of open rows, for steps with up to ``num_drafts`` draft tokens.

    Without draft tokens, rows are needed only until the end of their span. Draft tokens can reach into the next span
    while the rows of the current span are still needed.
    """
    return 2 * SPAN if num_drafts else SPAN
