"""A step that is over, as drafters see it."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from penstock_enginecore.attention.base import IntArray
from penstock_enginecore.executor.generation.input_batch import InputBatch
from penstock_enginecore.executor.generation.step_inputs import StepInputs
from penstock_enginecore.spec_decode.base import DraftRequest, DraftSampling, Layout


class BatchDraftStep:
    """A ``DraftStep`` of a batch whose tokens are taken in. ``wanted``: by request id, how many tokens to draft. ``states``: see
    there.
    """

    def __init__(
        self, batch: InputBatch, inputs: StepInputs, wanted: dict[str, int], states: torch.Tensor | None = None
    ) -> None:
        self._batch = batch
        self._ids = inputs.request_ids
        self.states = states
        self.first_row: IntArray = inputs.attention[0].query_start_loc[:-1]
        lengths = inputs.attention[0].query_start_loc[1:] - self.first_row
        self.first_position: IntArray = inputs.attention[0].seq_lens - lengths
        self.requests: Sequence[DraftRequest] = [
            DraftRequest(
                request_id=request_id,
                token_ids=batch.tokens_of(request_id),
                num_prompt_tokens=batch.num_prompt_tokens_of(request_id),
                num_drafts=wanted.get(request_id, 0),
            )
            for request_id in inputs.request_ids
        ]

    def lay_out(self, requests: Sequence[int], first: IntArray, tokens: Sequence[IntArray]) -> Layout:
        """Tokens of requests, by index, from position ``first`` on."""
        lengths = np.fromiter(map(len, tokens), dtype=np.int64, count=len(tokens))
        laid_out = self._batch.lay_out([self._ids[i] for i in requests], first, lengths)
        token_ids = np.concatenate(tokens) if tokens else np.zeros(0, dtype=np.int64)
        return Layout(token_ids.astype(np.int64, copy=False), laid_out.positions, laid_out.attention)

    def block_ids(self, request: int, group: int) -> npt.NDArray[np.int32]:
        """Of a request, by index, ``[blocks]``."""
        return self._batch.blocks_of(self._ids[request], group)

    def sampling(self, requests: Sequence[int], num_drafts: int) -> DraftSampling:
        """Of requests, by index."""
        draws = self._batch.draws_of([self._ids[i] for i in requests], num_drafts)
        return DraftSampling(draws.temperature, draws.top_k, draws.top_p, draws.min_p, draws.uniforms)
