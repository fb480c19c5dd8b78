"""What was asked of engines and what they have answered, so that a request can outlive its engine. Does no I/O.

Every output names the attempt that produced it and the offset of its first token. The journal writes down each token before
anyone sees it, drops what came before and what earlier attempts still send, and knows from where another engine has to go on.
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
    """An engine broke the contract of its outputs. What it says can no longer be trusted."""


class Call:
    """What the sequences of one call have in common: ``taker``, the engine that the last one handed over was given to."""

    __slots__ = ("taker",)

    def __init__(self) -> None:
        self.taker = ""


class JournalEntry:
    """One sequence from its first engine to its end."""

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
        """The call that it is a sequence of."""
        self.engine = ""
        """Key of the engine it runs on; empty while it has none."""
        self.number = 0
        """Stands for it and its attempt on that engine's session; 0 while it has none."""
        self.attempt = request.attempt
        self.admitted = False
        """Whether it has left an engine that had taken it in: such a one no other engine refuses for want of room."""
        self.token_ids = list(request.prior_output_token_ids)
        """All output so far."""
        self.speculation: SpecDecodingStats | None = None
        """What the engine has said of its drafts, of the current attempt."""
        self.speculation_before: SpecDecodingStats | None = None
        """The same, of all attempts before; of one that was lost, what it had said until then."""
        self.num_prompt_logprobs = 0
        """Positions of the prompt whose log-probabilities are there, of all attempts together."""
        self.num_prompt_scored = 0
        """The same, of the current attempt alone."""
        self.prefilled = False
        """Whether an engine has said how it computed the prompt."""
        self.progressed = False
        """Whether the current attempt has brought anything new."""
        self.began_at: float | None = None
        """When that was for the first time, on the journal's clock."""
        self.num_tokens_then = 0
        """Length of the output at that time."""
        self.ended = False
        self.num_moves = 0
        """Engines that it has left."""
        self.num_handoffs = 0
        """Engines that have handed it over."""
        self.handed_at: float | None = None
        """When the last of them did, on the journal's clock, until the next one brings something."""
        self.handoff_after_tokens = 0
        """Output of the current attempt after which it is handed over; 0: it is not."""
        self.asked_away = False
        """Whether its engine was asked to hand it over."""
        self.kv_source = request.kv_source
        """Who keeps its blocks, until an engine that was told has brought something."""
        self.losses = 0
        """Engines in a row that were lost before they brought anything for it."""
        self.losses_alone = 0
        """Those of them that had nothing else to do."""
        self.doubts: dict[str, bool] = {}
        """Those of ``losses`` of which nobody knows yet whether the engine died, and whether it had nothing else to do."""
        self.last_loss = ""
        """Why it left its last engine."""
        self.failed_steps = 0
        """Engines that found its steps to fail."""
        self.held_for = 0.0
        """Seconds it has waited without an engine since it last brought something."""
        self.excluded: dict[str, float] = {}
        """Engines that it is not sent to, and until when on the event loop's clock."""
        self.variant: str | None = None
        """Variant of the engine that brought the last of its output; None while there is none."""
        self.engine_variant = ""
        """Variant of the engine it is on."""

    @property
    def request_id(self) -> str:
        """The id that engines know it by."""
        return self.request.request_id

    @property
    def has_left(self) -> bool:
        """Whether it has had an engine that it is not on any more."""
        return self.attempt != self.request.attempt

    @property
    def leaves_as_asked(self) -> bool:
        """Whether its engine was to hand it over."""
        return self.asked_away or self.handoff_after_tokens > 0

    @property
    def lora_digest(self) -> bytes:
        """Of its LoRA adapter; empty: it has none."""
        return b"" if self.request.lora is None else self.request.lora.digest

    def to_send(self) -> EngineCoreRequest:
        """The request for the current attempt. The choice of the rank is made: for the engine there is none.

        Tokens that clients have are output to go on from, never prompt. The prompt's log-probabilities are not asked for again
        when all are there: computing them needs the whole prompt, which the engine may have cached.
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
        """Write down an output of the current attempt, and cut off what came before. Returns whether anything is left of it.

        Raises EngineFaultError when tokens are missing.
        """
        repeated = self._num_repeated(output.offset)
        if output.new_prompt_logprobs is not None:
            self._take_prompt_logprobs(output)
        if output.prefill_stats is not None:
            if self.prefilled:
                output.prefill_stats = None  # the prompt counts once, as its first reader found it
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
        """Write down what an output says of the attempt's drafts, and have it say that of all attempts."""
        if output.spec_decoding_stats is not None:
            self.speculation = output.spec_decoding_stats
        output.spec_decoding_stats = _sum(self.speculation_before, self.speculation)

    def take_drafts(self, num_drafts: int, num_accepted: int) -> SpecDecodingStats:
        """A step of the current attempt verified drafts. Returns what is known of all attempts."""
        if self.speculation is None:
            self.speculation = SpecDecodingStats()
        self.speculation.count(num_drafts, num_accepted)
        return _sum(self.speculation_before, self.speculation) or self.speculation

    def take_tokens(self, offset: int, token_ids: list[int]) -> list[int]:
        """Write down an output of the current attempt that is tokens and nothing else. Returns those that are new.

        Raises EngineFaultError when tokens are missing. Hot: once per output.
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
                f"output of request {request_id} goes on at token {offset}, not {len(self.token_ids)}"
            )
        return repeated

    def _take_prompt_logprobs(self, output: EngineCoreOutput) -> None:
        logprobs = output.new_prompt_logprobs
        if logprobs is None:
            return
        if self.token_ids and output.offset < len(self.token_ids):
            output.new_prompt_logprobs = None  # a repeated output: they go before the first token
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
        """The current attempt has brought something for the first time."""
        self.began_at = now
        self.num_tokens_then = len(self.token_ids)

    def seconds_per_token(self, now: float) -> float | None:
        """Of the current attempt since it began; None before it has brought anything more."""
        num_tokens = len(self.token_ids) - self.num_tokens_then
        return None if self.began_at is None or not num_tokens else (now - self.began_at) / num_tokens

    def leave(self) -> None:
        """It has lost its engine; the next one is another attempt."""
        self.num_moves += 1
        self._next_attempt()

    def hand_over(self, source: KvSource | None, now: float) -> None:
        """Its engine has given it away, and ``source`` keeps its blocks. That is no move: it was to be so."""
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
    """Cut the first tokens off an output, with what belongs to them."""
    output.new_token_ids = output.new_token_ids[count:]
    output.offset += count
    if (logprobs := output.new_logprobs) is not None:
        left = min(count, len(logprobs))
        output.new_logprobs = logprobs.slice(left, len(logprobs)) if left < len(logprobs) else None


LORA_UNAVAILABLE = "LORA_UNAVAILABLE"
"""The reason for which an engine refuses a request whose adapter it cannot read: another one may."""

_ELSEWHERE = ("QUEUE_FULL", LORA_UNAVAILABLE, "MEDIA_NOT_CACHED", "MEDIA_CACHE_FULL", "SHARED_MEMORY_UNREADABLE")
"""More reasons that are an engine's own. Those of media have been tried again there before they come here."""

