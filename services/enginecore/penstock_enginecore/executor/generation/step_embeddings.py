"""What the layers get in place of embeddings of tokens: vectors of prompts, and rows of media."""

from collections.abc import Callable
from dataclasses import replace

import torch

from penstock_enginecore.core.scheduler.output import SchedulerOutput
from penstock_enginecore.executor.generation.media_prompts import Placed
from penstock_enginecore.executor.generation.prompt_vectors import PromptVectors
from penstock_enginecore.executor.generation.step_inputs import StepInputs
from penstock_enginecore.executor.generation.step_media import StepMedia
from penstock_enginecore.forward.base import ForwardBatch, ForwardPass
from penstock_enginecore.models.multimodal.base import MediaEncoder


class StepEmbeddings:
    """Of the requests in a worker's batch. ``encoder``: None for a model without towers."""

    def __init__(self, encoder: MediaEncoder | None, dtype: torch.dtype, device: torch.device) -> None:
        self._prompts = PromptVectors(dtype, device)
        self._media = None if encoder is None else StepMedia(encoder, dtype, device)
        self._failures: dict[str, str] = {}

    @property
    def num_bytes(self) -> int:
        """Of the rows of media that are kept."""
        return 0 if self._media is None else self._media.cached.num_bytes

    def update(self, step: SchedulerOutput) -> None:
        """Know the requests of a step, and compute embeddings of media before its forward pass."""
        self._prompts.update(step)
        if self._media is not None:
            self._failures.update(self._media.update(step))

    def take_failures(self) -> dict[str, str]:
        """By identifier, why media could not be encoded since they were last taken."""
        failures, self._failures = self._failures, {}
        return failures

    def are_in(self, inputs: StepInputs) -> bool:
        """Whether something stands for tokens of a step."""
        if self._media and self._media.are_in(_placed(inputs)):
            return True
        return self._prompts.of(inputs) is not None

    def into(self, batch: ForwardBatch, inputs: StepInputs, forward: ForwardPass) -> ForwardBatch:
        """The batch of a step with all that stands in it besides tokens: the same where that is nothing."""
        found = [] if (of_prompts := self._prompts.of(inputs)) is None else [of_prompts]
        if self._media:
            placed = _placed(inputs)
            attention = self._media.attention(placed, batch.attention)
            batch = replace(batch, attention=attention, rope_positions=self._media.rope_positions(placed))
            if (of_media := self._media.vectors(placed)) is not None:
                found.append(of_media)
        if not found:
            return batch
        embedded = forward.embed(batch.token_ids)
        deepstack: torch.Tensor | None = None
        for each in found:
            embedded, deeper = each.into(embedded)
            deepstack = deepstack if deeper is None else deeper
        return replace(batch, embedded=embedded, deepstack=deepstack)

    def profile(self, run: Callable[[], None]) -> None:
        """Call ``run``; with towers, while the largest items are being encoded."""
        if self._media is None:
            run()
        else:
            self._media.cached.profile(run)

    def forget(self) -> None:
        """Every request, and all rows of media."""
        self._prompts.clear()
        self._failures.clear()
        if self._media is not None:
            self._media.forget()


def _placed(inputs: StepInputs) -> Placed:
    return Placed(inputs.request_ids, inputs.attention[0].query_start_loc, inputs.positions)
