"""Which module of a model is split over ranks, and how: transformers' own plans, checked.

A plan maps names of modules, in which ``*`` stands for a number, to a word. Every word that is not known is refused by its name:
what it asks for would be missing from the sums, and nobody would notice.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Literal, get_args

import msgspec

from penstock_enginecore.models.errors import ModelLoadError

Split = Literal["colwise", "rowwise", "colwise_gather_output", "embedding_rowwise"]
"""colwise: a rank has some of the outputs. rowwise: it has some of the inputs, and the ranks' outputs are summed.
colwise_gather_output: as colwise, and every rank gets all outputs. embedding_rowwise: it has the vectors of some tokens, and
every rank gets all of them.
"""
_SPLITS: dict[str, Split] = {each: each for each in get_args(Split)}
_WHOLE = frozenset({"replicate", "replicated_with_grad_allreduce"})
"""Words for modules that every rank has: only their gradients would differ."""


class Heads(msgspec.Struct, frozen=True):
    """Attention heads of a model: of queries, and of keys and values."""

    query: int
    kv: int

    def check(self, size: int) -> None:
        """Raise ModelLoadError, with sizes that can be, unless the heads can be dealt to ``size`` ranks."""
        if self._fits(size):
            return
        fitting = [str(other) for other in range(1, self.query + 1) if self._fits(other)]
        raise ModelLoadError(
            f"executor.tensor_parallel_size is {size}; the model's {self.query} attention heads and {self.kv} key-value heads "
            f"can be dealt to {', '.join(fitting)} workers"
        )

    def _fits(self, size: int) -> bool:
        return self.query % size == 0 and (self.kv % size == 0 or size % self.kv == 0)

    def kv_heads(self, rank: int, size: int) -> range:
        """The key-value heads of a rank. Where there are fewer than ranks, several ranks have the same one."""
        if self.kv >= size:
            return range(rank * self.kv // size, (rank + 1) * self.kv // size)
        first = rank * self.kv // size
        return range(first, first + 1)


def splits_of(model: str, plan: Mapping[str, str] | None, modules: Iterable[str]) -> dict[str, Split]:
    """How the modules of these names are split. Raises ModelLoadError, naming ``model``, for one without a plan, for words that
    are not known, and for a plan that splits nothing.
    """
    if not plan:
        raise ModelLoadError(f"executor.tensor_parallel_size: {model} has no plan for it in transformers; use 1")
    unknown = {word: name for name, word in plan.items() if word not in _SPLITS and word not in _WHOLE}
    if unknown:
        word, name = next(iter(sorted(unknown.items())))
        raise ModelLoadError(
            f"executor.tensor_parallel_size: the plan of {model} has {name!r} as {word!r}, which is not served yet; use 1"
        )
    patterns = [
        (re.compile(re.escape(name).replace(r"\*", r"\d+")), _SPLITS[word])
        for name, word in plan.items()
        if word in _SPLITS
    ]
    found = {
        name: split
        for name in modules
        if (split := next((split for pattern, split in patterns if pattern.fullmatch(name)), None))
    }
    if "rowwise" not in found.values():
        raise ModelLoadError(f"executor.tensor_parallel_size: the plan of {model} names no layer that it has; use 1")
    return found
