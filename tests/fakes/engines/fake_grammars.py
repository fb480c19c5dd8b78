"""Constraints without a grammar library. The regex ``"even:n"`` allows n even tokens, then EOS; ``"odd:n"`` n odd
tokens. The regex ``"broken"`` cannot be compiled, and ``"refused"`` is refused immediately.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future

import numpy as np

from penstock_common.errors import InvalidArgument, RequestFailed
from penstock_common.types.sampling import StructuredOutput
from penstock_enginecore.structured_output.core.base import Grammar, Mask, bitmask_words


class FakeGrammar:
    """Grammar that allows ``length`` tokens of one parity, and after that only ``eos``.

    ``slow``: masks are available only after a call of ``arrive``. ``prompt``: see ``Grammar``. ``fail`` makes it fail.
    """

    def __init__(self, parity: int, length: int, eos: int, vocab_size: int, changed: Callable[[], None]) -> None:
        self._parity, self._length, self._eos, self._vocab_size = parity, length, eos, vocab_size
        self._changed = changed
        self.taken: list[int] = []
        self.terminated = False
        self.slow = False
        self.prompt = True
        self.late = False
        self.ready = True
        self.closed = False
        self.failure: RequestFailed | None = None
        self.drafts: list[int] = []
        self.draft_masks: list[Mask] = []
        self.drafted = True

    def allows(self, token: int) -> bool:
        if self.terminated:
            return False
        if len(self.taken) == self._length:
            return token == self._eos
        return token % 2 == self._parity and token != self._eos

    def accept(self, token: int) -> bool:
        assert self.ready, "a token was sampled without a mask"
        if not self.allows(token):
            return False
        if len(self.taken) == self._length:
            self.terminated = True
        else:
            self.taken.append(token)
            if self.draft_masks and self.drafts[0] == token:  # the mask of this draft is known
                del self.drafts[0], self.draft_masks[0]
            else:
                self.drafts, self.draft_masks = [], []
                self.ready = not self.slow
        return True

    @property
    def forced(self) -> list[int]:
        return [self._eos] if len(self.taken) == self._length and not self.terminated else []

    def draft(self, token_ids: Sequence[int]) -> None:
        assert self.ready, "drafts behind a token whose mask is not there"
        self.drafts, self.draft_masks = [], []
        taken = self.taken
        for token in token_ids:
            if not self.allows(token) or token == self._eos:
                break
            self.drafts.append(token)
            self.taken = taken + self.drafts
            self.draft_masks.append(self._mask())
        self.taken = taken

    @property
    def mask(self) -> Mask:
        return self._mask()

    def _mask(self) -> Mask:
        row = np.zeros(bitmask_words(self._vocab_size), np.int32)
        for token in range(self._vocab_size):
            if self.allows(token):
                row[token // 32] |= (1 << (token % 32)) - (1 << 32 if token % 32 == 31 else 0)
        return row

    def wanted(self) -> bool:
        return self.prompt or self.missed()

    def missed(self) -> bool:
        self.late = not self.ready and self.failure is None
        return not self.late

    def arrive(self) -> None:
        """Make the mask available."""
        self.ready = True
        if self.late:
            self.late = False
            self._changed()

    def fail(self, error: RequestFailed) -> None:
        self.failure = error
        self._changed()

    def close(self) -> None:
        self.closed = True


class FakeGrammars:
    """Fake GrammarBackend. If ``manual`` is set, constraints are compiled only by ``compile_all``.

    ``started`` has all grammars, which ``make`` creates. ``warm_up`` calls ``warming`` and waits for ``warm``.
    """

    def __init__(self, vocab_size: int = 50, eos: int = 7, *, manual: bool = False) -> None:
        self._vocab_size, self._eos, self._manual = vocab_size, eos, manual
        self.waiting: list[tuple[StructuredOutput, Sequence[int], Callable[[], None], Future[Grammar]]] = []
        self.started: list[FakeGrammar] = []
        self.make: type[FakeGrammar] = FakeGrammar
        self.waits = 0
        self.warm: Future[None] = Future()
        self.warming: Callable[[], object] = lambda: None
        self.is_shut_down = False

    def check(self, constraint: StructuredOutput) -> None:
        if constraint.regex == "refused":
            raise InvalidArgument("refused at once", field="sampling_params.structured_output.regex")

    def start(
        self, constraint: StructuredOutput, prior_token_ids: Sequence[int], changed: Callable[[], None]
    ) -> "Future[Grammar]":
        future: Future[Grammar] = Future()
        self.waiting.append((constraint, prior_token_ids, changed, future))
        if not self._manual:
            self.compile_all()
        return future

    def compile_all(self) -> None:
        waiting, self.waiting = self.waiting, []
        for constraint, prior, changed, future in waiting:
            kind, _, length = (constraint.regex or "").partition(":")
            if kind == "broken":
                future.set_exception(
                    InvalidArgument("cannot be compiled", field="sampling_params.structured_output.regex")
                )
                continue
            grammar = self.make(["even", "odd"].index(kind), int(length or 1000), self._eos, self._vocab_size, changed)
            if all(grammar.accept(token) for token in prior):
                self.started.append(grammar)
                future.set_result(grammar)
            else:
                future.set_exception(InvalidArgument("does not follow", field="prior_output_token_ids"))

    def warm_up(self) -> "Future[None]":
        self.warming()
        return self.warm

    def flush(self) -> None:
        pass

    def wait(self, grammars: Iterable[Grammar]) -> None:
        self.waits += 1

    def shutdown(self) -> None:
        self.is_shut_down = True
