"""Tensor parallelism: reduction of a loaded model to the shard of one rank, and the collective operations that combine
the results of the ranks.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import torch
from transformers import PreTrainedModel

from penstock_enginecore.lora.adapter import OwnFeatures
from penstock_enginecore.models.attention_hook import AttentionCall, use_context
from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.models.families import FAMILIES, Family
from penstock_enginecore.models.sparse_activations import has_cutoff, set_statistics
from penstock_enginecore.models.state_hook import find_mixers
from penstock_enginecore.models.support import num_attention_layers
from penstock_enginecore.parallel.collectives import Collectives
from penstock_enginecore.parallel.cuts import Heads, even, keep_outputs, parameter, split_inputs
from penstock_enginecore.parallel.hybrid_plans import HYBRID_PLANS
from penstock_enginecore.parallel.mixers import check_mixers, split_mixer
from penstock_enginecore.parallel.sharding import SplitVocabulary

# Way in which each module is split among ranks, from transformers' own plans. A plan maps module names to words such as
# ``colwise``. In a name, ``*`` matches a number. A plan with an unknown word is refused, and the error names the word.
# If the word were ignored, sums over ranks could be wrong without an error.

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
    "mixer",
]
"""Ways to split a layer or weight.

Layers:

- colwise: a rank computes some of the layer's outputs.
- rowwise: a rank gets and uses some of the layer's inputs, and the outputs of all ranks are summed.
- colwise_gather_output: like colwise, and every rank gets all outputs.
- rowwise_split_input: like rowwise, but every rank gets all inputs and uses only some of them.
- embedding_rowwise: a rank has the embeddings of some tokens, and every rank gets the complete output.
- moe_tp_experts, all_reduce: the ranks' outputs are summed.
- packed_colwise: like colwise, for a layer that consists of two concatenated layers.
- mixer: a recurrent layer, which is split by heads. See ``mixers``.

Weights that belong to no linear layer, such as the weights of experts ``[experts, outputs, inputs]``:

- colwise: a rank has a part of the second-last dimension.
- rowwise: a rank has a part of the last dimension.
- packed_colwise, packed_rowwise: the same splits for weights of two concatenated layers.
- first_rank: the first rank has the weight, and the other ranks have zeros.
"""
_SPLITS: dict[str, Split] = {each: each for each in get_args(Split)}
SUMMED = ("rowwise", "rowwise_split_input", "moe_tp_experts", "mixer")
_LAYER_EMBEDDINGS = "embed_tokens_per_layer"
"""Name of tables with embeddings of token ids for each layer. Plans of transformers leave these large tables whole."""
_WHOLE = frozenset({"replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj"})
"""Words of plans for modules that are not split. These words differ only in training, in the handling of gradients."""


def splits_of(
    model: str, plan: Mapping[str, str] | None, names: Iterable[str], mixers: Collection[str] = ()
) -> dict[str, Split]:
    """Return the kind of split of each module and parameter in ``names`` that is split, from ``plan`` or from the plan
    of the model's class.

    ``mixers`` has the names of recurrent layers. Plans do not apply to the submodules of recurrent layers.

    Raises ModelLoadError, with the name of the model, if there is no plan, if the plan splits no module, or if the plan
    contains an unsupported kind of split.
    """
    plan = HYBRID_PLANS.get(model) or FAMILIES.get(model, Family()).splits or plan
    if not plan:
        raise ModelLoadError(
            f"executor.tensor_parallel_size: {model} has no tensor-parallel plan in transformers; "
            "set executor.tensor_parallel_size to 1"
        )
    unknown = {word: name for name, word in plan.items() if word not in _SPLITS and word not in _WHOLE}
    if unknown:
        word, name = next(iter(sorted(unknown.items())))
        raise ModelLoadError(
            f"executor.tensor_parallel_size: the tensor-parallel plan of {model} splits {name!r} as {word!r}, "
            "which is not supported; "
            "set executor.tensor_parallel_size to 1"
        )
    patterns = [
        (re.compile(re.escape(name).replace(r"\*", r"\d+")), _SPLITS[word])
        for name, word in plan.items()
        if word in _SPLITS
    ]
    inside = tuple(f"{mixer}." for mixer in mixers)
    found = {
        name: split
        for name in names
        if not name.startswith(inside)
        and (split := next((split for pattern, split in patterns if pattern.fullmatch(name)), None))
    }
    found |= dict.fromkeys(mixers, "mixer")
    found |= {name: "embedding_rowwise" for name in names if name.rpartition(".")[2] == _LAYER_EMBEDDINGS}
    if not any(word in found.values() for word in SUMMED):
        raise ModelLoadError(
            f"executor.tensor_parallel_size: the tensor-parallel plan of {model} matches no layer of the model; "
            "set executor.tensor_parallel_size to 1"
        )
    return found


# Output of a model for a few test tokens, which does not depend on the attention implementation that the model uses.

_NUM_TOKENS = 8


class _Causal:
    """``AttentionContext`` that computes causal attention without a KV cache."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Return the output of causal attention ``[tokens, num_heads, head_size_v]``."""
        query, key, value = (each.transpose(0, 1) for each in (call.query, call.key, call.value))
        attended = torch.nn.functional.scaled_dot_product_attention(
            query[None], key[None], value[None], is_causal=True, enable_gqa=True
        )
        return attended[0].transpose(0, 1)


