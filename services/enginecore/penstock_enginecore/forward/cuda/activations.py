"""Memory of what flows through the layers of the fused decoder.

What attention needs and what the MLP needs are never there at once, so they share memory.
"""

from dataclasses import dataclass

import torch

from penstock_enginecore.forward.cuda.buffers import ALIGNMENT, StepShape


@dataclass(frozen=True, slots=True)
class Widths:
    """Numbers of a token: ``attended`` are all query heads, ``qkv`` with keys and values, ``intermediate`` the MLP's."""

    hidden: int
    qkv: int
    attended: int
    intermediate: int
    vocab: int


@dataclass(frozen=True, slots=True)
class Activations:
    """Of a step, each ``[tokens, width]``; ``chosen`` and ``logits`` ``[requests, width]``. ``x`` and ``normed`` may change
    their parts. ``query`` and ``attended`` share memory with ``gate_up`` and ``gated``.
    """

    residual: torch.Tensor
    x: torch.Tensor
    normed: torch.Tensor
    qkv: torch.Tensor
    query: torch.Tensor
    attended: torch.Tensor
    gate_up: torch.Tensor
    gated: torch.Tensor
    chosen: torch.Tensor
    logits: torch.Tensor


class ActivationBuffers:
    """For steps of up to ``max_shape``. Zeros at first; later rows of padding hold what was there before, which nobody reads."""

    def __init__(self, max_shape: StepShape, widths: Widths, dtype: torch.dtype, device: torch.device) -> None:
        tokens, requests = max_shape.tokens, max_shape.requests
        self.max_shape = max_shape
        self._widths = widths
        numbers = ALIGNMENT // dtype.itemsize

        def zeros(size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        def aligned(width: int) -> int:
            return -(-tokens * width // numbers) * numbers

        self._hidden = [zeros(tokens * widths.hidden) for _ in range(3)]
        of_attention = [widths.qkv, widths.attended, widths.attended]
        of_mlp = [2 * widths.intermediate, widths.intermediate]
        shared = zeros(max(sum(map(aligned, of_attention)), sum(map(aligned, of_mlp))))
        self._shared = [_parts(shared, [aligned(width) for width in part]) for part in (of_attention, of_mlp)]
        self._chosen = zeros(requests * widths.hidden)
        self._logits = zeros(requests * widths.vocab)

    def of(self, shape: StepShape) -> Activations:
        """The tensors of a step of ``shape``: the same memory each time."""
        tokens, requests, widths = shape.tokens, shape.requests, self._widths

        def rows(flat: torch.Tensor, count: int, width: int) -> torch.Tensor:
            return flat[: count * width].view(count, width)

        residual, x, normed = (rows(flat, tokens, widths.hidden) for flat in self._hidden)
        (qkv, query, attended), (gate_up, gated) = self._shared
        return Activations(
            residual,
            x,
            normed,
            rows(qkv, tokens, widths.qkv),
            rows(query, tokens, widths.attended),
            rows(attended, tokens, widths.attended),
            rows(gate_up, tokens, 2 * widths.intermediate),
            rows(gated, tokens, widths.intermediate),
            rows(self._chosen, requests, widths.hidden),
            rows(self._logits, requests, widths.vocab),
        )


def _parts(memory: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [memory[end - size : end] for size, end in zip(sizes, ends, strict=True)]
