"""Conversion of the outputs of engines to outputs for clients."""

import time
from collections.abc import Sequence

from penstock_common.errors import RequestFailed
from penstock_common.observability.logging import get_logger, incident
from penstock_common.types.outputs import (
    Drafts,
    EngineCoreEvent,
    EngineCoreOutput,
    EventType,
    FinishReason,
    Logprobs,
    NewTokens,
    SpecDecodingStats,
)
from penstock_common.types.request import EngineCoreRequest
from penstock_common.types.sampling import SamplingParams
from penstock_frontend.call_types import Finish, Usage
from penstock_frontend.metrics import EngineMetrics, EngineSteps, FrontendMetrics
from penstock_frontend.processing.outputs.collector import OutputCollector
from penstock_frontend.processing.outputs.detokenizer import IncrementalDetokenizer, OutputText
from penstock_frontend.processing.outputs.request_states import RequestStates, failure_of
from penstock_frontend.processing.prompts.mixed_prompt import media_tokens, text_context
from penstock_frontend.processing.prompts.tokenizer import Tokenizer

# The code below prepares log-probabilities for clients. Each entry gets the text of its token, and duplicates are
# removed.


class LogprobsReader:
    """Adds texts to the entries of one sequence's log-probabilities. The reader adds no texts if the request asks for
    none.

    The text of an entry is the text that the entry's token adds after another token, including leading spaces. The text
    of a token that is only a part of a character is U+FFFD. The text of a special token is the token's name. The joined
    texts of the chosen tokens therefore equal the output only if each character has a single token.
    """

    __slots__ = ("_num_prompt_left", "_tokenizer", "_wanted")

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, num_prompt_tokens: int) -> None:
        self._tokenizer = tokenizer if params.detokenize else None
        self._wanted = params.has_logprobs
        self._num_prompt_left = num_prompt_tokens - 1 if params.prompt_logprobs is not None else 0

    def read(self, logprobs: Logprobs | None, num_tokens: int) -> Logprobs | None:
        """Return the log-probabilities of an output, or None if it has no tokens.

        Raises ValueError if the request asks for log-probabilities, and their number differs from the number of tokens.
        """
        if not self._wanted:
            return None
        num_positions = 0 if logprobs is None else len(logprobs)
        if num_positions != num_tokens:
            raise ValueError(f"the engine sent log-probabilities of {num_positions} positions for {num_tokens} tokens")
        return None if logprobs is None or not num_positions else self._with_texts(logprobs)

    def read_prompt(self, logprobs: Logprobs | None) -> Logprobs | None:
        """Return the log-probabilities of the next prompt tokens.

        Entries after the end of the prompt are dropped. Return None if no entries for prompt tokens are left.
        """
        if logprobs is None:
            return None
        count = min(len(logprobs), self._num_prompt_left)
        self._num_prompt_left -= count
        return self._with_texts(logprobs.slice(0, count)) if count else None

    def _with_texts(self, logprobs: Logprobs) -> Logprobs:
        if self._tokenizer is not None:
            text_of = self._tokenizer.text_of
            logprobs.tokens = [text_of(token_id) for token_id in logprobs.token_ids]
        return logprobs


_NO_DRAFTS = SpecDecodingStats()


