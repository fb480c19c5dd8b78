"""The engine's side of the mask process (``following_process``), which computes masks of allowed tokens: the grammar
state, masks and failures of each request.
"""

import itertools
import logging
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future

import msgspec
import numpy as np

from penstock_common.errors import Internal, InvalidArgument, RequestFailed, ResourceExhausted, Unavailable
from penstock_common.observability.logging import incident
from penstock_enginecore.config import StructuredOutputConfig
from penstock_enginecore.structured_output.compiling_client import TOO_COSTLY, over_budget
from penstock_enginecore.structured_output.constraints.source import FIELD
from penstock_enginecore.structured_output.core.base import Grammar, Mask, allows, bitmask_words
from penstock_enginecore.structured_output.grammar_processes import (
    MAX_PACKET,
    Advance,
    Begin,
    Children,
    Draft,
    Forked,
    Masks,
    Ready,
    Result,
    Settings,
    ToEngine,
    encode,
    memory_file,
)

NO_MASK = np.zeros(0, np.int32)


class CompiledConstraint:
    """A compiled, serialized grammar, and the name of the request field with its constraint, which errors quote."""

    def __init__(self, number: int, field: str, text: bytes) -> None:
        self.number = number
        self.field = field
        self.text = text


class FollowedGrammar:
    """A ``Grammar`` whose masks the mask process computes. ``number`` identifies the request's grammar in the mask
    process. ``compiled`` is the compiled constraint.

    A mask has the bits of all tokens, so the busy loop can check a token without waiting for the mask process.
    """

    def __init__(
        self,
        follower: "GrammarFollower",
        number: int,
        compiled: CompiledConstraint,
        tokens: Sequence[int],
        changed: Callable[[], None],
    ) -> None:
        self._follower = follower
        self.number = number
        self.compiled = compiled
        self.tokens = list(tokens)
        self.changed = changed
        self.begun: Future[Grammar] = Future()
        self.mask: Mask = NO_MASK
        self.ready = False
        self.failure: RequestFailed | None = None
        self.terminated = False
        self.late = False
        self.cost = 0.0
        self.forced: Sequence[int] = ()
        self.drafts: list[int] = []
        self.draft_masks: list[Mask] = []
        self.drafted = True
        self.turn = 0
        self.num_processes_ended = 0

    def accept(self, token_id: int) -> bool:
        """Accept an output token. After an end-of-sequence token, no further mask is needed."""
        if self.terminated or not self.ready or not allows(self.mask, token_id):
            return False
        if token_id in self._follower.eos_token_ids:
            self.terminated, self.mask = True, np.zeros_like(self.mask)
        else:
            self._follower.advance(self, token_id)
        return True

    def draft(self, token_ids: Sequence[int]) -> None:
        self._follower.draft(self, token_ids)

    @property
    def prompt(self) -> bool:
        """Whether a step may wait for the request's mask, because the mask of the last token took little CPU time."""
        return self.cost <= self._follower.patience

    def wanted(self) -> bool:
        """Return whether a step may include the request now."""
        return self.prompt or self.missed()

    def missed(self) -> bool:
        """Return whether the request's mask has arrived meanwhile. If the result is False, ``changed`` is called when
        the mask arrives.
        """
        return self._follower.missed(self)

    def close(self) -> None:
        """Tell the mask process to drop the request's grammar."""
        self._follower.forget(self)


def follow_failure(config: StructuredOutputConfig, grammar: FollowedGrammar, result: Result) -> RequestFailed:
    """Return the error with which a request ends if the mask process sent a failure instead of a mask."""
    if result.kind == "costly":
        return over_budget_failure(config, grammar)
    if result.kind == "memory":
        return ResourceExhausted(
            f"{grammar.compiled.field} needs too much memory while tokens are generated; all constraints together may use "
            f"{config.follow_memory} bytes (structured_output.follow_memory)",
            field=grammar.compiled.field,
            reason=TOO_COSTLY,
        )
    if result.kind == "refused" and not grammar.begun.done():
        return InvalidArgument(
            "prior_output_token_ids has tokens that the constraint in structured_output does not allow",
            field="prior_output_token_ids",
        )
    what = result.text or "the grammar did not accept a token that its mask allows"
    return incident(RuntimeError(what), request=str(grammar.number), doing="advancing the grammar of the constraint")


def over_budget_failure(config: StructuredOutputConfig, grammar: FollowedGrammar) -> ResourceExhausted:
    """Return the error for a grammar that took too much CPU time for one token."""
    message = over_budget(grammar.compiled.field, config.token_budget)
    return ResourceExhausted(message, field=grammar.compiled.field, reason=TOO_COSTLY)


