"""Rules that change the logits of single rows before a token is chosen: pure functions of rows, token ids and numbers.

Order: grammar, allowed tokens, bias, penalties, bans. Bans (bad words, and ends before min_tokens) come before penalties in
effect, too: nothing lifts a logit of minus infinity. They are last because they give way, see ``lift_bans``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from penstock_enginecore.sample.penalties import PenaltyEntries

IntArray = npt.NDArray[np.int64]

NEVER = float("-inf")


@dataclass(frozen=True, slots=True)
class Entries:
    """Single logits: parallel int64 arrays of rows and token ids."""

    rows: IntArray
    token_ids: IntArray

    @classmethod
    def join(cls, by_row: Sequence[tuple[int, IntArray]]) -> "Entries":
        """From token ids by row."""
        lengths = [len(ids) for _, ids in by_row]
        rows = np.repeat(np.array([row for row, _ in by_row], dtype=np.int64), lengths)
        return cls(rows, np.concatenate([ids for _, ids in by_row]))

    def index(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """As an index into ``[rows, vocab]``."""
        return torch.from_numpy(self.rows).to(device), torch.from_numpy(self.token_ids).to(device)


@dataclass(frozen=True, slots=True)
class GrammarRows:
    """``bitmask`` int32 ``[len(rows), words]`` of ``rows``: a bit per token, lowest first, set where the grammar allows it."""

    rows: IntArray
    bitmask: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class LogitRules:
    """The rules of a step, None where no row has one. ``allowed``: all other tokens of these rows are out. ``bias``: what is
    added to which logits, float32. ``banned``: not to be chosen while there is anything else.
    """

    grammar: GrammarRows | None = None
    allowed: Entries | None = None
    bias: tuple[Entries, npt.NDArray[np.float32]] | None = None
    penalties: PenaltyEntries | None = None
    banned: Entries | None = None

    def __bool__(self) -> bool:
        return any(rule is not None for rule in (self.grammar, self.allowed, self.bias, self.penalties, self.banned))

    @property
    def rows(self) -> IntArray:
        """The rows that have a rule, int64, unsorted, some of them several times."""
        biased = None if self.bias is None else self.bias[0]
        rules = (self.grammar, self.allowed, biased, self.penalties, self.banned)
        return np.concatenate([np.zeros(0, dtype=np.int64), *(rule.rows for rule in rules if rule is not None)])


def apply_rules(logits: torch.Tensor, rules: LogitRules, mask: "Masking | None" = None) -> torch.Tensor | None:
    """Change ``logits`` float32 ``[rows, vocab]`` in place. Returns the logits that ``banned`` had before, for ``lift_bans``.
    ``mask`` does what ``mask_grammar`` does.
    """
    if rules.grammar is not None:
        (mask or mask_grammar)(logits, rules.grammar)
    if rules.allowed is not None:
        keep_allowed(logits, rules.allowed)
    if rules.bias is not None:
        entries, bias = rules.bias
        index = entries.index(logits.device)
        logits[index] = logits[index] + torch.from_numpy(bias).to(logits.device)
    if rules.penalties is not None:
        penalize(logits, rules.penalties)
    if rules.banned is None:
        return None
    index = rules.banned.index(logits.device)
    before = logits[index]
    logits[index] = NEVER
    return before


def lift_bans(logits: torch.Tensor, rules: LogitRules, before: torch.Tensor, rows: torch.Tensor) -> None:
    """Take the bans of ``rows`` (bool ``[rows]``) back: rows they have left no token, such as one whose grammar allows nothing
    but the end of the sequence while min_tokens forbids it.
    """
    if rules.banned is None:
        return
    row_index, token_ids = rules.banned.index(logits.device)
    lifted = rows[row_index]
    logits[row_index[lifted], token_ids[lifted]] = before[lifted]


Masking = Callable[[torch.Tensor, GrammarRows], None]


def mask_grammar(logits: torch.Tensor, grammar: GrammarRows) -> None:
    """Leave only the tokens whose bits are set."""
    words = torch.from_numpy(np.ascontiguousarray(grammar.bitmask).view(np.uint8)).to(logits.device)
    # Eight limits per byte from a table and a minimum: a masked fill is branches on a CPU, many times slower.
    limits = _byte_limits(logits.device)[words.int()].flatten(1)[:, : logits.shape[1]]
    rows = torch.from_numpy(grammar.rows).to(logits.device)
    if len(rows) == len(logits) and bool((grammar.rows == np.arange(len(rows))).all()):
        torch.minimum(logits, limits, out=logits)
    else:
        logits[rows] = torch.minimum(logits[rows], limits)


def keep_allowed(logits: torch.Tensor, allowed: Entries) -> None:
    """Leave only these tokens in the rows that are named."""
    index = allowed.index(logits.device)
    kept = logits[index]
    logits[torch.from_numpy(np.unique(allowed.rows)).to(logits.device)] = NEVER
    logits[index] = kept


def penalize(logits: torch.Tensor, penalties: PenaltyEntries) -> None:
    """Divide positive logits by the repetition penalty, multiply others; then take frequency times count off, and presence."""
    entries = Entries(penalties.rows, penalties.token_ids)
    index = entries.index(logits.device)
    repetition, subtracted = (
        torch.from_numpy(values).to(logits.device) for values in (penalties.repetition, penalties.subtracted)
    )
    values = logits[index]
    logits[index] = torch.where(values > 0, values / repetition, values * repetition) - subtracted


def _byte_limits(device: torch.device) -> torch.Tensor:
    """``[256, 8]``: infinity where a bit of the byte is set, lowest first, else minus infinity."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return torch.from_numpy(np.where(bits == 1, np.float32(np.inf), np.float32(-np.inf))).to(device)
