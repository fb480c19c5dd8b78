"""Connection between the scheduler and grammars: constrained requests wait until their grammar has started, get masks,
and end if the grammar fails.
"""

import logging
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

import numpy as np

from penstock_common.errors import InvalidArgument, RequestFailed, Unimplemented
from penstock_common.observability.logging import incident
from penstock_common.types.outputs import RequestError
from penstock_common.types.sampling import StructuredOutput
from penstock_enginecore.core.request import Hold, Request, RequestStatus
from penstock_enginecore.core.scheduler.base import Scheduler
from penstock_enginecore.core.scheduler.output import GrammarBitmask, SchedulerOutput
from penstock_enginecore.structured_output.core.base import Grammar, GrammarBackend, Mask, bitmask_words
from penstock_enginecore.structured_output.core.reasoning import GatedGrammar, ReasoningGate, all_but


class _Change(NamedTuple):
    """Message about a request's grammar. If ``started`` is set, the start of the grammar is complete, and ``gate`` is
    its reasoning gate if there is one. Otherwise the next mask has arrived, or the grammar has failed.
    """

    request: Request
    started: "Future[Grammar] | None" = None
    gate: ReasoningGate | None = None


logger = logging.getLogger(__name__)


class GrammarIntake:
    """Manages the grammars of constrained requests. Only the busy loop's thread may call the methods, except for
    ``check``.

    If a request's grammar fails, only that request ends. For a reasoning model, constraints apply to the output after
    the reasoning, or to the complete output if ``enable_in_reasoning`` is true. A constrained output cannot end inside
    its reasoning.

    Args:
        backend: Grammar backend. If it is None, constraints are refused.
        wake: Function that is called when ``take`` has something to do. The call may come on any thread.
        drafts: Whether the engine uses speculative decoding.
    """

    def __init__(
        self,
        backend: GrammarBackend | None,
        scheduler: Scheduler,
        wake: Callable[[], None],
        *,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        enable_in_reasoning: bool,
        drafts: bool = False,
    ) -> None:
        self._backend = backend
        self._scheduler = scheduler
        self._words = bitmask_words(vocab_size)
        self._wake = wake
        self._in_reasoning = all_but(eos_token_ids, vocab_size)
        self._enable_in_reasoning = enable_in_reasoning
        self._drafts = drafts
        self._changed: queue.SimpleQueue[_Change] = queue.SimpleQueue()
        self._following: dict[str, Request] = {}
        """Requests whose grammar has started, by key, if the engine uses speculative decoding. Requests that have ended
        are removed from time to time.
        """

    def check(self, constraint: StructuredOutput) -> None:
        """Raise InvalidArgument or Unimplemented if a constraint is obviously invalid or unsupported. Thread-safe."""
        self._served().check(constraint)

    def warm_up(self, *, needed: bool) -> None:
        """Prepare the backend, so that the first request with a constraint waits only for its own grammar. ``needed``
        is False if the engine will get no constraints.

        If the preparation fails, the engine logs the error and serves requests without constraints.
        """
        if self._backend is None:
            return
        if not needed:
            self._backend.shutdown()
            self._backend = None
            return
        try:
            self._backend.warm_up().result()
        except Unimplemented as e:
            logger.info(
                "structured outputs are not available; requests with a constraint are refused",
                extra={"reason": e.message},
            )
        except Exception as e:
            logger.error(
                "cannot prepare structured outputs (check the tokenizer and start the grammar processes); each request with a "
                "constraint repeats this preparation, and requests without a constraint are served",
                exc_info=e,
            )

    def start(self, request: Request, constraint: StructuredOutput) -> None:
        """Start the grammar of a request. The scheduler holds the request until the grammar has started."""
        prior = request.all_token_ids[request.num_prompt_tokens :]
        try:
            if (gate := self._gate(request)) is not None:
                prior = gate.passed(prior)
            starting = self._served().start(constraint, prior, partial(self._put, _Change(request)))
        except Exception as e:
            self._fail(request, e, "starting the constraint")
            return
        starting.add_done_callback(lambda future: self._put(_Change(request, future, gate)))

    def take(self) -> None:
        """Resume requests whose grammar has started or whose next mask has arrived. Fail requests whose grammar has
        failed.
        """
        if self._backend is None:
            return
        self._flush()
        while not self._changed.empty():
            change = self._changed.get()
            try:
                self._take(change)
            except Exception as e:
                self._fail(change.request, e, "starting the constraint")

    def await_masks(self) -> None:
        """Wait for the next masks of running requests, because the text that a grammar forces, which can be drafted,
        arrives with the mask. The wait is never longer than a step may be delayed.
        """
        if self._backend is None or not self._following:
            return
        self._flush()
        self._following = {key: request for key, request in self._following.items() if not request.finished}
        running = [r.grammar for r in self._following.values() if r.status is RequestStatus.RUNNING]
        grammars = [grammar for grammar in running if grammar is not None]
        if not all(grammar.ready for grammar in grammars):
            self._backend.wait(grammars)

    def begin_drafts(self, scheduled: SchedulerOutput) -> None:
        """Start to compute the masks after the draft tokens of a step that is about to run. The call never blocks."""
        if self._backend is None or not scheduled.scheduled_spec_decode_tokens:
            return
        for request in self._scheduler.constrained(scheduled):
            drafts = scheduled.scheduled_spec_decode_tokens.get(request.key)
            if drafts and request.grammar is not None and request.grammar.ready:
                request.grammar.draft(drafts)
        self._flush()

    def bitmask(self, scheduled: SchedulerOutput) -> GrammarBitmask | None:
        """Return the masks of allowed tokens for a step whose forward pass is running. Requests whose mask does not
        arrive in time are preempted and held, and get no token in this step.
        """
        requests = self._scheduler.constrained(scheduled) if self._backend is not None else []
        if not requests or self._backend is None:
            return None
        self._flush()
        waited = [request.grammar for request in requests if request.grammar is not None]
        if not all(grammar.ready and grammar.drafted for grammar in waited):
            self._backend.wait(waited)
        drafted = scheduled.scheduled_spec_decode_tokens
        keys: list[str] = []
        offsets: list[int] = []
        rows: list[Mask] = []
        for request in requests:
            try:
                if (mask := self._mask(request)) is None:
                    continue
            except Exception as e:
                self._fail(request, e, "reading the constraint's mask")
                continue
            behind: Sequence[Mask] = ()
            if request.key in drafted and request.grammar is not None and request.grammar.drafted:
                behind = request.grammar.draft_masks
            for offset, row in enumerate((mask, *behind)):
                keys.append(request.key)
                offsets.append(offset)
                rows.append(row)
        if not keys:
            return None
        bitmask = np.empty((len(rows), self._words), dtype=np.int32)
        for place, row in enumerate(rows):
            bitmask[place] = row
        return GrammarBitmask(keys, bitmask, offsets if drafted else [])

    def shutdown(self) -> None:
        """Shut down the backend."""
        if self._backend is not None:
            self._backend.shutdown()

    def _served(self) -> GrammarBackend:
        if self._backend is None:
            raise Unimplemented(
                "sampling_params.structured_output is not supported by this engine",
                field="sampling_params.structured_output",
            )
        return self._backend

    def _flush(self) -> None:
        if self._backend is not None:
            self._backend.flush()

    def _put(self, change: "_Change") -> None:
        self._changed.put(change)
        self._wake()

    def _gate(self, request: Request) -> ReasoningGate | None:
        if self._enable_in_reasoning and request.reasoning_budget is not None:
            field = "sampling_params.thinking_token_budget"
            raise InvalidArgument(
                f"{field} is {request.reasoning_budget.limit} and structured_output is set, but this engine applies constraints "
                "to the reasoning as well (structured_output.enable_in_reasoning); set only one of the two fields",
                field=field,
            )
        if request.reasoning_parser_kwargs is None or self._enable_in_reasoning:
            return None
        prompt = request.all_token_ids[: request.num_prompt_tokens]
        return ReasoningGate(request.reasoning_parser_kwargs, prompt, request.reasoning_ended)

    def _take(self, change: "_Change") -> None:
        request = change.request
        if change.started is not None:
            grammar = change.started.result()
            if request.finished:
                grammar.close()
                return
            request.grammar = GatedGrammar(grammar, change.gate, self._in_reasoning) if change.gate else grammar
            if self._drafts:
                self._following[request.key] = request
        elif request.grammar is not None and request.grammar.failure is not None:
            raise request.grammar.failure
        self._scheduler.release(request, Hold.GRAMMAR)

    def _mask(self, request: Request) -> Mask | None:
        """Return the mask for the request's next token, or None if the mask has not arrived. In the latter case,
        preempt and hold the request.
        """
        grammar = request.grammar
        if grammar is None:
            raise RuntimeError("a request with a constraint is in a step, but its grammar was not started")
        if grammar.failure is not None:
            raise grammar.failure
        if not grammar.ready and not grammar.missed():
            self._scheduler.hold_back(request, Hold.GRAMMAR)
            return None
        return grammar.mask

    def _fail(self, request: Request, error: Exception, doing: str) -> None:
        """End a request with an error. An error that the request did not cause is logged as an incident, with an
        incident number.
        """
        if request.finished:
            return
        failure = (
            error if isinstance(error, RequestFailed) else incident(error, request=request.request_id, doing=doing)
        )
        self._scheduler.fail(request, RequestError.from_exception(failure))
