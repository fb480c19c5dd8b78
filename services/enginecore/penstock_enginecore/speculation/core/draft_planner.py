"""Planner of drafts: chooses the number of drafts that a step verifies, and the number of tokens to draft after the
step.

Drafts do not delay other requests: drafts use no block that a running or waiting request could use. While prompts are
being computed, drafts use at most an eighth of the token budget.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from penstock_common.types.outputs import SpecDecodingStats
from penstock_enginecore.config.speculative import SpeculativeConfig
from penstock_enginecore.core.request import Request, RequestStatus
from penstock_enginecore.core.scheduler.base import StepResource
from penstock_enginecore.core.scheduler.output import DraftTokenIds, ModelRunnerOutput, SchedulerOutput
from penstock_enginecore.core.scheduler.state import SchedulerState
from penstock_enginecore.core.scheduler.token_budget import num_tokens_due
from penstock_enginecore.speculation.core.policy import DraftHistory, DraftPolicy, StepCost
from penstock_enginecore.structured_output.core.base import allows

_SHARE_BESIDE_PROMPTS = 8


class DraftPlanner(StepResource):
    """Plans drafts for a scheduler.

    Attributes:
        failure: Reason why drafting was switched off, or empty.
    """

    stats_name = "spec_decoding_stats"

    def __init__(self, state: SchedulerState) -> None:
        context = state.context
        config = context.speculative
        self._max_drafts = config.num_speculative_tokens
        self._drafts_ahead = config.has_model
        self._policy = DraftPolicy(config.num_speculative_tokens, config.adaptive, StepCost(context.step_seconds))
        self._kv_cache = state.kv_cache
        self._running = state.running
        self._waiting = state.waiting
        self._max_num_tokens = state.budget.max_num_tokens
        self._planned: dict[str, list[int]] = {}
        self._stats = SpecDecodingStats()
        self.failure = ""

    def stats(self) -> SpecDecodingStats:
        """Return statistics of drafts and accepted drafts over all requests since the engine started."""
        return msgspec.structs.replace(
            self._stats, num_accepted_tokens_per_pos=self._stats.num_accepted_tokens_per_pos.copy()
        )

    # Choice of the drafts that a step verifies.

    def plan(self, requests: Sequence[Request]) -> None:
        """Choose how many drafts of each of the running ``requests`` a step should verify."""
        self._planned = {}
        drafting = []
        num_rows = 0
        for request in requests:
            num_rows += num_tokens_due(request)
            if drafts := self._drafts_of(request):
                drafting.append((request, drafts))
        if not drafting:
            return
        num_rows = min(num_rows, self._max_num_tokens)
        histories = [_history(request, self._policy, forced=request.drafts_forced) for request, _ in drafting]
        # Forced text can be longer than the maximum number of drafts. If a step verified more tokens than this maximum,
        # states of recurrent layers would be lost.
        limits = [min(len(drafts), self._max_drafts, _room(request)) for request, drafts in drafting]
        chosen = self._policy.choose(histories, limits, num_rows, drafting=False)
        beside_prompts = num_rows > len(requests) or len(self._waiting) > self._waiting.num_held
        left = self._max_num_tokens // _SHARE_BESIDE_PROMPTS if beside_prompts else self._max_num_tokens - num_rows
        for (request, drafts), count in zip(drafting, chosen, strict=True):
            count = min(count, left)
            if count > 0:
                self._planned[request.key] = list(drafts[:count])
                left -= count

    def add(self, request: Request, new_block_ids: tuple[list[int], ...], output: SchedulerOutput) -> None:
        """Schedule the next token of a decoding request, together with the drafts after that token. The next token must
        already have a block.
        """
        drafts = self._planned.get(request.key)
        if not drafts:
            output.add_known(request, 1, new_block_ids)
            return
        count = min(len(drafts), self._max_num_tokens - output.total_num_scheduled_tokens - 1)
        count, block_ids = self._place(request, count)
        output.add_known(request, 1 + count, new_block_ids, drafts[:count])
        if block_ids:
            output.add_blocks(request, block_ids)

    def _drafts_of(self, request: Request) -> Sequence[int]:
        """Return the tokens of a request to verify: tokens that the grammar forces, or else the request's drafts. Sets
        ``drafts_forced`` of the request accordingly.
        """
        request.drafts_forced = False
        if request.max_drafts == 0 or request.status is not RequestStatus.RUNNING:
            return ()
        grammar = request.grammar
        if grammar is not None:
            if not grammar.ready:
                return ()
            if forced := grammar.forced:
                request.drafts_forced = True
                return forced
            if request.spec_token_ids and not allows(grammar.mask, request.spec_token_ids[0]):
                return ()
        return request.spec_token_ids

    def _place(self, request: Request, count: int) -> tuple[int, tuple[list[int], ...]]:
        """Allocate blocks for up to ``count`` positions after the next token. Return the number of positions with a
        block, and the new blocks.
        """
        left = self._kv_cache.num_allocated_tokens(request) - request.num_computed_tokens - 1
        if left < count and len(self._waiting) == self._waiting.num_held:
            block_ids = self._kv_cache.allocate_slots(request, 1 + count, reserve=len(self._running))
            if block_ids is not None:
                return count, block_ids
        return max(min(left, count), 0), ()

    # Choice of the number of tokens to draft after a step.

    def want(self, output: SchedulerOutput, requests: Mapping[str, Request]) -> None:
        """Set the number of tokens to draft after the step, for each request. The step must already be scheduled, and
        its tokens must already count as computed.
        """
        if self.failure:
            return
        sampling = []
        for key in output.num_scheduled_tokens:
            request = requests[key]
            limit = min(request.max_drafts, _room(request) - 1)  # The step adds at least one token to the request.
            if request.sampled_step == output.step and limit > 0:
                sampling.append((request, limit))
        if not sampling:
            return
        histories = [_history(request, self._policy) for request, _ in sampling]
        num_rows = min(len(self._running), self._max_num_tokens)
        chosen = self._policy.choose(histories, [limit for _, limit in sampling], num_rows, drafting=True)
        for (request, _), count in zip(sampling, chosen, strict=True):
            if count and self._drafts_ahead:
                count, block_ids = self._place(request, count)
                if block_ids:
                    output.add_blocks(request, block_ids)
            if count > 0:
                output.num_drafts_wanted[request.key] = count
                request.unsettled = True

    def added(self, request: Request) -> None:
        """Set the maximum number of drafts of a new request."""
        asked = request.sampling_params.num_speculative_tokens
        most = self._max_drafts if asked is None else min(asked, self._max_drafts)
        # The drafter cannot process prompts with embeddings. A drafter that drafts ahead cannot process prompts with
        # media either.
        unread = request.prompt_embeds is not None or (request.mm_features and self._drafts_ahead)
        request.max_drafts = 0 if request.pooling_params is not None or unread else most

    # Results of drafting and verification.

    def take_drafts(self, step: SchedulerOutput, drafts: DraftTokenIds, requests: Mapping[str, Request]) -> None:
        """Store the drafts that a drafter made after a step, when the results of this step have arrived."""
        self.failure = self.failure or drafts.failure
        for key in step.num_drafts_wanted:
            request = requests.get(key)
            if request is not None and step.step >= request.valid_from_step:
                request.unsettled = False
                request.spec_token_ids = []
        for key, token_ids in zip(drafts.request_ids, drafts.draft_token_ids, strict=True):
            request = requests.get(key)
            if request is not None and step.step >= request.valid_from_step:
                request.spec_token_ids = token_ids
        decoded = len(step.num_scheduled_tokens) + sum(map(len, step.scheduled_spec_decode_tokens.values()))
        # In a step with prompt chunks, the drafter also computed the prompts, so its time is not the cost of drafting.
        if drafts.seconds and step.num_drafts_wanted and step.total_num_scheduled_tokens == decoded:
            num_tokens = max(map(len, drafts.draft_token_ids), default=0)
            self._policy.drafting_took(len(step.num_drafts_wanted), num_tokens, drafts.seconds)

    def verified(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """Record that a request verified ``num_drafts`` drafts, of which the first ``num_accepted`` were accepted."""
        _history(request, self._policy, forced=request.drafts_forced).verified(num_drafts, num_accepted)
        self._stats.count(num_drafts, num_accepted)
        if request.spec_stats is None:
            request.spec_stats = SpecDecodingStats()
        request.spec_stats.count(num_drafts, num_accepted)
        request.spec_token_ids = []

    def stepped(self, step: SchedulerOutput, results: ModelRunnerOutput, requests: Mapping[str, Request]) -> None:
        """Update the estimates of step times after a step."""
        if results.seconds and not step.encoder_budget:
            self._policy.cost.took(step.total_num_scheduled_tokens, results.seconds)
        for key in step.num_scheduled_tokens:
            request = requests.get(key)
            if (
                request is not None
                and request.draft_history is not None
                and key not in step.scheduled_spec_decode_tokens
            ):
                request.draft_history.passed(1)


def _room(request: Request) -> int:
    """Return the number of drafts that may be verified before ``max_tokens`` is reached. One token is sampled after the
    drafts.
    """
    return request.max_tokens - request.num_output_tokens - 1


def _history(request: Request, policy: DraftPolicy, *, forced: bool = False) -> DraftHistory:
    if forced:
        if request.forced_history is None:
            request.forced_history = policy.begin("forced")
        return request.forced_history
    if request.draft_history is None:
        request.draft_history = policy.begin()
    return request.draft_history


# Description of an engine's speculative decoding, for operators.


def speculation_facts(
    config: SpeculativeConfig, stats: SpecDecodingStats | None, failure: str | None
) -> dict[str, Any] | None:
    """Return the method, the maximum number of drafts, the failure (or empty) and the statistics. Return None without
    speculative decoding.
    """
    if not config.enabled:
        return None
    return {
        "method": config.method,
        "model": config.model,
        "num_speculative_tokens": config.num_speculative_tokens,
        "failure": failure or "",
        **msgspec.structs.asdict(stats or SpecDecodingStats()),
    }
