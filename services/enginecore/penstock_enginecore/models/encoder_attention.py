"""Bidirectional attention of a step's prompts, each over its own tokens, without a cache."""

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from penstock_enginecore.attention.base import IntArray

if TYPE_CHECKING:
    from penstock_enginecore.models.attention_hook import AttentionCall


class EncoderContext:
    """An attention context for whole prompts that lie one after the other in the flat batch.

    Prompts of one length attend together. Windows are symmetric: a token sees ``sliding_window - 1`` tokens on each side,
    as transformers' encoders pass it.
    """

    def __init__(self, query_start_loc: IntArray, device: torch.device) -> None:
        """``query_start_loc`` ``[prompts + 1]``: first token of each prompt."""
        self._device = device
        starts, lengths = query_start_loc[:-1], np.diff(query_start_loc)
        self._rows: list[torch.Tensor] = []
        """Per length, the flat positions ``[prompts, length]``."""
        for length in np.unique(lengths):
            rows = starts[lengths == length][:, None] + np.arange(length)
            self._rows.append(torch.from_numpy(rows).to(device))
        self._masks: dict[tuple[int, int], torch.Tensor] = {}

    def attend(self, call: "AttentionCall") -> torch.Tensor:
        """Every prompt over its own tokens: the output ``[tokens, num_heads, head_size_v]``."""
        output = call.query.new_empty(*call.query.shape[:2], call.value.shape[2])
        for rows in self._rows:
            # [prompts, heads, length, head size]
            q, k, v = (x[rows].transpose(1, 2) for x in (call.query, call.key, call.value))
            attended = scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=self._mask(rows.shape[1], call.params.sliding_window),
                scale=call.params.scaling,
                enable_gqa=q.shape[1] != k.shape[1],
            )
            output[rows] = attended.transpose(1, 2)
        return output

    def _mask(self, length: int, window: int | None) -> torch.Tensor | None:
        """True where a query sees a key, ``[length, length]``; None where all see all."""
        if window is None or length <= window:
            return None
        if (length, window) not in self._masks:
            position = torch.arange(length, device=self._device)
            self._masks[length, window] = (position[:, None] - position[None, :]).abs() < window
        return self._masks[length, window]
