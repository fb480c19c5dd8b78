"""Processing of step results: tokens, log-probabilities, embeddings, stop conditions and the end of requests."""

from collections.abc import Mapping

from penstock_common.errors import InvalidArgument, PenstockError
from penstock_common.observability.logging import STEP_FAILED, incident
from penstock_common.types.outputs import Logprobs, RequestError
from penstock_common.types.sampling import RepetitionDetection
from penstock_enginecore.core.request import Request, RequestStatus, log_incident
from penstock_enginecore.core.scheduler.output import ModelRunnerOutput, SchedulerOutput
from penstock_enginecore.core.scheduler.state import SchedulerState
from penstock_enginecore.media.core.encoder_scheduling import EncoderWork
from penstock_enginecore.speculation.core.draft_planner import DraftPlanner


def check_stop(request: Request, eos_token_ids: frozenset[int]) -> bool:
    """Return whether the last output token ends the request. If the result is true, set the request's status and stop
    reason.

    EOS and stop tokens count only after ``min_tokens`` output tokens. ``max_tokens`` applies regardless of
    ``min_tokens``. ``Request`` has already limited ``max_tokens`` so that the sequence fits into ``max_model_len``. At
    ``max_tokens``, a request whose ``hands_over`` is true ends with HANDED_OVER. The stop reason is None for EOS, and
    the token id for a stop token.
    """
    token_ids = request.all_token_ids
    num_output_tokens = len(token_ids) - request.num_prompt_tokens
    if num_output_tokens == 0:
        return False
    params = request.sampling_params
    if num_output_tokens >= params.min_tokens:
        token_id = token_ids[-1]
        if token_id in eos_token_ids and not params.ignore_eos:
            request.status = RequestStatus.FINISHED_STOPPED
            return True
        if token_id in request.stop_token_ids:
            request.status = RequestStatus.FINISHED_STOPPED
            request.stop_reason = token_id
            return True
    if num_output_tokens >= request.max_tokens:
        request.status = RequestStatus.HANDED_OVER if request.hands_over else RequestStatus.FINISHED_LENGTH
        return True
    detection = params.repetition_detection
    if detection is not None and repeats_itself(token_ids, num_output_tokens, detection):
        request.status = RequestStatus.FINISHED_REPETITION
        return True
    return False


