"""Recurrences of the gated delta rule and of state space duality (Mamba-2). The recurrences start from closed states
(states at the ends of spans of 16 tokens) and open rows (data of later tokens).

A program computes a block of value columns of one head of one request, span after span. The state changes only once per
span, at its end. Each token's output and update are computed from the state before the span and the earlier rows of the
span. The computation solves the triangular system of the delta rule row by row. All numbers and products are float32.

The sums for a token add the same rows in the same order in any step. Therefore a token's results are bit-identical for
any division of a prompt into steps, and for any other requests in the batch.

For a request with one token, the kernel writes the token's row directly to the ring, because no program reads this row
of the ring. For a request with more tokens, ``keep_rows`` copies the rows to the ring later. Until then, programs of
other heads and columns may still read the old rows.
"""

import torch
import triton
import triton.language as tl

from penstock_enginecore.states.cuda.context import MAX_KEY_SIZE
from penstock_enginecore.states.cuda.indices import StateIndices
from penstock_enginecore.states.memory import StateLayer

COLUMNS = 32
"""Maximum number of value columns per program."""
WARPS = 4
_SMALLEST = 16
"""Minimum size of each dimension of a matrix product."""
SPAN = tl.constexpr(16)
NEVER = tl.constexpr(float("-inf"))
LARGEST = tl.constexpr(3.4028234663852886e38)
"""Largest finite float32. A number counts as finite if its magnitude is at most this number."""


def scan(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor | None,
    out: torch.Tensor,
    layer: StateLayer,
    indices: StateIndices,
) -> None:
    """Compute a layer's recurrence for all requests, and store the open rows and the states at the ends of spans.

    All tensors are float32 and contiguous. ``out`` is ``[tokens, heads, value size]``. The other tensors are as in
    ``ScanCall``. Outputs of padding tokens are zero.

    Raises:
        ValueError: A shape, dtype or layout is not supported.
    """
    if layer.closed is None or layer.keys is None or layer.updates is None or layer.decays is None:
        raise ValueError("a short convolution has no recurrent state to scan")
    tokens, heads, value_size = value.shape
    key_heads, key_size = key.shape[1:]
    for tensor in (query, key, value, decay, out, *(() if beta is None else (beta,))):
        if tensor.dtype != torch.float32 or not tensor.is_contiguous():
            raise ValueError(
                f"a scan needs contiguous float32 tensors, but one is {tensor.dtype} with strides {list(tensor.stride())}"
            )
    of_spec = layer.spec.num_heads, layer.spec.num_key_heads, layer.spec.key_size, layer.spec.value_size
    if (heads, key_heads, key_size, value_size) != of_spec or key_size > MAX_KEY_SIZE:
        raise ValueError(
            f"values have shape {list(value.shape)} and keys {list(key.shape)}; the layer's heads, key heads, key size "
            f"and value size are {of_spec}, and the largest key size is {MAX_KEY_SIZE}"
        )
    requests = len(indices.firsts)
    if indices.padded and indices.decodes:
        out.zero_()  # ``scan_tokens`` skips padding tokens
    if not tokens or not requests:
        return
    columns = columns_of(value_size)
    grid = requests, heads, triton.cdiv(value_size, columns)
    of_requests = (indices.firsts, indices.starts, indices.counts, indices.rings, indices.slots)
    length = layer.inputs.shape[1]
    sizes = {"HEADS": heads, "KEY_HEADS": key_heads, "KEY_SIZE": key_size, "VALUE_SIZE": value_size}
    tile = {"ROWS": rows_of(key_size), "COLUMNS": columns, "CORRECTS": beta is not None, "num_warps": WARPS}
    beta = decay if beta is None else beta
    memory = layer.closed, layer.keys, layer.updates, layer.decays
    # Programs of requests with one token write rows to rings.
    rows = (out, decay) if indices.decodes else (torch.empty_like(value), torch.empty_like(decay))
    scan_tokens[grid](
        query, key, value, decay, beta, out, *memory, *rows, *of_requests, indices.writes, indices.broken, length,
        **sizes, **tile,
    )  # fmt: skip
    if indices.decodes:
        return
    keep_rows[(tokens,)](
        key, *rows, out, *memory[1:], indices.owners, *of_requests[:4], length,
        **sizes, **copied_at_once(key_heads * key_size, heads * value_size, heads), num_warps=WARPS,
    )  # fmt: skip


