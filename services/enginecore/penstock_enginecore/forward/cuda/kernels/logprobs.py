"""Log-probabilities of chosen tokens and of the likeliest tokens, with fixed orders of sums.

The results of a row depend only on the row's logits and chosen token, never on other rows. Sums are float32. Of tokens
with equal logits, the token with the lowest id is first.
"""

import torch
import triton
import triton.language as tl

from penstock_enginecore.forward.cuda.kernel_api import MAX_SCORED

_PART = 4096
"""Maximum number of logits that one program reads."""
WARPS = 8
"""Number of warps of a program that reads logits."""


def score(logits: torch.Tensor, chosen: torch.Tensor, count: int) -> torch.Tensor:
    """Return the result of ``sample.sampler.pack_logprobs``, with two kernel launches.

    The kernels find either no likeliest tokens or ``MAX_SCORED``, so that they are compiled only twice.

    Args:
        logits: ``[rows, vocab]``, contiguous, of any float dtype.
        chosen: int64 ``[rows]``, the chosen tokens.
        count: Number of likeliest tokens, at most ``MAX_SCORED`` and at most ``vocab``.

    Raises:
        ValueError: ``count`` is too large, or ``logits`` are not contiguous.
    """
    rows, vocab = logits.shape
    if count > min(MAX_SCORED, vocab) or not logits.is_contiguous():
        raise ValueError(
            f"{count} likeliest tokens of logits {list(logits.shape)} with strides {logits.stride()} are wanted; the "
            f"kernels find at most {min(MAX_SCORED, vocab)} in contiguous logits"
        )
    found = MAX_SCORED if count else 0
    packed = torch.empty(3, rows, 1 + found, dtype=torch.int32, device=logits.device)
    if not rows:
        return packed[:, :, : 1 + count]
    of_parts, of_rows = constants(vocab, found)
    parts = triton.cdiv(vocab, of_parts["PART"])
    # Separate tensors, so that all addresses are multiples of 16 bytes, as the kernels are compiled for.
    peaks, sums = (torch.empty(rows, parts, dtype=torch.float32, device=logits.device) for _ in range(2))
    likelier = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    values = torch.empty(rows, parts, max(found, 1), dtype=torch.float32, device=logits.device)
    columns = torch.empty(rows, parts, max(found, 1), dtype=torch.int32, device=logits.device)
    found_in = (peaks, sums, likelier, values, columns)
    score_parts[(rows, parts)](logits, chosen, *found_in, vocab, **of_parts, num_warps=WARPS)
    score_rows[(rows,)](logits, chosen, *found_in, packed, rows, vocab, parts, **of_rows)
    return packed[:, :, : 1 + count]


def constants(vocab: int, count: int) -> tuple[dict[str, int], dict[str, int]]:
    """Return the compile-time constants of ``score_parts`` and ``score_rows``."""
    part = min(_PART, triton.next_power_of_2(vocab))
    parts = triton.cdiv(vocab, part)
    found = triton.next_power_of_2(parts * max(count, 1))
    return {"COUNT": count, "PART": part}, {"COUNT": count, "PARTS": triton.next_power_of_2(parts), "FOUND": found}


@triton.jit
def _best(value, columns, left):
    """Return the largest of the elements of ``value`` that are ``left``, and the lowest of their columns."""
    best = tl.max(tl.where(left, value, -float("inf")), axis=0)
    return best, tl.min(tl.where(left & (value == best), columns, 2147483647), axis=0)


@triton.jit
def score_parts(
    logits, chosen, peaks, sums, likelier, values, found_columns, vocab, COUNT: tl.constexpr, PART: tl.constexpr
):  # fmt: skip
    """Compute the largest logit of a part of a row, the sum of exp(logit - largest logit), the number of logits above
    the chosen token's logit, and the ``COUNT`` largest logits with their columns.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = part * PART + tl.arange(0, PART)
    inside = columns < vocab
    value = tl.load(logits + row * vocab + columns, mask=inside, other=-float("inf")).to(tl.float32)
    own = tl.load(logits + row * vocab + tl.load(chosen + row)).to(tl.float32)
    at = row * tl.num_programs(1) + part
    peak = tl.max(value, axis=0)
    tl.store(peaks + at, peak)
    tl.store(sums + at, tl.sum(tl.exp(value - tl.where(peak > -float("inf"), peak, 0.0)), axis=0))
    tl.store(likelier + at, tl.sum(((value > own) & inside).to(tl.int32), axis=0))
    left = inside
    for i in range(COUNT):
        best, column = _best(value, columns, left)
        left = left & (columns != column)
        tl.store(values + at * COUNT + i, best)
        tl.store(found_columns + at * COUNT + i, column)


@triton.jit
def _store(packed, plane, at, token_id, logprob, rank):
    """Store one position of the result, whose three parts have ``plane`` elements each."""
    tl.store(packed + at, token_id.to(tl.int32))
    tl.store(packed + plane + at, logprob.to(tl.int32, bitcast=True))
    tl.store(packed + 2 * plane + at, rank.to(tl.int32))


@triton.jit(do_not_specialize=["rows"])
def score_rows(
    logits, chosen, peaks, sums, likelier, values, found_columns, packed, rows, vocab, parts,
    COUNT: tl.constexpr, PARTS: tl.constexpr, FOUND: tl.constexpr,
):  # fmt: skip
    """Join the results of a row's parts. The first position of a row belongs to the chosen token."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, PARTS)
    inside = index < parts
    peak = tl.load(peaks + row * parts + index, mask=inside, other=-float("inf"))
    total = tl.load(sums + row * parts + index, mask=inside, other=0.0)
    highest = tl.max(peak, axis=0)
    log_sum = highest + tl.log(tl.sum(total * tl.exp(peak - highest), axis=0))
    token = tl.load(chosen + row)
    own = tl.load(logits + row * vocab + token).to(tl.float32)
    above = tl.load(likelier + row * parts + index, mask=inside, other=0)
    at = row * (1 + COUNT)
    plane = rows.to(tl.int64) * (1 + COUNT)
    _store(packed, plane, at, token, own - log_sum, 1 + tl.sum(above, axis=0))
    if COUNT > 0:
        place = tl.arange(0, FOUND)
        left = place < parts * COUNT
        value = tl.load(values + row * parts * COUNT + place, mask=left, other=-float("inf"))
        columns = tl.load(found_columns + row * parts * COUNT + place, mask=left, other=2147483647)
        before = tl.full((), float("inf"), tl.float32)
        rank = tl.full((), 0, tl.int32)
        for i in range(COUNT):
            best, column = _best(value, columns, left)
            left = left & (columns != column)
            rank = tl.where((best == before) & (rank > 0), rank, i + 1)
            before = best
            _store(packed, plane, at + 1 + i, tl.minimum(column, vocab - 1), best - log_sum, rank)