def repeats_itself(token_ids: list[int], num_output_tokens: int, detection: RepetitionDetection) -> bool:
    """Return whether the last ``num_output_tokens`` of ``token_ids`` end with one pattern, repeated ``min_count``
    times.

    A pattern has ``min_pattern_size`` to ``max_pattern_size`` tokens. For most pattern sizes, comparing one token shows
    that the tokens do not repeat.
    """
    longest = min(detection.max_pattern_size, num_output_tokens // detection.min_count)
    for size in range(detection.min_pattern_size, longest + 1):
        if token_ids[-1] != token_ids[-1 - size]:
            continue
        # The last tokens repeat a pattern of this size if they equal the tokens that are one pattern size earlier.
        length = size * detection.min_count
        end = len(token_ids)
        if token_ids[end - length : end - size] == token_ids[end - length + size :]:
            return True
    return False


def append_tokens(request: Request, token_ids: list[int], eos_token_ids: frozenset[int]) -> tuple[list[int], bool]:
    """Append output tokens up to the first token that ends the request. Return the appended tokens, and whether the
    request has ended.
    """
    for count, token_id in enumerate(token_ids, start=1):
        request.all_token_ids.append(token_id)
        if check_stop(request, eos_token_ids):
            return token_ids[:count], True
    return token_ids, False


class BrokenLogitsError(PenstockError):
    """Raised if the model's logits for a request are NaN or infinite. The message is for operators."""


class StepResults:
    """Applies step results to requests, in step order."""

    def __init__(
        self, state: SchedulerState, drafting: DraftPlanner | None = None, encoder: EncoderWork | None = None
    ) -> None:
        self._encoder = encoder
        self._kv_cache = state.kv_cache
        self._outputs = state.outputs
        self._eos_token_ids = state.context.eos_token_ids
        self._drafting = drafting

    def take(self, step: SchedulerOutput, results: ModelRunnerOutput, requests: Mapping[str, Request]) -> list[Request]:
        """Apply the results of a step to its requests. Return the requests that have ended. The caller must remove
        these requests from the scheduler.

        Requests that ended while the step ran are skipped. Requests that lost their blocks after the step was scheduled
        are skipped as well.
        """
        sampled = dict(zip(results.request_ids, results.sampled_token_ids, strict=True))
        block_size, has_windows = self._kv_cache.block_size, self._kv_cache.has_windows
        finished = []
        drafted = step.scheduled_spec_decode_tokens
        num_nans = results.num_nans_in_logits
        for key, num_tokens in step.num_scheduled_tokens.items():
            request = requests.get(key)
            if request is None or step.step < request.valid_from_step:
                continue
            if num_nans and key in num_nans:
                self._fail_of_nans(request, num_nans[key])
                finished.append(request)
                continue
            num_known = len(request.all_token_ids)
            try:
                if drafted and (drafts := drafted.get(key)) is not None:
                    if self._take_drafted(request, step, num_tokens, drafts, sampled[key], results):
                        finished.append(request)
                    continue
                before = request.num_processed_tokens
                request.num_processed_tokens = after = before + num_tokens
                if after // block_size != before // block_size:
                    self._kv_cache.cache_blocks(request)
                if has_windows:
                    self._kv_cache.free_out_of_window(request, after)
                if before < request.media_end and self._encoder is not None:
                    self._encoder.passed(request)
                if self._advance(request, sampled[key], results):
                    finished.append(request)
            except Exception as e:
                # Tokens that follow the end of the request are not sent to the client, so drop them.
                del request.all_token_ids[num_known:]
                request.status = RequestStatus.FINISHED_ERROR
                error = log_incident(request, e, doing="processing the step's results for the request")
                self._outputs.add_end(request, [], error=error)
                finished.append(request)
        return finished

    def _fail_of_nans(self, request: Request, count: int) -> None:
        """End a request because ``count`` of its logits are NaN or infinite. The tokens and KV blocks that the step
        computed for the request are invalid.
        """
        request.status = RequestStatus.FINISHED_ERROR
        error = log_incident(
            request,
            BrokenLogitsError(f"{count} logits are NaN or infinite"),
            doing="the model's forward pass, whose logits are NaN or infinite,",
            reason=STEP_FAILED,
        )
        self._outputs.add_end(request, [], error=error, num_nans=count)

    def _take_drafted(
        self,
        request: Request,
        step: SchedulerOutput,
        num_tokens: int,
        drafts: list[int],
        token_ids: list[int],
        results: ModelRunnerOutput,
    ) -> bool:
        """Apply the results of a request whose drafts the step verified. Return whether the request has ended.

        Rejected draft tokens do not count as computed.
        """
        num_accepted = len(token_ids) - 1
        request.num_computed_tokens -= len(drafts) - num_accepted
        if request.num_placeholders:
            # _advance subtracts the accepted tokens from num_placeholders.
            request.num_placeholders -= len(drafts) - num_accepted
        request.unsettled = request.key in step.num_drafts_wanted
        if self._drafting is not None:
            self._drafting.verified(request, len(drafts), num_accepted)
        before = request.num_processed_tokens
        ended = self._advance(request, token_ids, results, len(drafts))
        # Update num_processed_tokens last, because it makes full blocks findable. Findable blocks must contain only
        # final tokens.
        after = min(before + num_tokens - len(drafts) + num_accepted, request.num_tokens)
        request.num_processed_tokens = after
        block_size = self._kv_cache.block_size
        if after // block_size != before // block_size:
            self._kv_cache.cache_blocks(request)
        if self._kv_cache.has_windows:
            self._kv_cache.free_out_of_window(request, after)
        return ended

    def _advance(self, request: Request, token_ids: list[int], results: ModelRunnerOutput, num_drafts: int = 0) -> bool:
        """Append new tokens to a request and add its outputs. Return whether the request has ended.

        ``num_drafts`` is the number of draft tokens that the step verified.
        """
        key = request.key
        if results.pooled and (vectors := results.pooled.get(key)) is not None:
            request.status = RequestStatus.FINISHED_STOPPED
            self._outputs.add_end(request, [], pooled=vectors)
            return True
        prompt_logprobs = _unsent(request, results.prompt_logprobs.get(key)) if results.prompt_logprobs else None
        if not token_ids:
            if prompt_logprobs is not None:
                self._outputs.add_tokens(request, [], prompt_logprobs=prompt_logprobs)
            return False
        if request.num_placeholders:
            request.num_placeholders -= len(token_ids)
        known = len(request.all_token_ids)
        token_ids, ended = append_tokens(request, token_ids, self._eos_token_ids)
        error = None
        if request.grammar is not None:
            error = self._follow_grammar(request, token_ids)
            token_ids = request.all_token_ids[known:]
        logprobs = results.logprobs.get(key) if results.logprobs else None
        if logprobs is not None and len(logprobs) > len(token_ids):
            logprobs = logprobs.slice(0, len(token_ids)) if token_ids else None
        if error is not None:
            self._outputs.add_end(request, token_ids, error=error, logprobs=logprobs)
            return True
        if ended or request.finished:
            self._outputs.add_end(request, token_ids, logprobs=logprobs, prompt_logprobs=prompt_logprobs)
            return request.finished
        self._outputs.add_tokens(
            request, token_ids, logprobs=logprobs, prompt_logprobs=prompt_logprobs, num_drafts=num_drafts
        )
        return False

    def _follow_grammar(self, request: Request, token_ids: list[int]) -> RequestError | None:
        """Call the module's function ``_follow_grammar``. An exception in the call ends only this request."""
        try:
            return _follow_grammar(request, token_ids)
        except Exception as e:
            del request.all_token_ids[-len(token_ids) :]
            request.status = RequestStatus.FINISHED_ERROR
            return RequestError.from_exception(
                incident(e, request=request.request_id, doing="advancing the grammar of the constraint")
            )


def _unsent(request: Request, logprobs: Logprobs | None) -> Logprobs | None:
    """Return the prompt log-probabilities that the client does not have yet. After a preemption, some log-probabilities
    are computed a second time.

    ``logprobs`` belong to the last prompt tokens that have been processed.
    """
    if logprobs is None or not len(logprobs):
        return None
    # A step that computes tokens up to position p scores tokens up to p + 1. The first prompt token has no score.
    end = min(request.num_processed_tokens, request.num_prompt_tokens - 1)
    new = end - request.num_prompt_logprobs
    if new <= 0:
        return None
    request.num_prompt_logprobs = end
    return logprobs if new >= len(logprobs) else logprobs.slice(len(logprobs) - new, len(logprobs))


def _follow_grammar(request: Request, token_ids: list[int]) -> RequestError | None:
    """Advance the request's grammar by the new tokens. End the request if the grammar is complete.

    Return an error if the request's other parameters excluded every token that the grammar allows.
    """
    grammar = request.grammar
    if grammar is None:
        return None
    for count, token_id in enumerate(token_ids, start=1):
        if grammar.accept(token_id):
            if grammar.terminated and count < len(token_ids):  # The grammar allows no more tokens.
                del request.all_token_ids[count - len(token_ids) :]
                request.status = RequestStatus.FINISHED_STOPPED
                request.stop_reason = None
                return None
            continue
        handed_over = request.status is RequestStatus.HANDED_OVER
        if request.finished and not handed_over and count == len(token_ids):
            # The request ended at a stop token or at its length limit. The output of such a request may violate the
            # constraint, for example as incomplete JSON.
            return None
        del request.all_token_ids[count - 1 - len(token_ids) :]
        request.status = RequestStatus.FINISHED_ERROR
        return RequestError.from_exception(
            InvalidArgument(
                "no token is allowed by both structured_output and the request's other parameters "
                "(allowed_token_ids, bad_words, logit_bias, min_tokens)",
                field="sampling_params.structured_output",
                reason="CONSTRAINT_CONFLICT",
            )
        )
    if grammar.terminated and (not request.finished or request.status is RequestStatus.HANDED_OVER):
        request.status = RequestStatus.FINISHED_STOPPED
    return None
