"""Vectors that stand for prompt tokens, kept by the worker while their requests are in its batch."""

from dataclasses import dataclass

import numpy as np
import torch

from penstock_common.types.prompt_embeds import PromptEmbeds
from penstock_enginecore.attention.base import IntArray
from penstock_enginecore.core.scheduler.output import SchedulerOutput
from penstock_enginecore.executor.input_batch import StepInputs

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class StepVectors:
    """``rows`` ``[n, hidden size]`` belong at ``places`` int64 ``[n]`` of the flat batch."""

    places: torch.Tensor
    rows: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Prompt:
    """``rows`` ``[positions, hidden size]``; ``is_vector`` ``[positions]``."""

    rows: torch.Tensor
    is_vector: torch.Tensor


class PromptVectors:
    """By request. Costs nothing while no request has any."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        self._prompts: dict[str, _Prompt] = {}

    def update(self, step: SchedulerOutput) -> None:
        """Forget requests that are gone, take in those that are new."""
        if self._prompts:
            for request_id in (*step.finished_request_ids, *step.preempted_request_ids):
                self._prompts.pop(request_id, None)
        for new in step.new_requests:
            if new.prompt_embeds is not None:
                self._prompts[new.request_id] = self._read(new.prompt_embeds)

    def of(self, inputs: StepInputs) -> StepVectors | None:
        """The vectors among the tokens of a step; None when there are none."""
        if not self._prompts:
            return None
        places, rows = [], []
        starts = inputs.attention[0].query_start_loc
        for number, request_id in enumerate(inputs.request_ids):
            prompt = self._prompts.get(request_id)
            if prompt is None:
                continue
            flat: IntArray = np.arange(starts[number], starts[number + 1])
            flat = flat[inputs.positions[flat] < len(prompt.rows)]
            positions = torch.from_numpy(inputs.positions[flat]).to(self._device)
            chosen = prompt.is_vector[positions]
            places.append(torch.from_numpy(flat).to(self._device)[chosen])
            rows.append(prompt.rows[positions[chosen]])
        if not any(map(len, places)):
            return None
        return StepVectors(torch.cat(places), torch.cat(rows))

    def _read(self, embeds: PromptEmbeds) -> _Prompt:
        rows = torch.frombuffer(bytearray(embeds.data), dtype=_DTYPES[embeds.dtype])
        is_vector = [embeds.is_vector(position) for position in range(embeds.num_tokens)]
        return _Prompt(
            rows.view(embeds.num_tokens, embeds.hidden_size).to(device=self._device, dtype=self._dtype),
            torch.tensor(is_vector, device=self._device),
        )
