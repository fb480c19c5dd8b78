"""Code of the mask process, which advances the grammars of running requests and computes their masks of allowed tokens.
The engine's process does not run this module.

The process is forked from an idle parent, so that a replacement is available without delay. The process divides its
work into three lanes, and each lane has one thread. The lane ``FAST``, on the main thread, handles requests whose last
token took little CPU time. The lane ``SLOW`` has a lower priority and handles requests whose last token took much CPU
time. The lane ``BEGIN`` handles the initial tokens of new requests. A fourth thread watches the CPU time of the lanes.
If a token exceeds its budget by far, the fourth thread ends the process, because xgrammar cannot be interrupted.
xgrammar releases the GIL while it works.
"""

import contextlib
import itertools
import mmap
import os
import queue
import socket
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from functools import partial

import msgspec
import numpy as np
import numpy.typing as npt
import xgrammar

from penstock_enginecore.structured_output.core.base import BITS, Mask, bitmask_words
from penstock_enginecore.structured_output.grammar_processes import (
    MAX_PACKET,
    NICENESS,
    Advance,
    Begin,
    Draft,
    Masks,
    Ready,
    Result,
    Settings,
    ToEngine,
    ToFollower,
    detach,
    encode,
    limit_memory,
    out_of_memory,
    read_file,
)
from penstock_enginecore.structured_output.matcher import XgrammarGrammar, accept_cost, fill_cost

FAST, SLOW, BEGIN = LANES = range(3)
OVER = 3


class Marks:
    """Shared memory with the number of the grammar on which each lane works, and whether a token took too much CPU
    time. The parent process can read the memory after the mask process has ended.
    """

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)

    def __getitem__(self, place: int) -> int:
        return int(struct.unpack_from("=q", self._memory, 8 * place)[0])

    def __setitem__(self, place: int, value: int) -> None:
        struct.pack_into("=q", self._memory, 8 * place, value)

    def suspects(self) -> list[int]:
        """Return the numbers of the grammars on which lanes are working."""
        return [number for lane in LANES if (number := self[lane])]

    def clear(self) -> None:
        """Record that all lanes are idle and no token took too much CPU time."""
        for place in (*LANES, OVER):
            self[place] = 0


_MOST_FORCED = 32
"""Maximum number of tokens of required text in one result."""


class Cutter:
    """Tokenizes text that a grammar requires next. At each place, it takes the longest token that fits. The model may
    tokenize the text differently, so the result is a guess.

    If a longer token in the vocabulary begins with the text of the last token, the last token is dropped. The longer
    token may fit the text that follows.
    """

    def __init__(self, tokens: Iterable[bytes]) -> None:
        """Index the vocabulary. ``tokens`` has the text of each token as bytes, in the order of token IDs. The text of
        special tokens is empty.
        """
        self._ids: dict[bytes, int] = {}
        for token_id, text in enumerate(tokens):
            if text:
                self._ids.setdefault(text, token_id)
        self._longest = max(map(len, self._ids), default=0)
        self._beginnings = {text[:end] for text in self._ids for end in range(1, len(text))}

    def cut(self, text: bytes) -> list[int]:
        """Return the IDs of at most ``_MOST_FORCED`` tokens that together are the beginning of ``text``."""
        found: list[int] = []
        place, piece = 0, b""
        while place < len(text) and len(found) < _MOST_FORCED:
            for length in range(min(self._longest, len(text) - place), 0, -1):
                piece = text[place : place + length]
                if (token_id := self._ids.get(piece)) is not None:
                    break
            else:
                return found
            found.append(token_id)
            place += length
        if found and place == len(text) and piece in self._beginnings:
            found.pop()
        return found


def only_one(mask: Mask) -> int | None:
    """Return the allowed token if ``mask`` allows exactly one token, otherwise None."""
    words = np.flatnonzero(mask)
    if len(words) != 1:
        return None
    word = int(mask[words[0]]) & 0xFFFFFFFF
    return None if word & (word - 1) else int(words[0]) * BITS + word.bit_length() - 1


