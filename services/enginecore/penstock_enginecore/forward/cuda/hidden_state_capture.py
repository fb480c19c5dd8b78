"""Hidden states that steps give beside their logits, in memory that never moves where steps are replayed."""

from collections.abc import Sequence

import torch

from penstock_enginecore.forward.cuda.buffers import CAPTURED


class KeptHidden:
    """Those of ``layers``, as ``ForwardPass.keep_hidden`` counts them, ``[tokens, layers * width]``."""

    def __init__(self, layers: Sequence[int], width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.layers = tuple(layers)
        self._width = width
        with torch.inference_mode(False):
            self._captured = torch.zeros(CAPTURED.tokens, len(layers) * width, dtype=dtype, device=device)
        self._rows = self._captured

    def begin(self, num_tokens: int) -> None:
        """A step of so many tokens, padding included: those of padded shapes have the same memory each time."""
        fits = num_tokens <= len(self._captured)
        self._rows = (
            self._captured[:num_tokens] if fits else self._captured.new_empty(num_tokens, len(self._captured[0]))
        )

    def put(self, layer: int, states: torch.Tensor) -> None:
        """What comes into ``layer``: ``[tokens, width]``."""
        for place, kept in enumerate(self.layers):
            if kept == layer:
                self._rows[:, place * self._width : (place + 1) * self._width].copy_(states)

    def put_all(self, states: torch.Tensor) -> None:
        """Those of all layers, side by side."""
        self._rows.copy_(states)

    def of(self, num_tokens: int) -> torch.Tensor:
        """Of the first tokens of the step that ran last, in memory of their own."""
        rows = self._rows if num_tokens > len(self._captured) else self._captured
        return rows[:num_tokens].clone()