def fatal_failure(grammar: FollowedGrammar) -> Internal:
    """Return the error for a constraint on which the mask process was working when it ended, more than once."""
    error = RuntimeError("the process that computes grammar masks ended while it worked on this constraint")
    return incident(error, request=str(grammar.number), doing="advancing the grammar of the constraint")


def process_gone(*, closed: bool) -> RequestFailed:
    """Return the error for requests that have no mask process. ``closed`` means that the engine is stopping."""
    if closed:
        return Unavailable("the engine is stopping", field=FIELD)
    return Internal("the process that computes grammar masks ended", field=FIELD)


_PATIENCE = 0.25
"""Fraction of the CPU time budget of a token. The resulting time is the maximum time that a step waits for masks. If
the last token of a grammar took longer, steps do not wait for its next mask.
"""

_MAX_TOKENS, _MAX_DRAFTS = 2000, 200
"""Maximum number of tokens in one message, and maximum number of requests with draft tokens in one message."""

_PACKET = MAX_PACKET + 4 * 1024 * 1024

_MAX_PROCESSES_ENDED = 2
"""Number of mask processes that must end while they work on a grammar until the engine fails its request. The first
process may have ended for another reason, such as load on the machine.
"""

_JOIN_TIMEOUT = 10.0

logger = logging.getLogger(__name__)