_GRACE = 5
"""Multiple of the CPU time budget of a token. If a token takes more CPU time than this multiple, the process ends. If a
token takes more than the budget but less than the multiple, only its request ends.
"""
_MAX_DESCRIPTORS = 2
_MAX_UNEXPLAINED = 3
"""Number of times that a mask process may end while no lane works on a grammar and still be replaced."""


def main(channel: socket.socket, info: xgrammar.TokenizerInfo, settings: Settings) -> None:
    """Fork a mask process that serves ``channel``, until the other end of ``channel`` is closed. If the process ends,
    fork a new process.
    """
    detach(0)
    marks = Marks()
    cutter = Cutter(info.decoded_vocab) if settings.forced else None
    suspects, costly, unexplained = list[int](), False, 0
    for generation in itertools.count(1):
        child = os.fork()
        if not child:
            detach(0)
            limit_memory(settings.memory)
            Follower(channel, info, settings, generation, marks, cutter).run(Ready(generation, suspects, costly))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        suspects, costly = marks.suspects(), bool(marks[OVER])
        unexplained += not suspects
        # The engine has closed the channel, or mask processes keep failing for unknown reasons.
        if status == 0 or unexplained > _MAX_UNEXPLAINED:
            return
        marks.clear()


class _Matcher:
    """State of one request's grammar, and the CPU time in seconds that the grammar took for its last token."""

    def __init__(self, grammar: XgrammarGrammar) -> None:
        self.grammar = grammar
        self.cost = 0.0
        self.taken = 0


