"""Computation of recurrent layers in a step with torch, from closed states and open rows. It works on any device."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from transformers.activations import ACT2FN

from penstock_enginecore.states.base import ConvCall, ScanCall, SequenceStep, StateMetadata
from penstock_enginecore.states.core.spec import SPAN
from penstock_enginecore.states.decays import between, states_after
from penstock_enginecore.states.memory import StateLayer

_CHUNK = {"head": 64, "row": SPAN, "rate": SPAN}
"""Maximum number of tokens of a request that are computed together, by the kind of decays. The kinds ``row`` and
``rate`` need much memory, for the decays of all pairs of tokens and for the states after each token.
"""


@dataclass(frozen=True, slots=True)
class _Taps:
    """Indices that gather the inputs of convolutions with one kernel size in a step. Indices are int64 on the device.

    The inputs before a request's first token come from the request's ring, or from the tail of its closed state. These
    inputs are put before the inputs of the request's tokens, so that every window of the convolution consists of
    consecutive rows.

    Attributes:
        from_ring: Indices ``[requests * (kernel - 1)]`` into the rings ``[rings * length]``.
        from_tail: Indices ``[requests * (kernel - 1)]`` into the tails ``[slots * (kernel - 1)]``.
        in_ring: Whether an input comes from the ring and not from the tail, bool ``[requests * (kernel - 1), 1]``.
        sizes: Number of tokens of each request.
        windows: Index of the first row of each token's window, ``[tokens]``, or None if there is one request. In that
            case, a window begins at every row.
        of_writes: Indices of the inputs before each written state, oldest first, ``[writes, kernel - 1]``.
    """

    from_ring: torch.Tensor
    from_tail: torch.Tensor
    in_ring: torch.Tensor
    sizes: list[int]
    windows: torch.Tensor | None
    of_writes: torch.Tensor


class RowStates:
    """``StateContext`` that computes the recurrent layers in a step of the engine.

    Args:
        layers: Memory of the layers' states, by the module that makes the calls.
        step: States of the requests.
        device: Device of the memory.
        late: Whether to report states that are not finite in ``StateMetadata.flags``, without waiting for the device.
    """

    def __init__(
        self,
        layers: Mapping[torch.nn.Module, StateLayer],
        step: StateMetadata,
        device: torch.device,
        *,
        late: bool = False,
    ) -> None:
        self._layers = layers
        self.step = step
        self._device = device
        self._flags = torch.zeros(len(step.sequences), dtype=torch.int32, device=device) if late else None
        if self._flags is not None:
            step.flags.append(self._flags)
        length = next(iter(layers.values())).inputs.shape[1]
        self._taps: dict[int, _Taps] = {}
        sequences = step.sequences
        written = [(index, slot) for index, each in enumerate(sequences) for _, slot in each.state.writes]
        self._writers = [index for index, _ in written]
        self._written_slots = self._indices([slot for _, slot in written])
        kept = [(s, position) for s in sequences for position in range(max(s.start, s.end - SPAN), s.end)]
        self._kept_tokens = self._indices([s.first + position - s.start for s, position in kept])
        self._kept_rows = self._indices([s.state.rows * length + position % length for s, position in kept])
        self._length = length

    def _indices(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def convolve(self, call: ConvCall) -> torch.Tensor:
        """Compute the convolution of all requests together, and store the new inputs."""
        layer = self._layers[call.mixer]
        kernel = layer.spec.kernel
        taps = self._taps.get(kernel)
        if taps is None:
            taps = self._taps[kernel] = self._plan(kernel)
        rings, tails = layer.inputs.flatten(0, 1), layer.tails.flatten(0, 1)
        before = torch.where(taps.in_ring, rings[taps.from_ring], tails[taps.from_tail])
        parts = zip(torch.split(before, kernel - 1), torch.split(call.inputs, taps.sizes), strict=True)
        inputs = torch.cat([part for pair in parts for part in pair])
        rings[self._kept_rows] = call.inputs[self._kept_tokens]
        tails = inputs[taps.of_writes]
        layer.tails[self._written_slots] = tails
        if layer.closed is None:  # For other layers, ``scan`` checks the states.
            self._report(self._writers, tails.isfinite().flatten(1).all(1))
        return _convolved(inputs, taps.windows, call)

    def _report(self, writers: list[int], finite: torch.Tensor) -> None:
        """Report the requests in ``writers`` whose states are not finite. ``finite`` is bool ``[len(writers)]``."""
        if self._flags is not None:
            for place, index in enumerate(writers):
                self._flags[index].logical_or_(~finite[place])
        else:
            self.step.broken.update(index for index, good in zip(writers, finite.tolist(), strict=True) if not good)

    def _plan(self, kernel: int) -> _Taps:
        sequences, length, before = self.step.sequences, self._length, kernel - 1
        from_ring, from_tail, in_ring, of_writes = [], [], [], []
        windows: list[int] = []
        for index, s in enumerate(sequences):
            for position in range(s.start - before, s.start):
                in_ring.append(position >= s.base)
                from_ring.append(s.state.rows * length + position % length)
                from_tail.append(s.state.closed * before + min(position - s.base, -1) + before)
            first = s.first + index * before  # The index of the row with the request's oldest input.
            windows += range(first, first + s.count)
            of_writes += [range(first + end - s.start, first + end - s.start + before) for end, _ in s.state.writes]
        return _Taps(
            from_ring=self._indices(from_ring),
            from_tail=self._indices(from_tail),
            in_ring=torch.tensor(in_ring, device=self._device)[:, None],
            sizes=[s.count for s in sequences],
            windows=self._indices(windows) if len(sequences) > 1 else None,
            of_writes=self._indices([row for rows in of_writes for row in rows]).reshape(-1, before),
        )

    def scan(self, call: ScanCall) -> torch.Tensor:
        """Compute the recurrence request by request, and store the open rows and the written states."""
        layer = self._layers[call.mixer]
        output = torch.empty_like(call.value)
        if call.rates is None:
            updates, sums = torch.empty_like(call.value), torch.empty_like(call.decay)
        else:  # Open rows have the decay of each token, not a sum.
            updates, sums = call.value, call.decay
        for index, sequence in enumerate(self.step.sequences):
            if call.rates is None:
                self._scan_one(layer, call, sequence, index, output, updates, sums)
            else:
                self._replay(layer, call, call.rates, sequence, index, output)
        if layer.keys is not None and layer.updates is not None and layer.decays is not None:
            for ring, new in ((layer.keys, call.key), (layer.updates, updates), (layer.decays, sums)):
                ring.flatten(0, 1)[self._kept_rows] = new[self._kept_tokens]
        return output

    def _scan_one(
        self,
        layer: StateLayer,
        call: ScanCall,
        sequence: SequenceStep,
        index: int,
        output: torch.Tensor,
        updates: torch.Tensor,
        sums: torch.Tensor,
    ) -> None:
        """Compute the recurrence of one request. Write the results for its tokens into ``output``, ``updates`` and
        ``sums``, which have the tokens of the flat batch.
        """
        if layer.closed is None:
            raise RuntimeError("a short convolution called a scan")
        state = sequence.state
        rows = _open_rows(layer, sequence, self._length)
        closed = layer.closed[state.closed]
        start, writes, size = sequence.start, dict(state.writes), _CHUNK[call.kind]
        for end in sorted({*writes, sequence.end}):
            while start < end:
                part_end = min(end, start + size)
                part = slice(sequence.first + start - sequence.start, sequence.first + part_end - sequence.start)
                new = _Rows(call.key[part], call.value[part], call.decay[part].cumsum(0))
                rows, output[part] = _advance(closed, rows, new, call, part)
                count = part_end - start
                updates[part], sums[part] = rows.updates[-count:], rows.sums[-count:]
                start = part_end
                if start in writes or count == size:
                    closed = _closed(closed, rows)
                    rows = rows.none()
                if start in writes:
                    layer.closed[writes[start]] = closed
                    self._report([index], closed.isfinite().all()[None])

    def _replay(
        self,
        layer: StateLayer,
        call: ScanCall,
        rates: torch.Tensor,
        sequence: SequenceStep,
        index: int,
        output: torch.Tensor,
    ) -> None:
        """Compute the recurrence with constant rates of one request, token by token. The computation starts at the
        first open row of the request. Write the results into ``output`` ``[tokens, heads, value size]``, which has the
        tokens of the flat batch.

        A sum over rows would need one exponential for each number of the state and each row. Computing the rows again
        needs the same number of exponentials. In addition, each state results from the same operations, wherever a step
        begins.
        """
        if layer.closed is None:
            raise RuntimeError("a short convolution called a scan")
        state = layer.closed[sequence.state.closed, :, :, 0]
        rows = _open_rows(layer, sequence, self._length)
        if len(rows.keys):
            state = states_after(state, rates, rows.keys, rows.updates, rows.sums)[-1]
        start, writes = sequence.start, dict(sequence.state.writes)
        for end in sorted({*writes, sequence.end}):
            while start < end:
                part_end = min(end, start + _CHUNK[call.kind])
                part = slice(sequence.first + start - sequence.start, sequence.first + part_end - sequence.start)
                states = states_after(state, rates, call.key[part], call.value[part], call.decay[part])
                # Compute a separate product for each token, because one product for all tokens may sum in another
                # order.
                reads = [after @ query for after, query in zip(states, call.query[part, 0], strict=True)]
                output[part, :, 0] = torch.stack(reads)
                state, start = states[-1], part_end
            if start in writes:
                layer.closed[writes[start], :, :, 0] = state
                self._report([index], state.isfinite().all()[None])


@dataclass(frozen=True, slots=True)
class _Rows:
    """Open rows of a request: keys ``[rows, key heads, key size]``, updates ``[rows, heads, value size]`` and sums of
    decays since the closed state ``[rows, heads]`` or ``[rows, heads, key size]``. If the layer has constant rates,
    ``sums`` has the decay of each token instead.
    """

    keys: torch.Tensor
    updates: torch.Tensor
    sums: torch.Tensor

    def none(self) -> "_Rows":
        """Return an empty set of rows with the same shapes."""
        return _Rows(self.keys[:0], self.updates[:0], self.sums[:0])


def _open_rows(layer: StateLayer, sequence: SequenceStep, length: int) -> _Rows:
    """Return the open rows between the closed state and the request's first token in the step."""
    if layer.keys is None or layer.updates is None or layer.decays is None:
        raise RuntimeError("a short-convolution layer has no recurrent state, so it has no open rows")
    ring = sequence.state.rows
    first = sequence.base % length
    # The rows of a span never wrap around the end of a ring.
    rows = slice(first, first + sequence.start - sequence.base)
    return _Rows(layer.keys[ring, rows], layer.updates[ring, rows], layer.decays[ring, rows])