class GrammarFollower:
    """Computes the masks of all grammars in one mask process. The method ``start`` starts this process.

    If the grammar of a request takes too much CPU time or memory for a token, or makes the process end, only that
    request fails. The grammars of the other requests are sent to a new process, with all tokens that they have
    accepted. Only one thread may call ``start``, and this thread must outlive the process. Only the busy loop's thread
    may call ``advance``, ``draft``, ``flush`` and ``wait``. Other methods are thread-safe.
    """

    def __init__(
        self,
        config: StructuredOutputConfig,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        children: Children,
        *,
        forced: bool = False,
    ) -> None:
        """Create the object without starting the mask process. ``forced`` enables the search for output text that a
        grammar requires next.
        """
        self._config = config
        self._forced = forced
        self._children = children
        self._words = bitmask_words(vocab_size)
        self.eos_token_ids = eos_token_ids
        self.patience = config.token_budget * _PATIENCE
        """Time in seconds. If the last token of a grammar took more CPU time than this, steps do not wait for its next
        mask.
        """
        self._changed = threading.Condition()
        self._living: dict[int, FollowedGrammar] = {}
        self._numbers = itertools.count(1)
        self._grammars = itertools.count(1)
        self._generation = 0
        self._unsent: deque[tuple[Begin | Advance | Draft, list[int]]] = deque()
        self._drafts: list[tuple[int, int, int, list[int]]] = []
        self._told: set[int] = set()
        self._tokens: list[tuple[int, int]] = []
        self._ended: list[int] = []
        self._process: Forked | None = None
        self._channel: socket.socket | None = None
        self._closed = False

    # Thread-safe methods.

    def compiled(self, field: str, text: bytes) -> CompiledConstraint:
        """Give a compiled, serialized grammar a number, for use with ``begin``."""
        return CompiledConstraint(next(self._grammars), field, text)

    def begin(
        self, compiled: CompiledConstraint, tokens: Sequence[int], changed: Callable[[], None]
    ) -> "Future[Grammar]":
        """Start a grammar for a request whose output so far is ``tokens``. The mask process must have been started.

        The future completes when the first mask is available. On an error, the future fails with a RequestFailed.
        """
        with self._changed:
            grammar = FollowedGrammar(self, next(self._numbers), compiled, tokens, changed)
            if self._channel is None:
                grammar.begun.set_exception(process_gone(closed=self._closed))
                return grammar.begun
            self._living[grammar.number] = grammar
            if self._generation:
                self._tell_begin(grammar)
                self._send()
        return grammar.begun

    @property
    def running(self) -> bool:
        """Whether a mask process is available for ``begin``."""
        return self._channel is not None

    @property
    def pid(self) -> int | None:
        """Process ID of the mask process that was started last, or None."""
        return self._process.pid if self._process is not None else None

    def missed(self, grammar: FollowedGrammar) -> bool:
        """Record that a step continued without the mask of a grammar. Return True if the mask has arrived meanwhile.
        Otherwise return False and call ``changed`` when the mask arrives.
        """
        with self._changed:
            grammar.late = not grammar.ready and grammar.failure is None
            return not grammar.late

    def forget(self, grammar: FollowedGrammar) -> None:
        """Stop computing masks for a grammar."""
        with self._changed:
            if self._living.pop(grammar.number, None) is not None:
                self._ended.append(grammar.number)

    def close(self) -> None:
        """Kill the mask process. Requests that wait for a mask fail with Unavailable. Idempotent."""
        with self._changed:
            self._closed = True
            process = self._process
        if process is not None:
            process.kill()
            process.wait(_JOIN_TIMEOUT)

    # Methods for the busy loop's thread.

    def advance(self, grammar: FollowedGrammar, token_id: int) -> None:
        """Advance a grammar by a token that its mask allows."""
        with self._changed:
            grammar.ready, grammar.mask, grammar.forced, grammar.drafted = False, NO_MASK, (), True
            grammar.tokens.append(token_id)
            self._tokens.append((grammar.number, token_id))
            if grammar.draft_masks and grammar.drafts[0] == token_id:
                grammar.ready, grammar.mask = True, grammar.draft_masks.pop(0)
                del grammar.drafts[0]
            else:
                grammar.drafts, grammar.draft_masks = [], []

    def draft(self, grammar: FollowedGrammar, token_ids: Sequence[int]) -> None:
        """Start to compute the masks after draft tokens."""
        with self._changed:
            grammar.drafts, grammar.draft_masks = list(token_ids), []
            grammar.turn += 1
            grammar.drafted = not (self._generation and grammar.prompt and grammar.ready)
            if not grammar.drafted:
                self._drafts.append((grammar.number, len(grammar.tokens), grammar.turn, grammar.drafts.copy()))

    def flush(self) -> None:
        """Send all queued messages to the mask process. The call never blocks."""
        if self._tokens or self._ended or self._drafts or self._unsent:
            with self._changed:
                self._send()

    def wait(self, grammars: Iterable[Grammar]) -> None:
        """Wait until those of these grammars whose ``prompt`` is true have their masks, but at most ``patience``
        seconds.
        """
        with self._changed:
            waited = [g for g in grammars if g.prompt]
            self._changed.wait_for(
                lambda: all((g.ready and g.drafted) or g.failure is not None for g in waited), self.patience
            )

    # Start of the mask process, and messages to and from it.

    def start(self, tokenizer: bytes) -> None:
        """Start the mask process if it is not running."""
        if self.running:
            return
        settings = Settings(
            token_budget=self._config.token_budget,
            begin_budget=self._config.compile_timeout,
            patience=self.patience,
            memory=self._config.follow_memory,
            kept=self._config.cache_size,
            forced=self._forced,
        )
        process, ours = self._children.follower(tokenizer, settings)
        with self._changed:
            self._process, self._channel = process, ours
            if self._closed:
                process.kill()
        threading.Thread(target=self._receive, args=(ours, process), name="penstock-masks", daemon=True).start()

    def wait_started(self, timeout: float) -> None:
        """Wait until the mask process is ready, but at most ``timeout`` seconds. Raises Internal if the process is not
        ready by then.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._generation or self._channel is None, timeout)
            if not self._generation:
                raise Internal("the process that computes grammar masks did not start", field=FIELD)

    def _receive(self, channel: socket.socket, process: Forked) -> None:
        """Handle messages from the mask process until the process has ended. Runs on a separate thread."""
        try:
            self._take_in(channel)
        except ConnectionResetError:
            logger.warning(
                "lost the connection to the process that computes grammar masks, so the engine kills this process"
            )
        except Exception:
            logger.exception("stopping the process that computes grammar masks after an unexpected error")
        finally:
            process.kill()
            process.wait()
            self._lost(channel)

    def _take_in(self, channel: socket.socket) -> None:
        decoder = msgspec.msgpack.Decoder(ToEngine)
        while data := channel.recv(_PACKET):
            message = decoder.decode(data)
            told: list[Callable[[], None]] = []
            with self._changed:
                if isinstance(message, Ready):
                    told = self._take_over(message)
                elif message.generation == self._generation:
                    told = self._take(message)
                self._send()
                self._changed.notify_all()
            for tell in told:
                tell()

    def _take_over(self, ready: Ready) -> list[Callable[[], None]]:
        """Send the grammars of all requests that have not ended to a new mask process. If several processes ended while
        they worked on the same grammar, fail that grammar.
        """
        self._forget_process()
        self._generation = ready.generation
        told = []
        for number in ready.suspects:
            if (grammar := self._living.get(number)) is None:
                continue
            grammar.num_processes_ended += 1
            if grammar.num_processes_ended >= _MAX_PROCESSES_ENDED:
                told.append(
                    self._fail(
                        grammar, over_budget_failure(self._config, grammar) if ready.costly else fatal_failure(grammar)
                    )
                )
        if ready.suspects:
            logger.warning(
                "the process that computes grammar masks ended unexpectedly and was replaced",
                extra={"exceeded_cpu_time_limit": ready.costly},
            )
        for grammar in list(self._living.values()):
            if grammar.failure is None and not grammar.terminated:
                self._tell_begin(grammar)
        return told

    def _take(self, masks: Masks) -> list[Callable[[], None]]:
        rows = np.frombuffer(masks.rows, np.int32).reshape(-1, self._words)
        row, told = 0, []
        for result in masks.results:
            mask = NO_MASK
            if result.kind == "mask":
                mask, row = rows[row], row + 1
            behind, row = rows[row : row + result.count], row + result.count
            grammar = self._living.get(result.number)
            if grammar is None or grammar.terminated or grammar.failure is not None:
                continue
            if result.kind == "drafted":
                if result.turn == grammar.turn and result.taken == len(grammar.tokens):
                    grammar.draft_masks, grammar.drafted = list(behind), True
                continue
            if result.kind == "unknown":
                self._told.discard(grammar.compiled.number)
                self._tell_begin(grammar)
                continue
            if result.kind == "mask" and result.taken != len(grammar.tokens):
                continue  # Ignore the mask, because the engine has accepted another token meanwhile.
            if result.kind != "mask":
                told.append(self._fail(grammar, follow_failure(self._config, grammar, result)))
                continue
            grammar.mask, grammar.cost, grammar.ready = mask, result.cost, True
            grammar.forced = result.forced
            if not grammar.begun.done():
                told.append(lambda grammar=grammar: grammar.begun.set_result(grammar))  # type: ignore[misc]
            elif grammar.late:
                grammar.late = False
                told.append(grammar.changed)
        return told

    def _tell_begin(self, grammar: FollowedGrammar) -> None:
        compiled = grammar.compiled
        files = [memory_file("tokens", np.array(grammar.tokens, np.int32).tobytes())]
        if compiled.number not in self._told:
            self._told.add(compiled.number)
            files.append(memory_file("grammar", compiled.text))
        self._unsent.append((Begin(self._generation, grammar.number, compiled.number), files))

    def _send(self) -> None:
        """Send queued messages until the socket's buffer is full. Later calls send the remaining messages. The caller
        must hold the lock.
        """
        if self._channel is None or not self._generation:
            return
        while self._tokens or self._ended:
            tokens, self._tokens = self._tokens[:_MAX_TOKENS], self._tokens[_MAX_TOKENS:]
            ended, self._ended = self._ended[:_MAX_TOKENS], self._ended[_MAX_TOKENS:]
            self._unsent.append((Advance(self._generation, tokens, ended), []))
        if self._drafts:
            drafts, self._drafts = self._drafts, []
            for first in range(0, len(drafts), _MAX_DRAFTS):
                self._unsent.append((Draft(self._generation, drafts[first : first + _MAX_DRAFTS]), []))
        while self._unsent:
            message, files = self._unsent[0]
            try:
                socket.send_fds(self._channel, [encode(message)], files, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:  # The mask process has ended. The receiving thread handles the end.
                return
            self._unsent.popleft()
            for file in files:
                os.close(file)

    def _forget_process(self) -> None:
        """Drop the queued messages for a mask process that has ended. The caller must hold the lock."""
        self._generation = 0
        for _, files in self._unsent:
            for file in files:
                os.close(file)
        self._unsent.clear()
        self._told.clear()
        self._tokens, self._ended, self._drafts = [], [], []
        for grammar in self._living.values():
            grammar.drafted = True

    def _lost(self, channel: socket.socket) -> None:
        """Fail all grammars, because the mask process has ended and no new process has replaced it."""
        with self._changed:
            channel.close()
            self._channel = None
            self._forget_process()
            told = [self._fail(grammar, process_gone(closed=self._closed)) for grammar in list(self._living.values())]
            self._changed.notify_all()
        for tell in told:
            tell()

    # Failures of grammars.

    def _fail(self, grammar: FollowedGrammar, error: RequestFailed) -> Callable[[], None]:
        """Record the error with which the grammar's request ends. Return a function that notifies the creator of the
        grammar.
        """
        grammar.failure, grammar.ready = error, False
        if grammar.begun.done():
            return grammar.changed
        self._living.pop(grammar.number, None)
        return lambda: grammar.begun.set_exception(error)
