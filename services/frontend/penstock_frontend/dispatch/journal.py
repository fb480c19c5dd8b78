"""Journal of the requests sent to engines and of their outputs, from which another engine can resume a request.

Every output has the number of its attempt, and the offset of its first token in the sequence. The journal records each
token before clients receive the token. The journal drops repeated tokens, and outputs of earlier attempts. The journal
knows after which token another engine must resume. The journal does no I/O.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import NamedTuple

import msgspec

from penstock_common.errors import Internal, RequestFailed, Unavailable
from penstock_common.observability.logging import REASON as INCIDENT
from penstock_common.observability.logging import incident
from penstock_common.types.kv_transfer import KvSource
from penstock_common.types.outputs import (
    Drafts,
    EngineCoreOutput,
    FinishReason,
    NewTokens,
    RequestError,
    SpecDecodingStats,
    TokenColumns,
)
from penstock_common.types.request import EngineCoreRequest


class EngineFaultError(Exception):
    """Raised if an engine's outputs violate the protocol. The frontend then stops trusting the engine's messages."""


class Call:
    """State of the sequences of a call: ``taker`` is the key of the engine that last received one of them by handoff."""

    __slots__ = ("taker",)

    def __init__(self) -> None:
        self.taker = ""


class JournalEntry:
    """State of one sequence, from its start on the first engine until the sequence ends."""

    __slots__ = (
        "admitted",
        "asked_away",
        "attempt",
        "began_at",
        "call",
        "doubts",
        "ended",
        "engine",
        "engine_variant",
        "excluded",
        "failed_steps",
        "handed_at",
        "handoff_after_tokens",
        "held_for",
        "kv_source",
        "last_loss",
        "losses",
        "losses_alone",
        "num_handoffs",
        "num_moves",
        "num_prompt_logprobs",
        "num_prompt_scored",
        "num_tokens_then",
        "number",
        "prefilled",
        "progressed",
        "request",
        "speculation",
        "speculation_before",
        "token_ids",
        "variant",
    )

    def __init__(self, request: EngineCoreRequest, call: Call) -> None:
        self.request = request
        self.call = call
        """The call that the sequence belongs to."""
        self.engine = ""
        """Key of the engine on which the sequence runs. Empty while the sequence has no engine."""
        self.number = 0
        """Number that identifies this attempt in the session with the engine. 0 while the sequence has no engine."""
        self.attempt = request.attempt
        self.admitted = False
        """True if any engine has admitted the sequence. Later engines may then not refuse it for lack of capacity."""
        self.token_ids = list(request.prior_output_token_ids)
        """All output tokens of the sequence so far, over all attempts."""
        self.speculation: SpecDecodingStats | None = None
        """Draft statistics (speculative decoding) of the current attempt."""
        self.speculation_before: SpecDecodingStats | None = None
        """Sum of the draft statistics of all earlier attempts. A lost attempt counts with its last reported statistics."""
        self.num_prompt_logprobs = 0
        """Number of prompt positions with known log-probabilities, over all attempts."""
        self.num_prompt_scored = 0
        """Number of prompt positions with known log-probabilities in the current attempt."""
        self.prefilled = False
        """True if an engine has already reported statistics of the prompt's computation."""
        self.progressed = False
        """True if the current attempt has produced new output."""
        self.began_at: float | None = None
        """Time of the current attempt's first new output, on the journal's clock. None before this output."""
        self.num_tokens_then = 0
        """Number of output tokens that the sequence had at the time ``began_at``."""
        self.ended = False
        self.num_moves = 0
        """Number of times that the sequence left an engine without a planned handoff."""
        self.num_handoffs = 0
        """Number of times that an engine handed the sequence over by a planned handoff."""
        self.handed_at: float | None = None
        """Time of the last planned handoff, on the journal's clock. None once the next engine has produced output."""
        self.handoff_after_tokens = 0
        """Number of output tokens after which the engine must hand the attempt over to another engine. 0: never."""
        self.asked_away = False
        """True if the frontend has asked the current engine to hand the sequence over."""
        self.kv_source = request.kv_source
        """Earlier engine that still keeps the sequence's KV blocks. None once the next engine has produced output."""
        self.losses = 0
        """Number of engines in a row that were lost before they produced output for the sequence."""
        self.losses_alone = 0
        """Number of the losses in ``losses`` at which the engine had no requests of other calls."""
        self.doubts: dict[str, bool] = {}
        """Disconnected engines that may still be alive. The value is True if the engine had no requests of other calls."""
        self.last_loss = ""
        """Reason why the sequence left its last engine."""
        self.failed_steps = 0
        """Number of engines on which every step with this sequence failed."""
        self.held_for = 0.0
        """Number of seconds that the sequence has waited for an engine since its last new output."""
        self.excluded: dict[str, float] = {}
        """Engines that must not get the sequence. The value is the end of the exclusion, on the event loop's clock."""
        self.variant: str | None = None
        """Variant of the engine that produced the sequence's latest output. None before the first output."""
        self.engine_variant = ""
        """Variant of the engine on which the sequence runs now."""

    @property
    def request_id(self) -> str:
        """Request id that engines use for the sequence."""
        return self.request.request_id

    @property
    def has_left(self) -> bool:
        """True if the sequence has left at least one engine."""
        return self.attempt != self.request.attempt

    @property
    def leaves_as_asked(self) -> bool:
        """True if the frontend expects a handoff, because it has asked the engine to hand the sequence over."""
        return self.asked_away or self.handoff_after_tokens > 0

    @property
    def lora_digest(self) -> bytes:
        """Digest of the sequence's LoRA adapter. Empty if the sequence uses no adapter."""
        return b"" if self.request.lora is None else self.request.lora.digest

    def to_send(self) -> EngineCoreRequest:
        """Return the request for the engine of the current attempt. The request has no ``data_parallel_rank``, because
        the frontend has already chosen the engine. Tokens that the client has received are prior output, never prompt.
        If the journal knows all log-probabilities of the prompt, the request does not ask for them. Otherwise the
        engine would have to recompute prompt tokens that it has cached.
        """
        params = self.request.sampling_params
        if params.prompt_logprobs is not None and self.num_prompt_logprobs >= len(self.request.prompt_token_ids) - 1:
            params = msgspec.structs.replace(params, prompt_logprobs=None)
        context = self.request.context
        if context.data_parallel_rank is not None:
            context = msgspec.structs.replace(context, data_parallel_rank=None)
        return msgspec.structs.replace(
            self.request,
            attempt=self.attempt,
            never_admitted=self.attempt > 0 and not self.admitted,
            prior_output_token_ids=self.token_ids,
            sampling_params=params,
            context=context,
            request_number=self.number,
            kv_source=self.kv_source,
            handoff_after_tokens=self.handoff_after_tokens,
        )

    def take(self, output: EngineCoreOutput) -> bool:
        """Record an output of the current attempt, and remove tokens that the journal already knows. Return True if new
        content remains. Raises EngineFaultError if tokens are missing before this output.
        """
        repeated = self._num_repeated(output.offset)
        if output.new_prompt_logprobs is not None:
            self._take_prompt_logprobs(output)
        if output.prefill_stats is not None:
            if self.prefilled:
                output.prefill_stats = None  # count the prompt once, with the statistics of the first engine
            self.prefilled = True
        if repeated and output.new_token_ids:
            _drop_first(output, repeated)
            if not output.new_token_ids and output.finish_reason is None:
                return False
        if output.new_token_ids:
            self.token_ids.extend(output.new_token_ids)
            self._progress()
        return True

    def take_speculation(self, output: EngineCoreOutput) -> None:
        """Record the draft statistics of the current attempt. Replace them in the output by the sum over all attempts."""
        if output.spec_decoding_stats is not None:
            self.speculation = output.spec_decoding_stats
        output.spec_decoding_stats = _sum(self.speculation_before, self.speculation)

    def take_drafts(self, num_drafts: int, num_accepted: int) -> SpecDecodingStats:
        """Count the draft tokens that one step verified for the current attempt. Return the sum over all attempts."""
        if self.speculation is None:
            self.speculation = SpecDecodingStats()
        self.speculation.count(num_drafts, num_accepted)
        return _sum(self.speculation_before, self.speculation) or self.speculation

    def take_tokens(self, offset: int, token_ids: list[int]) -> list[int]:
        """Record an output of the current attempt that has only tokens. Return the tokens that are new. Raises
        EngineFaultError if tokens are missing before this output. Hot path: called once per output.
        """
        if offset != len(self.token_ids):
            token_ids = token_ids[self._num_repeated(offset) :]
        if token_ids:
            self.token_ids.extend(token_ids)
            self._progress()
        return token_ids

    def _num_repeated(self, offset: int) -> int:
        repeated = len(self.token_ids) - offset
        if repeated < 0:
            request_id = self.request.context.external_request_id
            raise EngineFaultError(
                f"output of request {request_id} continues at token {offset}, expected {len(self.token_ids)}"
            )
        return repeated

    def _take_prompt_logprobs(self, output: EngineCoreOutput) -> None:
        logprobs = output.new_prompt_logprobs
        if logprobs is None:
            return
        if self.token_ids and output.offset < len(self.token_ids):
            # The output is a repetition, because engines send prompt log-probabilities before the first output token.
            output.new_prompt_logprobs = None
            return
        known = self.num_prompt_logprobs - self.num_prompt_scored
        self.num_prompt_scored += len(logprobs)
        if known >= len(logprobs):
            output.new_prompt_logprobs = None
        elif known > 0:
            output.new_prompt_logprobs = logprobs.slice(known, len(logprobs))
        if self.num_prompt_scored > self.num_prompt_logprobs:
            self.num_prompt_logprobs = self.num_prompt_scored
            self._progress()

    def _progress(self) -> None:
        self.progressed = True
        self.variant = self.engine_variant
        self.held_for = 0.0
        self.kv_source = None

    def begin(self, now: float) -> None:
        """Record the time of the first new output of the current attempt."""
        self.began_at = now
        self.num_tokens_then = len(self.token_ids)

    def seconds_per_token(self, now: float) -> float | None:
        """Return the average seconds per token of the current attempt. None before the attempt's second output."""
        num_tokens = len(self.token_ids) - self.num_tokens_then
        return None if self.began_at is None or not num_tokens else (now - self.began_at) / num_tokens

    def leave(self) -> None:
        """Leave an engine that is lost, drains, or refused the sequence. On the next engine, a new attempt begins."""
        self.num_moves += 1
        self._next_attempt()

    def hand_over(self, source: KvSource | None, now: float) -> None:
        """Leave the engine by a planned handoff, which is not counted as a move. ``source`` keeps the KV blocks."""
        self.num_handoffs += 1
        self.handed_at = now
        self.kv_source = source or self.kv_source
        self.admitted = True
        self._next_attempt()

    def _next_attempt(self) -> None:
        self.engine = ""
        self.handoff_after_tokens = 0
        self.asked_away = False
        self.speculation_before, self.speculation = _sum(self.speculation_before, self.speculation), None
        self.attempt += 1
        self.num_prompt_scored = 0
        self.progressed = False
        self.began_at = None