def rows_of(key_size: int) -> int:
    """Return the number of rows of a head's state after padding."""
    return max(_SMALLEST, int(triton.next_power_of_2(key_size)))


def columns_of(value_size: int) -> int:
    """Return the number of value columns that a program computes."""
    return min(COLUMNS, max(_SMALLEST, int(triton.next_power_of_2(value_size))))


def copied_at_once(keys: int, values: int, sums: int) -> dict[str, int]:
    """Return the padded numbers of elements of the three parts of a row (keys, updates, sums of decays), as constants
    of ``keep_rows``.
    """
    sizes = {"KEYS": keys, "VALUES": values, "SUMS": sums}
    return {name: triton.next_power_of_2(size) for name, size in sizes.items()}


@triton.jit
def scan_tokens(
    query, key, value, decay, beta, out, closed, keys, updates, decays, new_updates, new_sums,
    firsts, starts, counts, rings, slots, writes, broken, length,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CORRECTS: tl.constexpr,
):  # fmt: skip
    """Compute the outputs of a request's tokens. Also writes the tokens' rows, and the states at the ends of spans for
    which ``writes`` has a slot.
    """
    request, head = tl.program_id(0), tl.program_id(1)
    count = tl.load(counts + request)
    if count > 0:
        key_head = head // (HEADS // KEY_HEADS)
        first = tl.load(firsts + request).to(tl.int64)
        start = tl.load(starts + request)
        end = start + count
        ring = tl.load(rings + request).to(tl.int64) * length
        r = tl.arange(0, SPAN)
        k = tl.arange(0, ROWS)
        v = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
        in_key, in_value = k < KEY_SIZE, v < VALUE_SIZE
        in_state = in_key[:, None] & in_value[None, :]
        state_at = (head * KEY_SIZE + k)[:, None] * VALUE_SIZE + v[None, :]
        slot = tl.load(slots + request).to(tl.int64)
        state = tl.load(closed + slot * (HEADS * KEY_SIZE * VALUE_SIZE) + state_at, mask=in_state, other=0.0)
        for span in range(start // SPAN * SPAN, end, SPAN):
            position = span + r
            old = position < start
            new = (position >= start) & (position < end)
            # Rows of tokens of earlier steps are in the ring. Only the first span can have such rows.
            row = ring + position % length
            all_keys = tl.load(
                keys + ((row * KEY_HEADS + key_head) * KEY_SIZE)[:, None] + k[None, :],
                mask=old[:, None] & in_key[None, :], other=0.0,
            )  # fmt: skip
            all_keys += tl.load(
                key + (((first + position - start) * KEY_HEADS + key_head) * KEY_SIZE)[:, None] + k[None, :],
                mask=new[:, None] & in_key[None, :], other=0.0,
            )  # fmt: skip
            all_updates = tl.load(
                updates + ((row * HEADS + head) * VALUE_SIZE)[:, None] + v[None, :],
                mask=old[:, None] & in_value[None, :], other=0.0,
            )  # fmt: skip
            sums = tl.load(decays + row * HEADS + head, mask=old, other=0.0)
            own_sum = tl.sum(tl.where(position == start - 1, sums, 0.0), 0)
            for i in range(tl.maximum(start - span, 0), tl.minimum(end - span, SPAN)):
                token = first + span + i - start
                key_at = (token * KEY_HEADS + key_head) * KEY_SIZE + k
                value_at = (token * HEADS + head) * VALUE_SIZE + v
                own_key = tl.load(key + key_at, mask=in_key, other=0.0)
                own_query = tl.load(query + key_at, mask=in_key, other=0.0)
                update = tl.load(value + value_at, mask=in_value, other=0.0)
                own_sum += tl.load(decay + token * HEADS + head)
                sums = tl.where(r == i, own_sum, sums)
                # Each exponent is this token's sum of decays minus the sum of an earlier row. Decays are at most 0, so
                # no exponent is greater than 0.
                weights = tl.exp(tl.where(r <= i, own_sum - sums, NEVER))
                since = tl.exp(own_sum)
                if CORRECTS:
                    overlap = tl.where(r < i, tl.sum(all_keys * own_key[None, :], 1) * weights, 0.0)
                    known = since * tl.sum(state * own_key[:, None], 0) + tl.sum(all_updates * overlap[:, None], 0)
                    update = tl.load(beta + token * HEADS + head) * (update - known)
                all_updates = tl.where(r[:, None] == i, update[None, :], all_updates)
                pairs = tl.where(r <= i, tl.sum(all_keys * own_query[None, :], 1) * weights, 0.0)
                result = since * tl.sum(state * own_query[:, None], 0) + tl.sum(all_updates * pairs[:, None], 0)
                tl.store(out + value_at, result, mask=in_value)
                if count > 1:
                    tl.store(new_updates + value_at, update, mask=in_value)
                    if tl.program_id(2) == 0:
                        tl.store(new_sums + token * HEADS + head, own_sum)
                else:
                    own_row = ring + start % length
                    tl.store(updates + (own_row * HEADS + head) * VALUE_SIZE + v, update, mask=in_value)
                    if tl.program_id(2) == 0:
                        tl.store(decays + own_row * HEADS + head, own_sum)
                        if head % (HEADS // KEY_HEADS) == 0:
                            tl.store(keys + (own_row * KEY_HEADS + key_head) * KEY_SIZE + k, own_key, mask=in_key)
            if span + SPAN <= end:
                left = all_keys * tl.exp(own_sum - sums)[:, None]
                state = tl.dot(tl.trans(left), all_updates, tl.exp(own_sum) * state, input_precision="ieee")
                target = tl.load(writes + first + (span + SPAN - 1 - start)).to(tl.int64)
                if target >= 0:
                    tl.store(closed + target * (HEADS * KEY_SIZE * VALUE_SIZE) + state_at, state, mask=in_state)
                    infinite = tl.where(in_state & ~(tl.abs(state) <= LARGEST), 1, 0)
                    tl.store(broken + request, 1, mask=tl.max(tl.max(infinite, 1), 0) > 0)


@triton.jit
def keep_rows(
    key, new_updates, new_sums, out, keys, updates, decays, owners, firsts, starts, counts, rings, length,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """Store the row of a token in the request's ring if later steps may read the row. Set the output of a padding token
    to zero.
    """
    token = tl.program_id(0).to(tl.int64)
    request = tl.load(owners + token)
    v = tl.arange(0, VALUES)
    in_values = v < HEADS * VALUE_SIZE
    if request >= 0:
        count = tl.load(counts + request)
        start = tl.load(starts + request)
        position = start + token - tl.load(firsts + request)
        if (count > 1) & (position >= start + count - SPAN):
            row = tl.load(rings + request).to(tl.int64) * length + position % length
            k = tl.arange(0, KEYS)
            in_keys = k < KEY_HEADS * KEY_SIZE
            s = tl.arange(0, SUMS)
            rows = tl.load(key + token * (KEY_HEADS * KEY_SIZE) + k, mask=in_keys)
            tl.store(keys + row * (KEY_HEADS * KEY_SIZE) + k, rows, mask=in_keys)
            found = tl.load(new_updates + token * (HEADS * VALUE_SIZE) + v, mask=in_values)
            tl.store(updates + row * (HEADS * VALUE_SIZE) + v, found, mask=in_values)
            sums = tl.load(new_sums + token * HEADS + s, mask=s < HEADS)
            tl.store(decays + row * HEADS + s, sums, mask=s < HEADS)
    else:
        tl.store(out + token * (HEADS * VALUE_SIZE) + v, tl.zeros((VALUES,), tl.float32), mask=in_values)
