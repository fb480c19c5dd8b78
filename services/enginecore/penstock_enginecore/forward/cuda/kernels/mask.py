"""Grammar masks of single rows of logits."""

import torch
import triton
import triton.language as tl

PART = 4096
"""Maximum number of logits that one program reads."""
WARPS = 8


def mask(logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor) -> None:
    """Set the logits of tokens whose bits are not set to minus infinity, in place. Logits that are NaN stay NaN, as in
    ``sample.rules.mask_grammar``.

    Args:
        logits: float32 ``[rows, vocab]``, contiguous.
        rows: int64 ``[masks]``, the row of each mask.
        words: int32 ``[masks, words]``, contiguous, with one bit per token, the lowest bit first.

    Raises:
        ValueError: The masks have fewer bits than there are logits, or the logits are not contiguous.
    """
    vocab, num_words = logits.shape[1], words.shape[1]
    if num_words * 32 < vocab or not logits.is_contiguous():
        raise ValueError(
            f"masks have {num_words * 32} bits; contiguous logits with at most that many columns are supported, not "
            f"{list(logits.shape)} with strides {logits.stride()}"
        )
    if len(rows):
        mask_rows[(len(rows), triton.cdiv(vocab, PART))](
            logits, rows, words, vocab, num_words, PART=PART, num_warps=WARPS
        )


@triton.jit
def mask_rows(logits, rows, words, vocab, num_words, PART: tl.constexpr):
    """Mask a part of a row."""
    masked = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * PART + tl.arange(0, PART)
    inside = columns < vocab
    word = tl.load(words + masked * num_words + columns // 32, mask=inside, other=0)
    excluded = ((word >> (columns % 32)) & 1) == 0
    at = logits + tl.load(rows + masked) * vocab + columns
    value = tl.load(at, mask=inside & excluded, other=0.0)
    tl.store(at, tl.full((PART,), -float("inf"), tl.float32), mask=inside & excluded & (value == value))
