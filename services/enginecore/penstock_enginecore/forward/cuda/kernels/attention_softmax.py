"""What the attention kernels share: which work is a program's, what a query sees, and a softmax over pieces of the keys."""

import triton
import triton.language as tl


@triton.jit
def first_key(position, WINDOW: tl.constexpr, ATTENTION_CHUNK: tl.constexpr):
    """The first position that a query at ``position`` sees; 0 stands for no window, and for no chunk."""
    first = position * 0
    if WINDOW > 0:
        first = tl.maximum(first, position - WINDOW + 1)
    if ATTENTION_CHUNK > 0:
        first = tl.maximum(first, position // ATTENTION_CHUNK * ATTENTION_CHUNK)
    return first


@triton.jit
def find(counts, upto, indices, piece):
    """The index of who owns the ``piece`` when each owns ``counts`` of them, one after the other, and which of its own it is.

    ``upto``: the running sums of ``counts``.
    """
    owner = tl.sum((upto <= piece).to(tl.int32), 0)
    return owner, piece - tl.sum(tl.where(indices < owner, counts, 0), 0)


@triton.jit
def load_pages(
    cache, table, stride, head, positions, there,
    BLOCK_SIZE: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Rows ``[positions, PADDED]`` of one head: zeros where nothing is ``there``, which is not read, and beyond ``SIZE``."""
    blocks = tl.load(table + positions // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
    rows = blocks * stride + (head * BLOCK_SIZE + positions % BLOCK_SIZE) * SIZE
    numbers = tl.arange(0, PADDED)
    mask = there[:, None] & (numbers < SIZE)[None, :]
    return tl.load(cache + rows[:, None] + numbers[None, :], mask=mask, other=0.0)


@triton.jit
def scores(query, keys, scaling, visible, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr):
    """In powers of two: ``2 ** score`` is what the softmax weighs a key with. -inf where it is not ``visible``."""
    dots = tl.dot(query, tl.trans(keys), input_precision=PRECISION) * scaling
    if SOFTCAP > 0:
        small = tl.exp(tl.abs(dots) * (-2.0 / SOFTCAP))  # never overflows
        capped = SOFTCAP * (1.0 - small) / (1.0 + small)
        dots = tl.where(dots < 0, -capped, capped)
    return tl.where(visible, dots * 1.4426950408889634, float("-inf"))


@triton.jit
def accumulate(weighed, largest, total, sums, values, PRECISION: tl.constexpr):
    """Take the next keys into a running softmax: the largest score so far, the weights' total, and the weighted values' sums.

    Keys of which a row sees none change no bit of it, so that it does not matter where the first tile begins.
    """
    new = tl.maximum(largest, tl.max(weighed, 1))
    base = tl.where(new == float("-inf"), 0.0, new)
    weights = tl.exp2(weighed - base[:, None])
    shrink = tl.exp2(largest - base)
    sums = tl.dot(weights.to(values.dtype), values, sums * shrink[:, None], input_precision=PRECISION)
    return new, total * shrink + tl.sum(weights, 1), sums