@torch.inference_mode()
def probe_logits(module: PreTrainedModel) -> torch.Tensor:
    """Return float32 logits ``[tokens, vocab]`` for test tokens at positions from 0 on.

    The token ids are spread over the whole vocabulary. If the model has no head, return the hidden states.
    """
    positions = torch.arange(_NUM_TOKENS, device=module.device)
    token_ids = (positions + 1) * 7919 % module.config.vocab_size
    model: Any = module.train(mode=False)
    with use_context(_Causal()):
        output = model(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)
    found = output.logits if "logits" in output else output.last_hidden_state
    return cast("torch.Tensor", found[0].float())


_KEYS_AND_VALUES = ("k_proj", "v_proj")
_OF_HEADS = ("q_proj", "q_b_proj", "k_proj", "v_proj", "kv_b_proj", "qkv_proj", "query_key_value")
_LAYER = re.compile(r"\.layers\.(\d+)\.")
"""Text in the name of a module that has the index of the module's layer."""
_TOLERANCE = 0.05
"""Maximum accepted difference between the logits of the split and the complete model, relative to the logits. Rounding
in half precision can cause differences up to this size.
"""


class SplitEmbedding(torch.nn.Module):
    """Embedding whose rows are split among ranks. ``inner`` is the model's own embedding with only the rows of this
    rank.
    """

    def __init__(self, inner: torch.nn.Embedding, collectives: Collectives) -> None:
        super().__init__()
        self._collectives = collectives
        self._first = collectives.rank * len(inner.weight)
        inner.padding_idx = None  # These attributes are used only in training.
        self.inner = inner

    @property
    def weight(self) -> torch.nn.Parameter:
        """Rows of the embedding table that this rank has."""
        return cast("torch.nn.Parameter", self.inner.weight)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings ``[..., hidden]`` of ``token_ids`` ``[...]``, summed over all ranks."""
        own = token_ids - self._first
        foreign = (own < 0) | (own >= len(self.inner.weight))
        vectors = self.inner(own.masked_fill(foreign, 0))
        return self._collectives.all_reduce(vectors.masked_fill(foreign[..., None], 0.0))


@dataclass(frozen=True, slots=True)
class SplitModel:
    """Description of the shard of a model on one rank.

    Attributes:
        vocabulary: Split of the logits among ranks, or None if the model needs complete logits.
        features: For each linear layer that is split, by name, the features of this rank.
    """

    vocabulary: SplitVocabulary | None
    features: Mapping[str, OwnFeatures]


def split_model(module: PreTrainedModel, collectives: Collectives) -> SplitModel:
    """Reduce the model, in place, to the part of each layer that this rank computes.

    The split model returns complete logits and hidden states, which are bit-identical on all ranks. Raises
    ModelLoadError if the model cannot be split, or if the results of the split model differ from the results of the
    complete model.
    """
    size = collectives.size
    config: Any = module.config
    heads = _heads_of(config) if num_attention_layers(config) else [Heads(size, size)]
    for each in heads:
        each.check(size)
    mixers = find_mixers(module)
    check_mixers(module, size)
    name_of_model = type(module).__name__
    plan: Any = getattr(module, "_tp_plan", None)
    names = [*dict(module.named_modules()), *dict(module.named_parameters())]
    splits = splits_of(name_of_model, plan, names, mixers)
    expected = probe_logits(module)
    splitter = _Splitter(module, collectives, heads)
    splitter.split(splits)
    whole = probe_logits(module)
    differs = (whole - expected).norm() / expected.norm()
    if not differs <= _TOLERANCE:
        what = "logits" if whole.shape[-1] == getattr(config, "vocab_size", None) else "hidden states"
        raise ModelLoadError(
            f"executor.tensor_parallel_size is {size}, but {name_of_model} gives other results when split: its {what} differ by "
            f"{differs:.0%}; set executor.tensor_parallel_size to 1"
        )
    return SplitModel(_usable(module, splitter.vocabulary, whole), splitter.features)


def _heads_of(config: Any) -> list[Heads]:
    """Return the heads of each attention layer, or one element if all layers have the same heads."""
    each = [config]
    if config.is_heterogeneous:
        each = [config.per_layer_config[index] for index in range(config.num_hidden_layers)]
    return [
        Heads(of.num_attention_heads, getattr(of, "num_key_value_heads", None) or of.num_attention_heads) for of in each
    ]


def _usable(module: PreTrainedModel, vocabulary: SplitVocabulary | None, whole: torch.Tensor) -> SplitVocabulary | None:
    """Return ``vocabulary``, or None if the model itself computes with complete logits."""
    if vocabulary is None:
        return None
    with vocabulary.apart():
        parts = probe_logits(module)
    together = vocabulary.is_apart(parts) and torch.equal(vocabulary.whole(parts), whole)
    return vocabulary if together else None


class _Splitter:
    """Splits the layers of one model. A weight that several layers share is split once.

    Attributes:
        vocabulary: Split of the head's logits among ranks, or None if the head is not split.
        features: For each linear layer that is split, by name, the features of this rank.
    """

    def __init__(self, module: PreTrainedModel, collectives: Collectives, heads: Sequence[Heads]) -> None:
        self._module = module
        self._collectives = collectives
        self._heads = heads
        self._own_rows: dict[int, tuple[torch.Tensor, torch.nn.Parameter]] = {}
        # Keep a reference to ``whole``, because an id is unique only among objects that exist.
        self._own_parts: dict[tuple[int, Split], tuple[torch.Tensor, torch.Tensor]] = {}
        uses = Counter(id(each) for _, each in module.named_parameters(remove_duplicate=False))
        self._shared = frozenset(key for key, count in uses.items() if count > 1)
        self.vocabulary: SplitVocabulary | None = None
        self.features: dict[str, OwnFeatures] = {}

    def split(self, splits: Mapping[str, Split]) -> None:
        """Split all modules of the model. Raises ModelLoadError if a kind of split is not supported, or if a size is
        not a multiple of the number of ranks.
        """
        modules = dict(self._module.named_modules())
        parts_of_heads = [name for name, split in splits.items() if split == "colwise" and _attends(name)]
        for name, split in splits.items():
            if name not in modules:
                self._split_weight(name, split)
            elif split == "mixer":
                self.features |= split_mixer(name, modules[name], self._collectives)
            elif split in ("moe_tp_experts", "all_reduce"):
                self._add_up(modules[name])
            elif split == "embedding_rowwise" and isinstance(modules[name], torch.nn.Embedding):
                self._split_embedding(name, modules[name])
            elif type(modules[name]) is torch.nn.Linear:
                self._split_linear(name, modules[name], split)
            else:
                raise self._refusal(name, f"is {type(modules[name]).__name__}, for which splitting is not supported")
        owners = {name.rpartition(".")[0] for name in parts_of_heads}
        for name, module in modules.items():
            if name in owners and hasattr(module, "num_key_value_groups"):
                heads = self._heads_at(name)
                own = len(heads.kv_heads(self._collectives.rank, self._collectives.size))
                module.num_key_value_groups = heads.query // self._collectives.size // own
            if has_cutoff(module) and f"{name}.gate_proj" in splits:
                set_statistics(module, self._statistics)

    def _statistics(self, gates: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return mean and standard deviation of the outputs of all ranks. Each rank has equally many ``gates``."""
        numbers, total = gates.float(), gates.shape[-1] * self._collectives.size
        mean = self._collectives.all_reduce(numbers.sum(dim=-1, keepdim=True)) / total
        variance = self._collectives.all_reduce((numbers - mean).square().sum(dim=-1, keepdim=True)) / total
        return mean.to(gates.dtype), variance.sqrt().to(gates.dtype)

    def _split_linear(self, name: str, layer: torch.nn.Linear, split: Split) -> None:
        whole = layer.weight
        self._cut_linear(name, layer, split)
        if id(whole) in self._shared and split != "colwise_gather_output":
            part = self._own_parts.setdefault((id(whole), split), (whole, layer.weight))[1]
            layer.weight = cast("torch.nn.Parameter", part)

    def _cut_linear(self, name: str, layer: torch.nn.Linear, split: Split) -> None:
        match split:
            case "rowwise" | "rowwise_split_input":
                own = split_inputs(name, layer, self._collectives, whole=split == "rowwise_split_input")
                self.features[name] = OwnFeatures(inputs=own)
            case "colwise_gather_output":
                self.features[name] = OwnFeatures(outputs=(self._split_and_gather(layer),))
            case "colwise" | "packed_colwise":
                own_outputs = self._packed(name, layer) if split == "packed_colwise" else (self._outputs(name, layer),)
                self.features[name] = OwnFeatures(outputs=own_outputs)
                keep_outputs(layer, own_outputs)
            case _:
                raise self._refusal(
                    name, f"is a linear layer with the split {split} in the plan, which is not supported"
                )

    def _split_embedding(self, name: str, embedding: Any) -> None:
        embedding.weight = self._own_words(embedding.weight)
        self._module.set_submodule(name, SplitEmbedding(embedding, self._collectives))

    def _split_weight(self, name: str, split: Split) -> None:
        """Split the parameter ``name``, which belongs to no linear layer."""
        owner_name, _, own_name = name.rpartition(".")
        owner = self._module.get_submodule(owner_name)
        whole, rank = getattr(owner, own_name), self._collectives.rank
        match split:
            case "packed_colwise" | "packed_rowwise":
                dim, pieces = (-2 if split == "packed_colwise" else -1), 2
            case "colwise" | "rowwise":
                dim, pieces = (-2 if split == "colwise" else -1), 1
            case "first_rank":
                setattr(owner, own_name, parameter(whole if rank == 0 else torch.zeros_like(whole)))
                return
            case _:
                raise self._refusal(name, f"is a weight with the split {split} in the plan, which is not supported")
        each = even(name, "numbers", whole.shape[dim] // pieces, self._collectives.size)
        parts = [piece.narrow(dim, rank * each, each) for piece in whole.chunk(pieces, dim)]
        setattr(owner, own_name, parameter(torch.cat(parts, dim)))

    def _add_up(self, module: torch.nn.Module) -> None:
        collectives = self._collectives

        def add_up(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:  # noqa: ARG001 - torch's signature
            return collectives.all_reduce(output.contiguous())

        module.register_forward_hook(add_up)

    def _refusal(self, name: str, why: str) -> ModelLoadError:
        return ModelLoadError(
            f"executor.tensor_parallel_size: {name} of {type(self._module).__name__} {why}; "
            "set executor.tensor_parallel_size to 1"
        )

    def _heads_at(self, name: str) -> Heads:
        """Return the heads of the layer that contains the module ``name``."""
        if len(self._heads) == 1:
            return self._heads[0]
        index = _LAYER.search(name)
        if index is None:
            raise self._refusal(name, "is in no numbered layer, and the layers have different numbers of heads")
        return self._heads[int(index[1])]

    def _outputs(self, name: str, layer: torch.nn.Linear) -> range:
        rank, size = self._collectives.rank, self._collectives.size
        if name.rpartition(".")[2] in _KEYS_AND_VALUES:
            heads = self._heads_at(name)
            own, width = heads.kv_heads(rank, size), layer.out_features // heads.kv
            return range(own.start * width, own.stop * width)
        each = even(name, "outputs", layer.out_features, size)
        return range(rank * each, (rank + 1) * each)

    def _packed(self, name: str, layer: torch.nn.Linear) -> tuple[range, range]:
        """Return the indices of this rank's outputs of a layer that consists of two concatenated layers."""
        half, size = layer.out_features // 2, self._collectives.size
        each = even(name, "outputs per half", half, size)
        first = self._collectives.rank * each
        return range(first, first + each), range(half + first, half + first + each)

    def _own_words(self, whole: torch.Tensor) -> torch.nn.Parameter:
        """Return this rank's rows of an embedding table or head. All ranks have the same number of rows, so the last
        ranks' rows are padded with zeros.
        """
        if id(whole) not in self._own_rows:
            count = -(-len(whole) // self._collectives.size)
            first = self._collectives.rank * count
            rows = whole[first : first + count]
            if missing := count - len(rows):
                rows = torch.cat([rows, torch.zeros(missing, *rows.shape[1:], dtype=rows.dtype, device=rows.device)])
            self._own_rows[id(whole)] = whole, parameter(rows)
        return self._own_rows[id(whole)][1]

    def _split_and_gather(self, layer: torch.nn.Linear) -> range:
        """Split a linear layer whose outputs every rank gathers. Returns the indices of this rank's outputs."""
        total = layer.out_features
        layer.weight = self._own_words(layer.weight)
        if layer.bias is not None:
            layer.bias = self._own_words(layer.bias)
        layer.out_features = len(layer.weight)
        vocabulary = SplitVocabulary(self._collectives, total, layer.out_features)
        head: Any = self._module
        if layer is head.get_output_embeddings():
            self.vocabulary = vocabulary

        def gather(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:  # noqa: ARG001 - torch's signature
            return vocabulary.finish(output)

        layer.register_forward_hook(gather)
        return range(vocabulary.first, vocabulary.first + vocabulary.width)


def _attends(name: str) -> bool:
    """Return whether a linear layer with this name computes queries, keys or values of attention heads."""
    return name.rpartition(".")[2] in _OF_HEADS
