"""Media of the requests that a worker computes: their rows, and where these are in a step."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from penstock_enginecore.attention.base import AttentionMetadata, IntArray
from penstock_enginecore.core.scheduler.output import SchedulerOutput
from penstock_enginecore.executor.generation.encoder_rows import EncoderRows
from penstock_enginecore.executor.generation.media_prompts import MediaPrompts, Placed
from penstock_enginecore.executor.generation.prompt_vectors import StepVectors
from penstock_enginecore.forward.upload import to_device
from penstock_enginecore.models.multimodal.base import MediaEncoder


class StepMedia:
    """Of a model with towers. While it is empty nothing else need be asked of it in a step."""

    def __init__(self, encoder: MediaEncoder, dtype: torch.dtype, device: torch.device) -> None:
        self.cached = EncoderRows(encoder, dtype, device)
        self._device = device
        self._num_deepstack = encoder.num_deepstack
        self._prompts = MediaPrompts(encoder)

    def __len__(self) -> int:
        """Requests that have media."""
        return len(self._prompts)

    def update(self, step: SchedulerOutput) -> dict[str, str]:
        """Know the requests of a step, and compute rows. By identifier, why items could not be encoded."""
        return self._prompts.update(step) | self.cached.update(step)

    def are_in(self, placed: Placed) -> bool:
        """Whether a step computes embeddings of media."""
        return bool(self._prompts.rows(placed))

    def vectors(self, placed: Placed) -> StepVectors | None:
        """Those among the tokens of a step; None when there are none."""
        found = self._prompts.rows(placed)
        if not found:
            return None
        indices = to_device(np.concatenate([each.indices for each in found]), self._device)
        rows = torch.cat([self.cached.of(each.identifier)[each.start : each.end] for each in found])
        if not self._num_deepstack:
            return StepVectors(indices, rows)
        embeddings, *deeper = rows.chunk(1 + self._num_deepstack, dim=1)
        return StepVectors(indices, embeddings, torch.stack(deeper))

    def rope_positions(self, placed: Placed) -> IntArray | None:
        """See ``ForwardBatch``; None where no request of the step has media, or the model has no such positions."""
        return self._prompts.rope_positions(placed)

    def attention(self, placed: Placed, attention: Sequence[AttentionMetadata]) -> Sequence[AttentionMetadata]:
        """With ``key_ends`` where embeddings of the step see those behind them."""
        ends = self._prompts.key_ends(placed)
        return attention if ends is None else [replace(metadata, key_ends=ends) for metadata in attention]

    def forget(self) -> None:
        """Every request, and all rows."""
        self._prompts.clear()
        self.cached.forget_all()