_MAX_NUMBER = 2**32 - 1

_NOBODY: dict[str, "JournalEntry"] = {}


class Refusal(NamedTuple):
    """An engine does not go on with a request for a reason that another engine need not have. ``admitted``: it had taken it."""

    entry: JournalEntry
    error: RequestFailed
    admitted: bool


class Handoff(NamedTuple):
    """An engine has given a sequence away, as it was to. ``source``: who keeps its blocks; None: nobody does."""

    entry: JournalEntry
    source: KvSource | None


class Accepted(NamedTuple):
    """Of a frame: outputs without what came before, in order, and before them new tokens; refusals; the fault that makes the
    engine a lost one; what is known of the drafts of requests that the new tokens are of; and what was handed over.
    """

    outputs: list[EngineCoreOutput]
    refusals: list[Refusal]
    fault: EngineFaultError | None = None
    tokens: Sequence[NewTokens] = ()
    drafts: Sequence[Drafts] = ()
    handoffs: Sequence[Handoff] = ()


class Journal:
    """Every sequence that has been sent, or waits to be sent, to an engine and has not ended.

    ``clock``: monotonic seconds. ``on_left``: told the engine and the id of each sequence that an engine has no more, however
    that came about. ``on_gap``: told the seconds from each handoff to what the next engine brings first.
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
        """Write down the sequences of a call. They have no engine yet."""
        call = Call()
        entries = [JournalEntry(request, call) for request in requests]
        self._entries.update((entry.request_id, entry) for entry in entries)
        return entries

    def assign(self, entry: JournalEntry, engine: str, variant: str = "") -> None:
        """The entry runs on this engine, which is of this variant, from now on."""
        entry.engine, entry.engine_variant = engine, variant
        entry.number = self._unused_number()
        self._by_number[entry.number] = entry
        self._by_engine.setdefault(engine, {})[entry.request_id] = entry

    def num_on(self, engine: str) -> int:
        """Sequences that an engine has."""
        return len(self._by_engine.get(engine, _NOBODY))

    def on(self, engine: str) -> list[JournalEntry]:
        """The sequences that an engine has."""
        return list(self._by_engine.get(engine, _NOBODY).values())

    def accept(
        self, engine: str, outputs: Iterable[EngineCoreOutput], tokens: TokenColumns | None = None
    ) -> "Accepted":
        """What is new of an engine's outputs. They are cut in place. What stands before a fault counts: it is written down."""
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
        """As ``accept``, of outputs that are messages. Raises EngineFaultError."""
        on_engine = self._by_engine.get(engine, _NOBODY)
        for output in outputs:
            entry = on_engine.get(output.request_id)
            if entry is None or output.attempt != entry.attempt:
                continue  # ended, elsewhere by now, or of an older attempt
            if output.error is not None and (output.finish_reason is None or output.error.reason == INCIDENT):
                accepted.append(output)  # it could not be read, or not be made: there is nothing to write down
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
        """An entry has ended on its engine. A handoff is for those alone who send it elsewhere: for others its output goes on."""
        if output.finish_reason is not FinishReason.HANDOFF:
            self._end(entry)
            return
        if entry.leaves_as_asked:
            self._unassign(entry)  # whatever its engine still says of it
            handoffs.append(Handoff(entry, output.kv_source))
        else:
            refusals.append(Refusal(entry, Unavailable("the engine gave the request away unasked"), admitted=True))
        output.finish_reason = output.kv_source = None

    def _accept_drafts(self, engine: str, tokens: TokenColumns) -> list[Drafts]:
        """What is known now of the drafts of requests that had some in this step."""
        return [
            (entry.request_id, entry.take_drafts(num_drafts, num_accepted))
            for number, num_drafts, num_accepted in tokens.drafted()
            if (entry := self._by_number.get(number)) is not None and entry.engine == engine
        ]

    def _accept_tokens(
        self, engine: str, tokens: TokenColumns, new: list[NewTokens], failed: list[EngineCoreOutput]
    ) -> None:
        """As ``accept``, of tokens alone: what is new goes to ``new``, what cannot be written down to ``failed``. Raises
        EngineFaultError. A number that means nothing on this engine is of a request that has ended, or is elsewhere by now.
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
        """What an engine had, or those of it, in the order in which they came. It has them no more."""
        on_engine = self._by_engine.get(engine, _NOBODY)
        entries = [on_engine[i] for i in (list(on_engine) if request_ids is None else request_ids) if i in on_engine]
        for entry in entries:
            self._unassign(entry)
        return entries

    def doubting(self, engine: str) -> list[JournalEntry]:
        """The sequences that have lost an engine of which nobody knows yet whether it died."""
        return [entry for entry in self._entries.values() if engine in entry.doubts]

    def readmit(self, engine: str) -> None:
        """No sequence is kept from an engine any more: it is another one now."""
        for entry in self._entries.values():
            entry.excluded.pop(engine, None)

    def hand_over(self, entry: JournalEntry, source: KvSource | None) -> None:
        """The entry was given away, and goes on as another attempt. ``source``: who keeps its blocks; None: nobody does."""
        self._unassign(entry)
        entry.hand_over(source, self._clock())

    def leave(self, entry: JournalEntry) -> None:
        """The entry goes on elsewhere, as another attempt."""
        self._unassign(entry)
        entry.leave()

    def end(self, request_ids: Iterable[str]) -> list[JournalEntry]:
        """Forget sequences. Returns those that had not ended; they still say where they were."""
        found = [self._entries[request_id] for request_id in request_ids if request_id in self._entries]
        for entry in found:
            self._end(entry)
        return found

    def _unused_number(self) -> int:
        """One that has not been given for as long as there are numbers of 32 bits, and never 0."""
        while True:
            self._last_number = self._last_number % _MAX_NUMBER + 1
            if self._last_number not in self._by_number:
                return self._last_number

    def _begin(self, entry: JournalEntry) -> None:
        """The entry's attempt has brought something for the first time."""
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
    failed = incident(error, request=entry.request.context.external_request_id, doing="writing the output down")
    return EngineCoreOutput(
        request_id=entry.request_id, attempt=entry.attempt, error=RequestError.from_exception(failed)
    )


def _refused(output: EngineCoreOutput) -> RequestFailed | None:
    """Why another engine should have the request, when its end on this one is the engine's fault or choice."""
    error = output.error
    if error is None:
        if output.finish_reason is FinishReason.ERROR:
            return Internal("the engine failed on this request", reason="ENGINE_ERROR")
        if output.finish_reason is FinishReason.ABORT:  # nobody here asked for it
            return Unavailable("the engine ended the request because it is shutting down", reason="ENGINE_SHUT_DOWN")
        return None
    if error.reason in ("PAUSED", "SLEEPING"):
        return None  # an operator wanted it
    elsewhere = error.code in ("UNAVAILABLE", "INTERNAL") or error.reason in _ELSEWHERE
    return error.to_exception() if elsewhere else None
