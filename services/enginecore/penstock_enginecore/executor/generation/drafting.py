"""Use of a drafter, which proposes tokens, by a runner: the runner reports requests to the drafter, and gets drafts
after each step.
"""

import itertools
import logging
import time
from collections.abc import Sequence

import numpy as np
import torch

from penstock_enginecore.attention.base import IntArray
from penstock_enginecore.core.kv_cache.spec import KVCacheConfig
from penstock_enginecore.core.scheduler.output import DraftTokenIds, SchedulerOutput
from penstock_enginecore.executor.generation.input_batch import InputBatch
from penstock_enginecore.executor.generation.step_inputs import StepInputs
from penstock_enginecore.forward.base import ForwardBatch
from penstock_enginecore.sample.base import SamplingInputs
from penstock_enginecore.speculation.base import Drafter, DraftRequest

# Interface of a completed step for drafters.


class BatchDraftStep:
    """``DraftStep`` of a completed step whose tokens are stored in ``batch``. ``wanted`` is the number of tokens to
    draft, by request ID.
    """

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
        """Return a batch for a forward pass of the drafter, with ``tokens`` of the requests with the indices
        ``requests``. The tokens of each request begin at position ``first``.
        """
        lengths = np.fromiter(map(len, tokens), dtype=np.int64, count=len(tokens))
        laid_out = self._batch.lay_out([self._ids[i] for i in requests], first, lengths, ahead=ahead)
        token_ids = np.concatenate(tokens).astype(np.int64, copy=False)
        return ForwardBatch(token_ids, laid_out.positions, laid_out.attention)

    def sampling(self, requests: Sequence[int], place: int | IntArray) -> SamplingInputs:
        """Return the sampling inputs of the requests with the indices ``requests``. The inputs are for the token that
        follows ``place`` more tokens of each request.
        """
        return self._batch.draws_of([self._ids[i] for i in requests], place)


logger = logging.getLogger(__name__)


class Drafting:
    """Runs a drafter, and switches off a drafter that fails.

    After a failure, every ``DraftTokenIds`` contains the reason of the failure, and requests continue without drafts.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.failure = ""
        self._known: set[str] = set()
        self._step: tuple[StepInputs, dict[str, int]] | None = None

    def update(self, step: SchedulerOutput, batch: InputBatch) -> None:
        """Report new and ended requests to the drafter. Call this method before ``batch`` is updated."""
        self._step = None
        try:
            for request_id in (*step.finished_request_ids, *step.preempted_request_ids):
                if request_id in self._known:
                    self._known.discard(request_id)
                    self._end(request_id, batch)
            for new in step.new_requests:
                self._known.add(new.request_id)
                if not self.failure:
                    self.drafter.begin(new)
        except Exception as e:
            self._fail(e)

    def observe(self, inputs: StepInputs, batch: InputBatch, hidden: torch.Tensor | None) -> None:
        """Pass the hidden states ``[tokens, width]`` of a computed step to the drafter.

        ``hidden`` is None if the forward pass keeps no hidden states.
        """
        if hidden is None or self.failure:
            return
        starts = inputs.attention[0].query_start_loc
        try:
            states = [hidden[start:end] for start, end in itertools.pairwise(starts.tolist())]
            self.drafter.observe(BatchDraftStep(batch, inputs, {}), inputs.positions[starts[:-1]], states)
        except Exception as e:
            self._fail(e)

    def sampled(self, inputs: StepInputs, wanted: dict[str, int]) -> None:
        """Record a sampled step whose tokens are stored in the batch. ``wanted`` is the number of tokens to draft, by
        request ID.
        """
        self._step = inputs, wanted

    def draft(self, batch: InputBatch) -> DraftTokenIds:
        """Return drafts of the tokens that follow the last sampled step."""
        step, self._step = self._step, None
        if step is None or self.failure:
            return DraftTokenIds(failure=self.failure)
        inputs, wanted = step
        began = time.perf_counter()
        try:
            drafts = self.drafter.propose(BatchDraftStep(batch, inputs, wanted))
            if len(drafts) != len(inputs.request_ids):
                raise RuntimeError(
                    f"the drafter returned {len(drafts)} lists of drafts for {len(inputs.request_ids)} requests"
                )
        except Exception as e:
            self._fail(e)
            return DraftTokenIds(failure=self.failure)
        found = [
            (request_id, token_ids[: wanted[request_id]])
            for request_id, token_ids in zip(inputs.request_ids, drafts, strict=True)
            if token_ids and request_id in wanted
        ]
        return DraftTokenIds(
            request_ids=[request_id for request_id, _ in found],
            draft_token_ids=[token_ids for _, token_ids in found],
            seconds=time.perf_counter() - began,
        )

    def forget(self, batch: InputBatch | None) -> None:
        """Tell the drafter that all requests have ended."""
        self._step = None
        known, self._known = self._known, set()
        try:
            if batch is not None:
                for request_id in known:
                    self._end(request_id, batch)
        except Exception as e:
            self._fail(e)

    def allocate(self, config: KVCacheConfig) -> None:
        """Allocate the drafter's KV cache."""
        if not self.failure:
            self.drafter.allocate(config)

    def _end(self, request_id: str, batch: InputBatch) -> None:
        if not self.failure:
            prompt = batch.num_prompt_tokens_of(request_id)
            self.drafter.end(request_id, batch.tokens_of(request_id), num_prompt_tokens=prompt)

    def _fail(self, error: Exception) -> None:
        self.failure = f"{type(error).__name__}: {error}"
        logger.error(
            "the drafter %s failed and is off until the engine restarts; requests continue without speculative decoding",
            self.drafter.name,
            exc_info=error,
        )