def _sum(first: SpecDecodingStats | None, second: SpecDecodingStats | None) -> SpecDecodingStats | None:
    if first is None or second is None:
        return first or second
    per_pos = zip_longest(first.num_accepted_tokens_per_pos, second.num_accepted_tokens_per_pos, fillvalue=0)
    return SpecDecodingStats(
        num_drafts=first.num_drafts + second.num_drafts,
        num_draft_tokens=first.num_draft_tokens + second.num_draft_tokens,
        num_accepted_tokens=first.num_accepted_tokens + second.num_accepted_tokens,
        num_accepted_tokens_per_pos=[sum(pair) for pair in per_pos],
    )


def _drop_first(output: EngineCoreOutput, count: int) -> None:
    """Remove the first ``count`` tokens of an output, and the log-probabilities of these tokens."""
    output.new_token_ids = output.new_token_ids[count:]
    output.offset += count
    if (logprobs := output.new_logprobs) is not None:
        left = min(count, len(logprobs))
        output.new_logprobs = logprobs.slice(left, len(logprobs)) if left < len(logprobs) else None


LORA_UNAVAILABLE = "LORA_UNAVAILABLE"
"""Error reason of an engine that cannot read the LoRA adapter. Another engine may be able to read the adapter."""

_ELSEWHERE = ("QUEUE_FULL", LORA_UNAVAILABLE, "MEDIA_NOT_CACHED", "MEDIA_CACHE_FULL", "SHARED_MEMORY_UNREADABLE")
"""Error reasons after which another engine may accept the request. Media errors were already retried on this engine."""

