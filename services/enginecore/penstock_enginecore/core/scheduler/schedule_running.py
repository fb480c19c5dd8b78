"""The tokens that running requests get of a step."""

from penstock_enginecore.core.request import Request, RequestStatus
from penstock_enginecore.core.request_log import log_incident
from penstock_enginecore.core.scheduler.budget import StepBudget
from penstock_enginecore.core.scheduler.dealing import DecodeDealer, decodes
from penstock_enginecore.core.scheduler.drafting import DraftPlanner
from penstock_enginecore.core.scheduler.encoder_work import EncoderWork
from penstock_enginecore.core.scheduler.lifecycle import RequestLifecycle
from penstock_enginecore.core.scheduler.output import SchedulerOutput
from penstock_enginecore.core.scheduler.preemption import Preemption
from penstock_enginecore.core.scheduler.rows import num_tokens_due


class RunningScheduler:
    """Lets running requests go on, in their order, as far as a step's budget, its share of the decodes and the KV blocks go."""

    def __init__(
        self,
        *,
        budget: StepBudget,
        preemption: Preemption,
        lifecycle: RequestLifecycle,
        dealer: DecodeDealer,
        drafting: DraftPlanner | None = None,
        encoder: EncoderWork | None = None,
    ) -> None:
        self._encoder = encoder
        self._budget = budget
        self._preemption = preemption
        self._lifecycle = lifecycle
        self._dealer = dealer
        self._drafting = drafting

    def schedule(self, output: SchedulerOutput, requests: list[Request], *, early: bool = False) -> bool:
        """Add to the step what is due of each, also of those that are ``early`` for it, if that is said; returns whether any was
        left out for that. What goes wrong with one ends that one alone. Hot: once per request and step.
        """
        budget, max_num_tokens, dealer = self._budget, self._budget.max_num_tokens, self._dealer
        drafting = self._drafting
        requests, decodes_left = dealer.deal(requests)
        left_out = False
        for request in requests:
            if output.total_num_scheduled_tokens >= max_num_tokens:
                break
            try:
                # 0: its next token is on its way. Not running: it had to make room.
                num_new_tokens = num_tokens_due(request)
                if num_new_tokens == 0 or request.status is not RequestStatus.RUNNING:
                    continue
                several = num_new_tokens > 1
                if several and not (num_new_tokens := budget.tokens_for(num_new_tokens, output)):
                    continue
                if not several and decodes_left is not None and decodes(request):
                    if decodes_left == 0:
                        continue
                    if not early and dealer.is_early(request, output.step):
                        left_out = True
                        continue
                    decodes_left -= 1
                if request.num_computed_tokens < request.media_end and not (
                    num_new_tokens := self._with_rows(request, num_new_tokens, output)
                ):
                    continue
                new_block_ids = self._preemption.make_room(request, num_new_tokens, output)
                if new_block_ids is None:  # it gave up its own blocks, or ended
                    continue
                if drafting is not None and num_new_tokens == 1:
                    drafting.add(request, new_block_ids, output)
                else:
                    output.add_known(request, num_new_tokens, new_block_ids)
            except Exception as e:
                output.remove(request)
                self._lifecycle.fail(request, log_incident(request, e, doing="scheduling the request"))
        return left_out

    def _with_rows(self, request: Request, num_tokens: int, output: SchedulerOutput) -> int:
        """Of the next tokens of a request with media, those that can be computed in this step."""
        if (encoder := self._encoder) is None:
            return num_tokens
        start = request.num_computed_tokens
        num_tokens = encoder.fit(request, start, num_tokens, output)
        return encoder.reach(request, start, num_tokens) if num_tokens else 0
