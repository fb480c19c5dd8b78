"""A step that is over, as drafters see it."""

from collections.abc import Sequence

import numpy as np

from penstock_enginecore.attention.base import IntArray
from penstock_enginecore.executor.generation.input_batch import InputBatch
from penstock_enginecore.executor.generation.step_inputs import StepInputs
from penstock_enginecore.forward.base import ForwardBatch
from penstock_enginecore.sample.base import SamplingInputs
from penstock_enginecore.speculation.base import DraftRequest


class BatchDraftStep:
    """A ``DraftStep`` of a batch whose tokens are taken in. ``wanted``: by request id, how many tokens to draft."""

    def __init__(self, batch: InputBatch, inputs: StepInputs, wanted: dict[str, int]) -> None:
        self._batch = batch
        self._ids = inputs.request_ids
        self.requests: Sequence[DraftRequest] = [
            DraftRequest(
                request_id=request_id,
                token_ids=batch.tokens_of(request_id),
                num_prompt_tokens=batch.num_prompt_tokens_of(request_id),
                num_drafts=wanted.get(request_id, 0),
            )
            for request_id in inputs.request_ids
        ]

    def lay_out(
        self, requests: Sequence[int], first: IntArray, tokens: Sequence[IntArray], *, ahead: int = 0
    ) -> ForwardBatch:
        """Tokens of requests, by index, from position ``first`` on."""
        lengths = np.fromiter(map(len, tokens), dtype=np.int64, count=len(tokens))
        laid_out = self._batch.lay_out([self._ids[i] for i in requests], first, lengths, ahead=ahead)
        token_ids = np.concatenate(tokens).astype(np.int64, copy=False)
        return ForwardBatch(token_ids, laid_out.positions, laid_out.attention)

    def sampling(self, requests: Sequence[int], place: int | IntArray) -> SamplingInputs:
        """Of requests, by index."""
        return self._batch.draws_of([self._ids[i] for i in requests], place)