class Follower:
    """The work of one mask process. The main thread receives messages and also handles tokens that take little CPU
    time, because passing such tokens to another thread would take longer.
    """

    def __init__(
        self,
        channel: socket.socket,
        info: xgrammar.TokenizerInfo,
        settings: Settings,
        generation: int,
        marks: Marks,
        cutter: Cutter | None = None,
    ) -> None:
        """Prepare the lanes. ``cutter`` tokenizes text that a grammar requires next. ``cutter`` is None if the search
        for such text is disabled.
        """
        self._channel = channel
        self._info = info
        self._settings = settings
        self._generation = generation
        self._marks = marks
        self._words = bitmask_words(info.vocab_size)
        self._cutter = cutter
        self._ends = frozenset(info.stop_token_ids)
        self._lock = threading.Lock()
        self._matchers: dict[int, _Matcher] = {}
        self._ended: set[int] = set()
        self._compiled: OrderedDict[int, xgrammar.CompiledGrammar] = OrderedDict()
        self._slow: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self._beginnings: queue.SimpleQueue[tuple[int, int] | tuple[Begin, list[int]]] = queue.SimpleQueue()
        self._clocks = [0 for _ in LANES]
        self._limits = [0.0 for _ in LANES]
        self._busy = threading.Event()

    def run(self, ready: Ready) -> None:
        """Start the threads of the lanes, and handle messages until the engine closes its end of the channel."""
        self._clocks[FAST] = time.pthread_getcpuclockid(threading.get_ident())
        for lane, work in ((SLOW, self._work_slow), (BEGIN, self._work_beginnings)):
            thread = threading.Thread(target=work, daemon=True)
            thread.start()
            self._clocks[lane] = time.pthread_getcpuclockid(thread.ident or 0)
        threading.Thread(target=self._watch, daemon=True).start()
        self._send(ready)
        decoder = msgspec.msgpack.Decoder(ToFollower)
        while True:
            data, descriptors, _, _ = socket.recv_fds(self._channel, MAX_PACKET, _MAX_DESCRIPTORS)
            if not data:
                return
            message = decoder.decode(data)
            if message.generation != self._generation:
                for descriptor in descriptors:
                    os.close(descriptor)
            elif isinstance(message, Begin):
                self._beginnings.put((message, descriptors))
            elif isinstance(message, Draft):
                self._draft(message)
            else:
                self._advance(message)

    def _advance(self, message: Advance) -> None:
        """Drop the grammars of ended requests, pass tokens to the lanes ``SLOW`` and ``BEGIN``, and process the tokens
        of the lane ``FAST``.
        """
        with self._lock:
            for number in message.ended:
                if self._matchers.pop(number, None) is None:
                    self._ended.add(number)  # The lane BEGIN has not started the grammar yet.
        patience, fast = self._settings.patience, []
        for number, token in message.tokens:
            matcher = self._matchers.get(number)
            if matcher is None:
                # The lane BEGIN handles the token after the initial tokens of the grammar.
                self._beginnings.put((number, token))
            elif matcher.cost > patience:
                self._slow.put((number, token))
            else:
                fast.append((number, token))
        self._follow_fast(fast)

    # Work of the lanes.

    def _follow_fast(self, tokens: Iterable[tuple[int, int]]) -> None:
        results, rows = [], []
        together: dict[int, list[int]] = {}
        for number, token in tokens:
            together.setdefault(number, []).append(token)
        for number, of_number in together.items():
            matcher = self._matchers.get(number)
            if matcher is None:
                continue
            result, row = self._follow(FAST, number, matcher, of_number)
            results.append(result)
            rows.append(row)
            if len(rows) * self._words * 4 > MAX_PACKET // 2 or len(results) > 500:
                self._tell(results, rows)
                results, rows = [], []
        self._tell(results, rows)

    def _draft(self, message: Draft) -> None:
        """Compute the masks after draft tokens. Grammars that have not accepted the expected number of tokens, and
        grammars whose last token took much CPU time, get no masks.
        """
        results, rows = [], []
        for number, taken, turn, drafts in message.drafts:
            matcher = self._matchers.get(number)
            masks = list[bytes]()
            if matcher is not None and matcher.taken == taken and matcher.cost <= self._settings.patience:
                masks = self._behind(number, matcher, drafts)
            results.append(Result(number, "drafted", taken, count=len(masks), turn=turn))
            rows += masks
            if len(rows) * self._words * 4 > MAX_PACKET // 2:
                self._tell(results, rows)
                results, rows = [], []
        self._tell(results, rows)

    def _behind(self, number: int, matcher: _Matcher, drafts: Sequence[int]) -> list[bytes]:
        """Compute masks after draft tokens as long as these are allowed and take little CPU time. Return fewer masks in
        case of a failure, because masks after draft tokens are optional.
        """
        grammar, masks, accepted, spent = matcher.grammar, list[bytes](), 0, 0.0
        patience = self._settings.patience
        self._start_watching(FAST, number, _GRACE * self._settings.token_budget)
        began = time.thread_time()
        try:
            for token in drafts:
                if token in self._ends or not grammar.accept((token,)):
                    break
                accepted += 1
                row = np.zeros(self._words, np.int32)
                grammar.fill(row)
                masks.append(row.tobytes())
                spent = time.thread_time() - began
                if spent > patience or (accepted + 1) * self._words * 4 > MAX_PACKET:
                    break
        finally:
            self._marks[FAST] = 0
            grammar.undo(accepted)
        return masks

    def _work_slow(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while True:
            self._follow_one(SLOW, *self._slow.get())

    def _work_beginnings(self) -> None:
        while True:
            first, second = self._beginnings.get()
            if isinstance(first, Begin) and isinstance(second, list):
                self._begin(first, *second)
            elif isinstance(first, int) and isinstance(second, int):
                self._follow_one(BEGIN, first, second)

    def _follow_one(self, lane: int, number: int, token: int) -> None:
        if (matcher := self._matchers.get(number)) is not None:
            result, row = self._follow(lane, number, matcher, (token,))
            self._tell([result], [row])

    def _begin(self, begin: Begin, tokens: int, text: int | None = None) -> None:
        number = begin.number
        prior = np.frombuffer(read_file(tokens), np.int32).tolist()
        self._start_watching(BEGIN, number, self._settings.begin_budget)
        try:
            compiled = self._load(begin.grammar, None if text is None else read_file(text))
            if compiled is None:
                self._tell([Result(number, "unknown")], [])
                return
            matcher = _Matcher(XgrammarGrammar(compiled, self._info.vocab_size))
        except Exception as e:
            self._tell([_failed(number, e)], [])
            return
        finally:
            self._marks[BEGIN] = 0
        result, row = self._follow(BEGIN, number, matcher, prior)
        with (
            self._lock
        ):  # Add the matcher only after the initial tokens. Tokens that arrived meanwhile are in this lane's queue.
            if number in self._ended:
                self._ended.discard(number)
                return
            self._matchers[number] = matcher
        self._tell([result], [row])

    def _load(self, grammar: int, text: bytes | None) -> xgrammar.CompiledGrammar | None:
        """Return the compiled grammar with the number ``grammar``, or None if the grammar is not cached and ``text`` is
        None. If the cache is full, the grammar that was begun least recently is evicted. Matchers that use an evicted
        grammar keep it in memory.
        """
        compiled = self._compiled.get(grammar)
        if compiled is None:
            if text is None:
                return None
            compiled = xgrammar.CompiledGrammar.deserialize_json(text.decode(), self._info)
            self._compiled[grammar] = compiled
            if len(self._compiled) > self._settings.kept:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return compiled

    def _follow(self, lane: int, number: int, matcher: _Matcher, tokens: Sequence[int]) -> tuple[Result, bytes]:
        """Accept tokens of one grammar. Return the result message, and the next mask if the result is a mask."""
        row, budget = np.zeros(self._words, np.int32), self._settings.token_budget
        begins = partial(self._start_watching, lane, number, _GRACE * budget)
        whole = spent = 0.0
        try:
            for token in tokens:
                seconds = accept_cost(matcher.grammar, token, budget, begins)
                if seconds is None:
                    return Result(number, "refused"), b""
                matcher.taken += 1
                spent = seconds
                whole += seconds
                if spent > budget or whole > self._settings.begin_budget:
                    return Result(number, "costly"), b""
            matcher.cost = spent + fill_cost(matcher.grammar, row, budget - spent, begins)
        except Exception as e:
            return _failed(number, e), b""
        finally:
            self._marks[lane] = 0
        if matcher.cost > budget:
            return Result(number, "costly"), b""
        return Result(number, "mask", matcher.taken, matcher.cost, "", self._forced(matcher, row)), row.tobytes()

    def _forced(self, matcher: _Matcher, row: npt.NDArray[np.int32]) -> list[int]:
        """Return the tokens of text that the grammar requires next. The result is empty if the grammar's last token
        took much CPU time.
        """
        if self._cutter is None or matcher.cost > self._settings.patience:
            return []
        token = only_one(row)
        return self._cutter.cut(matcher.grammar.forced_text()) if token is None else [token]

    def _tell(self, results: list[Result], rows: Iterable[bytes]) -> None:
        if results:
            self._send(Masks(self._generation, results, b"".join(rows)))

    def _send(self, message: ToEngine) -> None:
        # Ignore the error: the engine has closed the channel, and the main thread ends the process.
        with contextlib.suppress(BrokenPipeError):
            self._channel.send(encode(message))

    # Limits of CPU time.

    def _start_watching(self, lane: int, number: int, limit: float) -> None:
        self._limits[lane] = time.thread_time() + limit
        self._marks[lane] = number
        if not self._busy.is_set():
            self._busy.set()

    def _watch(self) -> None:
        """End the process if a lane exceeds its CPU time limit."""
        while self._busy.wait():
            time.sleep(self._settings.token_budget)
            for lane in LANES:
                # Check twice. During the first check, the lane may have begun its next task, and the check may have
                # used the clock of one task and the limit of the other.
                if self._over(lane) and self._over(lane):
                    self._marks[OVER] = 1
                    for other in LANES:
                        if other != lane:
                            self._marks[other] = 0
                    os._exit(1)
            if not self._marks.suspects():
                self._busy.clear()
                if self._marks.suspects():
                    self._busy.set()

    def _over(self, lane: int) -> bool:
        return bool(self._marks[lane]) and time.clock_gettime(self._clocks[lane]) > self._limits[lane]


def _failed(number: int, error: Exception) -> Result:
    if out_of_memory(error):
        return Result(number, "memory")
    return Result(number, "failed", text=f"{type(error).__name__}: {error}")
