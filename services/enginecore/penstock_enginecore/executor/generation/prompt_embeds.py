"""Prompt embeddings: vectors that a request contains in place of prompt tokens.

The worker keeps the vectors of a request while the request is in the batch.
"""

from dataclasses import dataclass
from weakref import WeakValueDictionary

import numpy as np
import torch

from penstock_common.types.media import EmbedRun, MultiModalFeature
from penstock_common.types.prompt_embeds import PromptEmbeds
from penstock_enginecore.attention.base import IntArray
from penstock_enginecore.core.scheduler.output import NewRequestData, SchedulerOutput
from penstock_enginecore.executor.generation.step_inputs import StepInputs

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class StepVectors:
    """Embeddings that replace token embeddings in a flat batch.

    Attributes:
        indices: int64 ``[n]``: indices in the flat batch.
        rows: ``[n, hidden size]``: embeddings for these indices.
        deepstack: ``[layers, n, hidden size]``: for each of the model's first layers, embeddings to add to the layer's
            output at these indices. None if the model has no such embeddings.
    """

    indices: torch.Tensor
    rows: torch.Tensor
    deepstack: torch.Tensor | None = None

    def into(self, embedded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Write ``rows`` into ``embedded`` ``[tokens, hidden size]``. Returns ``embedded``, and ``deepstack`` with
        zeros added for all other tokens.
        """
        embedded[self.indices] = self.rows.to(embedded.dtype)
        if self.deepstack is None:
            return embedded, None
        deepstack = embedded.new_zeros((len(self.deepstack), *embedded.shape))
        deepstack[:, self.indices] = self.deepstack.to(embedded.dtype)
        return embedded, deepstack


@dataclass(frozen=True, slots=True, weakref_slot=True)
class _Prompt:
    """Embeddings that a prompt contains: ``rows`` ``[embeddings, hidden size]``.

    ``row_of``, int32 ``[positions]``, is the index in ``rows`` of the embedding at each position, or -1 at positions of
    tokens.
    """

    embeds: PromptEmbeds
    rows: torch.Tensor
    row_of: torch.Tensor


class PromptVectors:
    """Prompt embeddings by request ID. Requests with the same prompt share one tensor ``rows``.

    Steps in which no request has prompt embeddings take no extra time.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        self._prompts: dict[str, _Prompt] = {}
        # Keys are identities of PromptEmbeds. A _Prompt references its PromptEmbeds, so no other object can have the
        # same identity while the _Prompt exists.
        self._shared: WeakValueDictionary[int, _Prompt] = WeakValueDictionary()

    def update(self, step: SchedulerOutput) -> None:
        """Remove requests that have ended, and add new requests."""
        if self._prompts:
            for request_id in (*step.finished_request_ids, *step.preempted_request_ids):
                self._prompts.pop(request_id, None)
        for new in step.new_requests:
            if new.prompt_embeds is not None:
                self._prompts[new.request_id] = self._read(new.prompt_embeds)

    def clear(self) -> None:
        """Forget every request."""
        self._prompts.clear()

    def of(self, inputs: StepInputs) -> StepVectors | None:
        """Return the prompt embeddings among the input tokens of a step, or None if there are none."""
        if not self._prompts:
            return None
        indices, rows = [], []
        starts = inputs.attention[0].query_start_loc
        for number, request_id in enumerate(inputs.request_ids):
            prompt = self._prompts.get(request_id)
            if prompt is None:
                continue
            flat: IntArray = np.arange(starts[number], starts[number + 1])
            flat = flat[inputs.positions[flat] < len(prompt.row_of)]
            row_of = prompt.row_of[torch.from_numpy(inputs.positions[flat]).to(self._device)]
            chosen = row_of >= 0
            indices.append(torch.from_numpy(flat).to(self._device)[chosen])
            rows.append(prompt.rows[row_of[chosen]])
        if not any(map(len, indices)):
            return None
        return StepVectors(torch.cat(indices), torch.cat(rows))

    def _read(self, embeds: PromptEmbeds) -> _Prompt:
        if (known := self._shared.get(id(embeds))) is not None:
            return known
        data = embeds.data if isinstance(embeds.data, bytearray) else bytearray(embeds.data)
        rows = torch.frombuffer(data, dtype=_DTYPES[embeds.dtype]).view(-1, embeds.hidden_size)
        is_vector = np.frombuffer(embeds.is_token or bytes(embeds.num_tokens), dtype=np.uint8) == 0
        row_of = np.where(is_vector, np.cumsum(is_vector) - 1, -1).astype(np.int32)
        prompt = self._shared[id(embeds)] = _Prompt(
            embeds, rows.to(device=self._device, dtype=self._dtype), torch.from_numpy(row_of).to(self._device)
        )
        return prompt


# Positions of a prompt at which there is an embedding instead of a token.


def vector_positions(new: NewRequestData) -> IntArray | None:
    """Return the positions of a prompt with prompt embeddings or media embeddings, int64 ``[n]``, or None if all
    positions are tokens.
    """
    if new.mm_features:
        return np.concatenate([embed_positions(feature) for feature in new.mm_features])
    embeds = new.prompt_embeds
    if embeds is None:
        return None
    is_token = np.frombuffer(embeds.is_token or bytes(embeds.num_tokens), dtype=np.bool_)
    return np.flatnonzero(~is_token)


def embed_positions(feature: MultiModalFeature) -> IntArray:
    """Return the positions in the prompt of the embeddings of a media item, int64 ``[num_embeds]``."""
    runs = feature.embed_runs or (EmbedRun(0, feature.length),)
    starts = np.array([run.start for run in runs], dtype=np.int64) + feature.offset
    counts = np.array([run.count for run in runs], dtype=np.int64)
    before = np.cumsum(counts) - counts
    positions: IntArray = np.arange(int(counts.sum())) + np.repeat(starts - before, counts)
    return positions
