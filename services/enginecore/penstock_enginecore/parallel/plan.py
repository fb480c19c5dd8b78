"""Which module of a model is split over ranks, and how: transformers' own plans, checked.

A plan maps names of modules, in which ``*`` stands for a number, to a word. Every word that is not known is refused by its name:
what it asks for would be missing from the sums, and nobody would notice.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Literal, get_args

import msgspec

from penstock_enginecore.models.errors import ModelLoadError

Split = Literal[
    "colwise",
    "rowwise",
    "colwise_gather_output",
    "rowwise_split_input",
    "embedding_rowwise",
    "packed_colwise",
    "packed_rowwise",
    "moe_tp_experts",
    "all_reduce",
    "first_rank",
]
"""Of layers, colwise: a rank has some of the outputs. rowwise: it has some of the inputs, and the ranks' outputs are summed.
colwise_gather_output: as colwise, and every rank gets all outputs. rowwise_split_input: as rowwise, of inputs that every rank
has whole. embedding_rowwise: it has the vectors of some tokens, and every rank gets all of them. moe_tp_experts, all_reduce: what
the ranks' modules put out is summed.

Of weights that are no layer's own, as those of experts ``[experts, outputs, inputs]``, colwise is a part of the dimension before
the last, rowwise of the last, and packed_ the same of two layers' that lie behind one another. first_rank: zeros but on one rank.
"""
_SPLITS: dict[str, Split] = {each: each for each in get_args(Split)}
SUMMED = ("rowwise", "rowwise_split_input", "moe_tp_experts")
_WHOLE = frozenset({"replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj"})
"""Words for modules that every rank has: only their gradients would differ."""


_OURS: dict[str, dict[str, str]] = {
    "GptOssForCausalLM": {
        "model.embed_tokens": "embedding_rowwise",
        "lm_head": "colwise_gather_output",
        **{f"model.layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"},
        "model.layers.*.self_attn.sinks": "rowwise",
        "model.layers.*.self_attn.o_proj": "rowwise",
        # Inputs come first in its experts, and columns of gate and up take turns.
        "model.layers.*.mlp.experts.gate_up_proj": "rowwise",
        "model.layers.*.mlp.experts.gate_up_proj_bias": "rowwise",
        "model.layers.*.mlp.experts.down_proj": "colwise",
        "model.layers.*.mlp.experts.down_proj_bias": "first_rank",
        "model.layers.*.mlp.experts": "moe_tp_experts",
    },
    "Qwen3VLForCausalLM": {
        "lm_head": "colwise_gather_output",
        **{f"model.layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"},
        "model.layers.*.self_attn.o_proj": "rowwise",
        **{f"model.layers.*.mlp.{name}_proj": "colwise" for name in ("gate", "up")},
        "model.layers.*.mlp.down_proj": "rowwise",
    },
}
"""Plans for classes that have none in transformers."""


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


def splits_of(model: str, plan: Mapping[str, str] | None, names: Iterable[str]) -> dict[str, Split]:
    """How the modules and parameters of these names are split, by ``plan`` or one of ours. Raises ModelLoadError, naming
    ``model``, for one without a plan, for words that are not known, and for a plan that splits nothing.
    """
    plan = _OURS.get(model, plan)
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
        for name in names
        if (split := next((split for pattern, split in patterns if pattern.fullmatch(name)), None))
    }
    if not any(word in found.values() for word in SUMMED):
        raise ModelLoadError(f"executor.tensor_parallel_size: the plan of {model} names no layer that it has; use 1")
    return found