class RequestState:
    """State of one sequence, from its acceptance until its end, even if it moves between engines.

    Attributes:
        engine_id: Id of the engine that sent the latest output.
        index: Index of the sequence among the sequences of its call.
        collector: Buffer for the outputs, which all sequences of the call share.
        first_token_after: Seconds from the arrival of the request to its first token.
        finish: Details of the sequence's end, if the sequence ended normally.
        decoded: Seconds from the first to the last token on each earlier engine, summed over these engines.
        num_preemptions: Number of times that engines preempted the sequence.
        speculation: Draft statistics (speculative decoding), as engines report them.

    Times that an engine reports are on the engine's clock. These times are 0 until they are known, and become 0 again
    when the sequence moves to another engine.
    """

    __slots__ = (
        "collector",
        "decoded",
        "engine_id",
        "external_id",
        "finish",
        "first_token_after",
        "first_token_time",
        "index",
        "last_token_time",
        "logprobs",
        "max_tokens",
        "media_tokens",
        "num_cached",
        "num_nans",
        "num_preemptions",
        "num_prompt",
        "num_received",
        "queued_time",
        "request_id",
        "scheduled_time",
        "speculation",
        "started",
        "text",
    )

    def __init__(
        self, request: EngineCoreRequest, tokenizer: Tokenizer, collector: OutputCollector, index: int = 0
    ) -> None:
        params = request.sampling_params
        self.request_id = request.request_id
        self.external_id = request.context.external_request_id
        self.engine_id = ""
        self.num_prompt = len(request.prompt_token_ids)
        self.media_tokens = media_tokens(request.mm_features)
        self.num_cached = 0
        self.num_nans = 0
        self.num_preemptions = 0
        self.num_received = 0
        self.max_tokens = params.max_tokens
        self.started = time.monotonic()
        self.first_token_after: float | None = None
        self.queued_time = self.scheduled_time = self.first_token_time = self.last_token_time = 0.0
        self.decoded = 0.0
        self.finish: Finish | None = None
        self.speculation = _NO_DRAFTS
        self.collector = collector
        self.index = index
        self.logprobs = LogprobsReader(tokenizer, params, self.num_prompt)
        self.text = OutputText(
            IncrementalDetokenizer(
                tokenizer,
                text_context(request.prompt_token_ids, request.prompt_embeds),
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
            )
            if params.detokenize
            else None,
            stops=params.stop,
            include_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )

    def usage(self) -> Usage:
        """Return the token counts so far."""
        drafts, num_tokens = self.speculation, self.text.num_tokens
        return Usage(
            self.num_prompt,
            self.num_cached,
            num_tokens,
            # The tokens after a stop string are not part of the output.
            min(drafts.num_accepted_tokens, num_tokens),
            drafts.num_draft_tokens - drafts.num_accepted_tokens,
            media_tokens=self.media_tokens,
        )

    def fail(self, error: RequestFailed) -> None:
        """End the call of the sequence with an error. All sequences of the call end."""
        self.collector.fail(error)

    def moved(self) -> None:
        """Record that the sequence has moved to another engine. Reset the times of the engine, because engines have
        different clocks.
        """
        self.decoded += self.last_token_time - self.first_token_time
        self.queued_time = self.scheduled_time = self.first_token_time = self.last_token_time = 0.0

    def take_events(self, events: Sequence[EngineCoreEvent]) -> None:
        """Record when the engine queued and first scheduled the request, and how often the engine preempted the
        request.
        """
        for event in events:
            if event.type is EventType.QUEUED:
                self.queued_time = event.timestamp
            elif event.type is EventType.SCHEDULED and not self.scheduled_time:
                self.scheduled_time = event.timestamp
            elif event.type is EventType.PREEMPTED:
                self.num_preemptions += 1


