"""One sequence in the journal: what was asked, what has come of it, from where it goes on. Does no I/O."""

from itertools import zip_longest

import msgspec

from penstock_common.types.kv_transfer import KvSource
from penstock_common.types.outputs import EngineCoreOutput, SpecDecodingStats
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