_MAX_NUMBER = 2**32 - 1

_NOBODY: dict[str, "JournalEntry"] = {}


class Refusal(NamedTuple):
    """Refusal of a sequence that another engine may accept. ``admitted``: the engine had admitted the sequence."""

    entry: JournalEntry
    error: RequestFailed
    admitted: bool


class Handoff(NamedTuple):
    """Planned handoff of a sequence. ``source`` is the engine that keeps its KV blocks, or None if no engine does."""

    entry: JournalEntry
    source: KvSource | None


class Accepted(NamedTuple):
    """New content of one frame of outputs. Handle ``tokens`` before ``outputs``. ``drafts`` has the draft statistics of
    the requests in ``tokens``. If ``fault`` is set, the outputs violated the protocol, and the engine counts as lost.
    """

    outputs: list[EngineCoreOutput]
    refusals: list[Refusal]
    fault: EngineFaultError | None = None
    tokens: Sequence[NewTokens] = ()
    drafts: Sequence[Drafts] = ()
    handoffs: Sequence[Handoff] = ()


class Journal:
    """Tracks every sequence from its start until its end, both on engines and while it waits for an engine. ``clock``
    returns monotonic seconds. The journal calls ``on_left`` with engine and request id when a sequence leaves an
    engine. After a handoff, it calls ``on_gap`` with the seconds until the next engine's first output.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        on_left: Callable[[str, str], None],
        on_gap: Callable[[float], None] = lambda _: None,
    ) -> None:
        self._clock = clock
        self._on_left = on_left
        self._on_gap = on_gap
        self._entries: dict[str, JournalEntry] = {}
        self._by_engine: dict[str, dict[str, JournalEntry]] = {}
        self._by_number: dict[int, JournalEntry] = {}
        self._last_number = 0

    def __len__(self) -> int:
        return len(self._entries)

    def begin(self, requests: Sequence[EngineCoreRequest]) -> list[JournalEntry]:
        """Add the sequences of a call to the journal. These sequences have no engine yet."""
        call = Call()
        entries = [JournalEntry(request, call) for request in requests]
        self._entries.update((entry.request_id, entry) for entry in entries)
        return entries

    def assign(self, entry: JournalEntry, engine: str, variant: str = "") -> None:
        """Assign a sequence to an engine. ``variant`` is the variant of this engine."""
        entry.engine, entry.engine_variant = engine, variant
        entry.number = self._unused_number()
        self._by_number[entry.number] = entry
        self._by_engine.setdefault(engine, {})[entry.request_id] = entry

    def num_on(self, engine: str) -> int:
        """Return the number of sequences that run on an engine."""
        return len(self._by_engine.get(engine, _NOBODY))

    def on(self, engine: str) -> list[JournalEntry]:
        """Return the sequences that run on an engine."""
        return list(self._by_engine.get(engine, _NOBODY).values())

    def accept(
        self, engine: str, outputs: Iterable[EngineCoreOutput], tokens: TokenColumns | None = None
    ) -> "Accepted":
        """Return the new content of an engine's outputs, and remove repeated tokens from these outputs in place. If an
        output violates the protocol, the outputs before it still count.
        """
        accepted: list[EngineCoreOutput] = []
        new_tokens: list[NewTokens] = []
        drafts: list[Drafts] = []
        refusals: list[Refusal] = []
        handoffs: list[Handoff] = []
        fault = None
        try:
            if tokens is not None:
                if tokens.drafts:
                    drafts = self._accept_drafts(engine, tokens)
                self._accept_tokens(engine, tokens, new_tokens, accepted)
            self._accept_outputs(engine, outputs, accepted, refusals, handoffs)
        except EngineFaultError as e:
            fault = e
        return Accepted(accepted, refusals, fault, new_tokens, drafts, handoffs)

    def _accept_outputs(
        self,
        engine: str,
        outputs: Iterable[EngineCoreOutput],
        accepted: list[EngineCoreOutput],
        refusals: list[Refusal],
        handoffs: list[Handoff],
    ) -> None:
        """Accept the outputs that have a message of their own, as described in ``accept``. Raises EngineFaultError."""
        on_engine = self._by_engine.get(engine, _NOBODY)
        for output in outputs:
            entry = on_engine.get(output.request_id)
            if entry is None or output.attempt != entry.attempt:
                continue  # the sequence has ended or moved, or the output belongs to an older attempt
            if output.error is not None and (output.finish_reason is None or output.error.reason == INCIDENT):
                accepted.append(output)  # an error output has no tokens to record
                if output.finish_reason is not None:
                    self._end(entry)
                continue
            if output.finish_reason is not None or output.spec_decoding_stats is not None:
                entry.take_speculation(output)
            if output.finish_reason is not None and (error := _refused(output)) is not None:
                admitted = output.finish_reason is FinishReason.ABORT or error.code == "INTERNAL"
                entry.kv_source = output.kv_source or entry.kv_source
                refusals.append(Refusal(entry, error, admitted))
                continue
            try:
                is_new = entry.take(output)
            except EngineFaultError:
                raise
            except Exception as e:
                accepted.append(_unwritten(entry, e))
                continue
            if entry.began_at is None and entry.progressed:
                self._begin(entry)
            if is_new:
                accepted.append(output)
            if output.finish_reason is not None:
                self._take_end(entry, output, refusals, handoffs)

    def _take_end(
        self, entry: JournalEntry, output: EngineCoreOutput, refusals: list[Refusal], handoffs: list[Handoff]
    ) -> None:
        """Handle an output that ends a sequence on its engine. In the case of a handoff, mark the output as unfinished."""
        if output.finish_reason is not FinishReason.HANDOFF:
            self._end(entry)
            return
        if entry.leaves_as_asked:
            self._unassign(entry)  # ignore further outputs of this engine for the sequence
            handoffs.append(Handoff(entry, output.kv_source))
        else:
            refusals.append(
                Refusal(
                    entry,
                    Unavailable("the engine handed the request over, but this frontend had not asked for a handover"),
                    admitted=True,
                )
            )
        output.finish_reason = output.kv_source = None

    def _accept_drafts(self, engine: str, tokens: TokenColumns) -> list[Drafts]:
        """Return the draft statistics of the requests for which this step verified drafts."""
        return [
            (entry.request_id, entry.take_drafts(num_drafts, num_accepted))
            for number, num_drafts, num_accepted in tokens.drafted()
            if (entry := self._by_number.get(number)) is not None and entry.engine == engine
        ]

    def _accept_tokens(
        self, engine: str, tokens: TokenColumns, new: list[NewTokens], failed: list[EngineCoreOutput]
    ) -> None:
        """Accept the outputs that have only tokens, as ``accept`` describes. Add the new tokens to ``new``, and error
        outputs to ``failed``. Ignore unknown request numbers: their requests have ended or moved. Raises
        EngineFaultError.
        """
        by_number = self._by_number
        for number, offset, token_ids in tokens.rows():
            entry = by_number.get(number)
            if entry is None or entry.engine != engine:
                continue
            try:
                token_ids = entry.take_tokens(offset, token_ids)
            except EngineFaultError:
                raise
            except Exception as e:
                failed.append(_unwritten(entry, e))
                continue
            if token_ids:
                if entry.began_at is None:
                    self._begin(entry)
                new.append((entry.request_id, token_ids))

    def lose(self, engine: str, request_ids: Iterable[str] | None = None) -> list[JournalEntry]:
        """Remove the engine from all its sequences, or from ``request_ids``. Return them in order of arrival."""
        on_engine = self._by_engine.get(engine, _NOBODY)
        entries = [on_engine[i] for i in (list(on_engine) if request_ids is None else request_ids) if i in on_engine]
        for entry in entries:
            self._unassign(entry)
        return entries

    def doubting(self, engine: str) -> list[JournalEntry]:
        """Return the sequences that lost this engine, as long as the frontend does not know whether the engine died."""
        return [entry for entry in self._entries.values() if engine in entry.doubts]

    def readmit(self, engine: str) -> None:
        """End the exclusions of an engine address for all sequences, because a new incarnation will use the address."""
        for entry in self._entries.values():
            entry.excluded.pop(engine, None)

    def hand_over(self, entry: JournalEntry, source: KvSource | None) -> None:
        """Record a planned handoff, and start the next attempt. ``source``: engine that keeps the KV blocks, or None."""
        self._unassign(entry)
        entry.hand_over(source, self._clock())

    def leave(self, entry: JournalEntry) -> None:
        """Remove the engine from a sequence, and start the sequence's next attempt."""
        self._unassign(entry)
        entry.leave()

    def end(self, request_ids: Iterable[str]) -> list[JournalEntry]:
        """Remove sequences from the journal. Return the sequences that had not ended, with ``engine`` still set."""
        found = [self._entries[request_id] for request_id in request_ids if request_id in self._entries]
        for entry in found:
            self._end(entry)
        return found

    def _unused_number(self) -> int:
        """Return the next number from 1 to 2**32 - 1 that no attempt uses."""
        while True:
            self._last_number = self._last_number % _MAX_NUMBER + 1
            if self._last_number not in self._by_number:
                return self._last_number

    def _begin(self, entry: JournalEntry) -> None:
        """Record that the current attempt of an entry has produced its first new output."""
        now = self._clock()
        entry.begin(now)
        if entry.handed_at is not None:
            self._on_gap(now - entry.handed_at)
            entry.handed_at = None

    def _end(self, entry: JournalEntry) -> None:
        entry.ended = True
        del self._entries[entry.request_id]
        self._unassign(entry)

    def _unassign(self, entry: JournalEntry) -> None:
        self._by_number.pop(entry.number, None)
        entry.number = 0
        on_engine = self._by_engine.get(entry.engine, _NOBODY)
        if on_engine.pop(entry.request_id, None) is None:
            return
        if not on_engine:
            del self._by_engine[entry.engine]
        self._on_left(entry.engine, entry.request_id)


def _unwritten(entry: JournalEntry, error: Exception) -> EngineCoreOutput:
    failed = incident(error, request=entry.request.context.external_request_id, doing="recording the output")
    return EngineCoreOutput(
        request_id=entry.request_id, attempt=entry.attempt, error=RequestError.from_exception(failed)
    )


def _refused(output: EngineCoreOutput) -> RequestFailed | None:
    """Return the error of the engine if another engine should get the request. Otherwise return None."""
    error = output.error
    if error is None:
        if output.finish_reason is FinishReason.ERROR:
            return Internal("the engine failed while it computed this request", reason="ENGINE_ERROR")
        if output.finish_reason is FinishReason.ABORT:  # this frontend did not abort the request
            return Unavailable("the engine is shutting down, and has ended the request", reason="ENGINE_SHUT_DOWN")
        return None
    if error.reason in ("PAUSED", "SLEEPING"):
        return None  # an operator paused the engine
    elsewhere = error.code in ("UNAVAILABLE", "INTERNAL") or error.reason in _ELSEWHERE
    return error.to_exception() if elsewhere else None