class OutputProcessor(RequestStates[RequestState]):
    """Tracks every generation request of this frontend, and converts the outputs of engine steps to pieces for clients.

    The journal ensures that the outputs of a sequence arrive in order and without gaps, even from different engines.
    """

    def __init__(self, tokenizer: Tokenizer, metrics: FrontendMetrics) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._metrics = metrics

    def add(self, *requests: EngineCoreRequest) -> list[RequestState]:
        """Track the sequences of one call from now on. Their outputs are put into one shared buffer, by the index of
        the sequence.
        """
        params = requests[0].sampling_params
        collector = OutputCollector(params.output_kind, params.stream_interval, len(requests))
        states = [RequestState(request, self._tokenizer, collector, index) for index, request in enumerate(requests)]
        self._states.update((state.request_id, state) for state in states)
        return states

    def abort(self, state: RequestState) -> bool:
        """End a request with the output that it has so far. Return False if the request had already ended."""
        if not self.remove(state):
            return False
        try:
            self._end_with_what_there_is(state)
        except Exception as e:
            state.collector.fail(incident(e, request=state.external_id, doing="completing the output"))
        return True

    def _end_with_what_there_is(self, state: RequestState) -> None:
        delta = state.text.add((), ended=True)
        reason = FinishReason.STOP if delta.stop else FinishReason.ABORT
        state.finish = Finish(reason, delta.stop or None, state.usage())
        _count_end(state, state.finish, self._metrics.engine(state.engine_id))
        state.collector.put(delta, state.finish, index=state.index)

    def process(
        self,
        outputs: Sequence[EngineCoreOutput],
        engine: str = "",
        timestamp: float = 0.0,
        tokens: Sequence[NewTokens] = (),
        drafts: Sequence[Drafts] = (),
    ) -> list[str]:
        """Process the outputs of one step. Return the ids of requests that the engine should abort.

        Args:
            outputs: Outputs that have content other than new tokens.
            engine: Id of the engine.
            timestamp: Time at which the step ended, on the engine's clock.
            tokens: Outputs that consist only of new tokens. These outputs are processed before ``outputs``.
            drafts: Draft statistics of some requests in ``tokens``.
        """
        for request_id, speculation in drafts:
            if (drafted := self._states.get(request_id)) is not None:
                drafted.speculation = speculation
        to_abort: list[str] = []
        metrics, step = self._metrics.engine(engine), EngineSteps(timestamp)
        for request_id, token_ids in tokens:
            state = self._states.get(request_id)
            if state is None:
                continue  # the request of this output has ended
            state.engine_id = engine
            try:
                ended_here = self._advance_tokens(state, token_ids, metrics, step)
            except Exception as e:  # an error in one request must not end other requests of the step
                self._fail(state, incident(e, request=state.external_id, doing="processing the output"))
                ended_here = True
            if ended_here:
                to_abort.append(request_id)
        for output in outputs:
            state = self._states.get(output.request_id)
            if state is None:
                continue  # the request of this output has ended
            state.engine_id = engine
            try:
                ended_here = self._advance(state, output, metrics, step)
            except Exception as e:  # an error in one request must not end other requests of the step
                self._fail(state, incident(e, request=state.external_id, doing="processing the output"))
                ended_here = True
            if ended_here and output.finish_reason is None:
                to_abort.append(state.request_id)
        try:
            metrics.step(step)
        except Exception as e:
            incident(e, request="", doing="updating the metrics of a step")
        return to_abort

    def _advance_tokens(
        self, state: RequestState, token_ids: list[int], metrics: EngineMetrics, step: EngineSteps
    ) -> bool:
        """Process an output that consists only of new tokens. Hot path: called once per output."""
        # raises ValueError if the request asks for log-probabilities
        logprobs = state.logprobs.read(None, len(token_ids))
        _count_tokens(state, len(token_ids), metrics, step)
        delta = state.text.add(token_ids, logprobs=logprobs)
        if not delta.stop:
            state.collector.put(delta, index=state.index)
            return False
        _forget_dropped(state, step)
        self._finish(state, Finish(FinishReason.STOP, delta.stop, state.usage()), metrics)
        state.collector.put(delta, state.finish, index=state.index)
        return True

    def _finish(self, state: RequestState, finish: Finish, metrics: EngineMetrics) -> None:
        del self._states[state.request_id]
        state.finish = finish
        _count_end(state, finish, metrics)

    def _advance(
        self, state: RequestState, output: EngineCoreOutput, metrics: EngineMetrics, step: EngineSteps
    ) -> bool:
        """Process one output of a request. Return whether the request has ended."""
        if output.error is not None or output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            self._fail(state, failure_of(output))
            return True
        token_ids = output.new_token_ids
        logprobs = state.logprobs.read(output.new_logprobs, len(token_ids))
        prompt_logprobs = state.logprobs.read_prompt(output.new_prompt_logprobs)
        if output.num_nans_in_logits:  # engines of an earlier release report NaN logits, and then continue the request
            metrics.nans(output.num_nans_in_logits)
            _report_nans(state, output.num_nans_in_logits)
        if output.prefill_stats is not None:
            state.num_cached = output.prefill_stats.num_cached_tokens
        if output.events:
            state.take_events(output.events)
        if output.spec_decoding_stats is not None:
            state.speculation = output.spec_decoding_stats
        if token_ids:
            _count_tokens(state, len(token_ids), metrics, step)
        delta = state.text.add(
            token_ids,
            logprobs=logprobs,
            ended=output.finish_reason is not None,
            stop_token=output.finish_reason is FinishReason.STOP,
        )
        if delta.stop:
            _forget_dropped(state, step)
            finish = Finish(FinishReason.STOP, delta.stop, state.usage())
        elif output.finish_reason is not None:
            kept = (output.kv_source, output.kv_params)
            finish = Finish(output.finish_reason, output.stop_reason, state.usage(), *kept)
        else:
            state.collector.put(delta, index=state.index, prompt_logprobs=prompt_logprobs)
            return False
        self._finish(state, finish, metrics)
        state.collector.put(delta, finish, index=state.index, prompt_logprobs=prompt_logprobs)
        return True


def _report_nans(state: RequestState, count: int) -> None:
    if state.num_nans == 0:
        get_logger().warning(
            "the engine computed NaN logits, so the tokens of this request are meaningless", request=state.external_id
        )
    state.num_nans += count


def _count_tokens(state: RequestState, count: int, metrics: EngineMetrics, step: EngineSteps) -> None:
    """Count the new tokens of an output.

    Hot path: called once per output, so metrics are updated only at the end of the step, with the totals of the step.
    """
    now = step.timestamp
    if state.last_token_time:
        gap = now - state.last_token_time
        step.gaps[gap] = step.gaps.get(gap, 0) + 1
    elif state.num_received:  # the request ran on another engine before
        state.first_token_time = now
    else:
        state.first_token_after = time.monotonic() - state.started
        state.first_token_time = now
        metrics.first_token(state.first_token_after, state.num_prompt)
    state.last_token_time = now
    state.num_received += count
    step.num_tokens += count


def _forget_dropped(state: RequestState, step: EngineSteps) -> None:
    """Subtract the tokens after a stop string that arrived in the same frame, because they are not part of the output."""
    dropped = state.num_received - state.text.num_tokens
    state.num_received -= dropped
    step.num_tokens -= dropped


def _count_end(state: RequestState, finish: Finish, metrics: EngineMetrics) -> None:
    if state.scheduled_time:
        metrics.scheduled(state.scheduled_time - state.queued_time)
    if state.num_received:
        whole = state.scheduled_time and not state.decoded
        prefill = state.first_token_time - state.scheduled_time if whole else None
        decode = state.decoded + state.last_token_time - state.first_token_time
        metrics.generated(prefill=prefill, decode=decode)
    metrics.finished(
        state.started,
        finish.reason,
        prompt=state.num_prompt,
        generated=finish.usage.completion_tokens,
        max_tokens=state.max_tokens,
    )