def _advance(closed: torch.Tensor, rows: _Rows, new: _Rows, call: ScanCall, part: slice) -> tuple[_Rows, torch.Tensor]:
    """Append the rows of the tokens ``part`` to ``rows``. Return all rows, and the outputs ``[tokens, heads, value
    size]`` for these tokens.

    ``new`` has values instead of updates, and sums of decays since the first token of ``part``.
    """
    repeats = closed.shape[0] // new.keys.shape[1]
    num_old, num_new = len(rows.keys), len(new.keys)
    sums = new.sums + rows.sums[-1] if num_old else new.sums
    all_sums = torch.cat([rows.sums, sums])
    keys = torch.cat([rows.keys, new.keys])
    by_head = _by_head(keys, repeats)
    own_keys, queries = by_head[:, num_old:], _by_head(call.query[part], repeats)
    decays = between(sums, all_sums, by_head)
    updates = new.updates.transpose(0, 1)
    if call.beta is not None:
        beta = call.beta[part].T[:, :, None]
        overlap = decays.pairs(own_keys)
        known = decays.read(own_keys, closed) + overlap[:, :, :num_old] @ rows.updates.transpose(0, 1)
        updates = beta * (updates - known)
        if num_new > 1:
            triangle = beta * overlap[:, :, num_old:]
            updates = torch.linalg.solve_triangular(triangle, updates, upper=False, unitriangular=True)
    all_updates = torch.cat([rows.updates, updates.transpose(0, 1)])
    output = decays.read(queries, closed) + decays.pairs(queries) @ all_updates.transpose(0, 1)
    return _Rows(keys, all_updates, all_sums), output.transpose(0, 1)


