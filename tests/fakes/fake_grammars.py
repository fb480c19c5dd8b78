"""Constraints without a grammar library: the regex ``"even:n"`` allows n even tokens, then EOS; ``"odd:n"`` odd ones.
``"broken"`` cannot be compiled, ``"refused"`` is refused at once.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from penstock_common.errors import InvalidArgument
from penstock_common.types.sampling import StructuredOutput


class FakeGrammar:
    """Allows tokens by parity, and after ``length`` of them only ``eos``."""

    def __init__(self, parity: int, length: int, eos: int, vocab_size: int) -> None:
        self._parity, self._length, self._eos, self._vocab_size = parity, length, eos, vocab_size
        self.taken: list[int] = []
        self.terminated = False

    def allows(self, token: int) -> bool:
        if self.terminated:
            return False
        if len(self.taken) == self._length:
            return token == self._eos
        return token % 2 == self._parity and token != self._eos

    def accept(self, token_ids: Sequence[int]) -> bool:
        for token in token_ids:
            if not self.allows(token):
                return False
            if len(self.taken) == self._length:
                self.terminated = True
            else:
                self.taken.append(token)
        return True

    def fill(self, row: Any) -> None:
        row[:] = 0
        for token in range(self._vocab_size):
            if self.allows(token):
                row[token // 32] |= (1 << (token % 32)) - (1 << 32 if token % 32 == 31 else 0)


class FakeGrammars:
    """A GrammarBackend. ``manual``: constraints wait for ``compile_all``."""

    def __init__(self, vocab_size: int = 50, eos: int = 7, *, manual: bool = False) -> None:
        self._vocab_size, self._eos, self._manual = vocab_size, eos, manual
        self.waiting: list[tuple[StructuredOutput, Future]] = []
        self.is_shut_down = False

    def check(self, constraint: StructuredOutput) -> None:
        if constraint.regex == "refused":
            raise InvalidArgument("refused at once", field="sampling_params.structured_output.regex")

    def compile(self, constraint: StructuredOutput) -> Future:
        future: Future = Future()
        self.waiting.append((constraint, future))
        if not self._manual:
            self.compile_all()
        return future

    def compile_all(self) -> None:
        waiting, self.waiting = self.waiting, []
        for constraint, future in waiting:
            kind, _, length = (constraint.regex or "").partition(":")
            if kind == "broken":
                future.set_exception(
                    InvalidArgument("cannot be compiled", field="sampling_params.structured_output.regex")
                )
            else:
                parity, count = ["even", "odd"].index(kind), int(length or 1000)
                future.set_result(lambda p=parity, n=count: FakeGrammar(p, n, self._eos, self._vocab_size))

    def shutdown(self) -> None:
        self.is_shut_down = True