def _closed(closed: torch.Tensor, rows: _Rows) -> torch.Tensor:
    """Return the state after the last of ``rows``, as a new tensor ``[heads, key size, value size]``."""
    repeats = closed.shape[0] // rows.keys.shape[1]
    sums = rows.sums if rows.sums.dim() == 3 else rows.sums[..., None]
    total = sums[-1]
    left = (total - sums).exp().transpose(0, 1)
    added = (_by_head(rows.keys, repeats) * left).transpose(1, 2) @ rows.updates.transpose(0, 1)
    return total.exp()[..., None] * closed + added


def _by_head(keys: torch.Tensor, repeats: int) -> torch.Tensor:
    """Return ``keys`` ``[tokens, key heads, key size]`` in the shape ``[heads, tokens, key size]``."""
    return keys.transpose(0, 1).repeat_interleave(repeats, dim=0) if repeats > 1 else keys.transpose(0, 1)


def _convolved(inputs: torch.Tensor, windows: torch.Tensor | None, call: ConvCall) -> torch.Tensor:
    """Return the convolution of ``inputs`` ``[rows, channels]`` for the windows that begin at the rows ``windows``
    ``[tokens]``. If ``windows`` is None, a window begins at every row. Sums are float32.
    """
    dtype, kernel = call.weight.dtype, call.weight.shape[1]
    given, weight = inputs.to(dtype).float(), call.weight.float()
    count = len(given) - kernel + 1
    total = given[:count] * weight[:, 0]
    for tap in range(1, kernel):
        total.addcmul_(given[tap : tap + count], weight[:, tap])
    if windows is not None:
        total = total[windows]
    if call.bias is not None:
        total += call.bias.float()
    result = total.to(dtype)
    if call.activation is not None:
        result = ACT2FN[call.activation](result)
    return result.to(call.inputs.dtype)
