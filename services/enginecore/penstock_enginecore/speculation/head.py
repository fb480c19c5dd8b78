"""EAGLE heads as modules: decoder layers that predict a token from the target's hidden states and the token before."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import nn
from transformers import AutoConfig, PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm, Qwen3RotaryEmbedding

from penstock_common.files import read_json
from penstock_enginecore.models.attention_hook import ATTENTION_NAME
from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.models.quantization.weights import open_tensors
from penstock_enginecore.models.rope import freeze_rotary

# Config of an EAGLE head's checkpoint, in one of the two published layouts.
#
# EAGLE (Li et al., 2024) uses the target's last hidden states. EAGLE-3 (2025) uses the hidden states of several layers.
# SafeAILab's repository and the speculators library name a head's tensors differently.

Kind = Literal["eagle", "eagle3"]
_PARTS: dict[str, tuple[Any, Any, Any]] = {
    "llama": (LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding),
    "qwen3": (Qwen3DecoderLayer, Qwen3RMSNorm, Qwen3RotaryEmbedding),
}
"""Classes of a head's modules (layer, norm and rotary embedding) by ``model_type`` of the head's layers."""
_ALIASES = {
    "midlayer.": "layers.0.",
    "transformer.": "layers.0.",
    "fusion_fc.": "fc.",
    "model.": "",
}
"""Replacements for prefixes of tensor names in the head's files."""
_UNUSED = ("t2d", "verifier_", "rotary_emb.", "layers.0.self_attn.rotary_emb.")
"""Prefixes of the names of tensors that serving does not need."""
_UNSERVED = ("norm_before_fc", "fc_norm", "norm_output", "layernorms")
"""Settings in ``config.json`` that enable variants of heads that are not supported."""


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """Config of a head.

    Attributes:
        layer: Config of the head's layers.
        vocab_size: Number of tokens that the head can predict.
        state_layers: Numbers of the target's layers whose hidden states the head uses, counted as in
            ``ForwardPass.keep_hidden``.
        normed_residual: Whether the residual around the first layer's attention is the normed input, and not the input
            itself.
    """

    kind: Kind
    layer: PretrainedConfig
    vocab_size: int
    state_layers: tuple[int, ...]
    normed_residual: bool


def read_head_config(directory: Path, kind: Kind, num_layers: int) -> HeadConfig:
    """Read the config of the head in ``directory``, for a target of ``num_layers`` layers. Raises ModelLoadError if the
    head is of another kind or has settings that are not supported.
    """
    given = _read(directory)
    named = str(given.get("speculators_model_type") or "")
    if (found := named or _kind_of(given)) and found != kind:
        raise ModelLoadError(f"the head's config.json describes an {found!r} head, but speculative.method is {kind!r}")
    for switch in _UNSERVED:
        if given.get(switch):
            raise ModelLoadError(f"the head's {switch} is {given[switch]}; heads with this setting are not supported")
    layer = _layer_config(given["transformer_layer_config"] if named else given)
    return HeadConfig(
        kind=kind,
        layer=layer,
        vocab_size=int(given.get("draft_vocab_size") or layer.vocab_size) if kind == "eagle3" else layer.vocab_size,
        state_layers=_state_layers(given, kind, num_layers),
        normed_residual=bool(given.get("norm_before_residual")),
    )


def known_name(name: str) -> str | None:
    """Return the name that this module uses for a tensor of the files, or None if serving does not need the tensor."""
    for alias in ("model.", *_ALIASES):
        if name.startswith(alias):
            name = _ALIASES[alias] + name.removeprefix(alias)
    return None if name.startswith(_UNUSED) else name


def _read(directory: Path) -> Mapping[str, Any]:
    try:
        given = read_json(directory / "config.json")
    except (OSError, ValueError) as e:
        raise ModelLoadError(f"the head's config.json cannot be read: {e}") from e
    if not isinstance(given, dict):
        raise ModelLoadError("the head's config.json is not a JSON object")
    return given


def _kind_of(given: Mapping[str, Any]) -> str:
    """Return the kind of the head from the names of its classes, or '' if the names do not contain the kind."""
    names = "".join(map(str, given.get("architectures") or ())).lower()
    return "eagle3" if "eagle3" in names else "eagle" if "eagle" in names else ""


def _layer_config(given: Mapping[str, Any]) -> PretrainedConfig:
    model_type = given.get("model_type", "llama")
    if model_type not in _PARTS:
        raise ModelLoadError(f"the model_type of the head's layers is {model_type!r}; supported: {', '.join(_PARTS)}")
    fields = {
        key: value for key, value in given.items() if key not in ("model_type", "architectures", "dtype", "torch_dtype")
    }
    try:
        layer: PretrainedConfig = AutoConfig.for_model(model_type, **fields)
    except (TypeError, ValueError, KeyError) as e:
        raise ModelLoadError(f"the head's configuration cannot be read: {e}") from e
    return layer


def _state_layers(given: Mapping[str, Any], kind: Kind, num_layers: int) -> tuple[int, ...]:
    """Return the numbers of the target's layers whose hidden states the head uses: those in the config, or else the
    defaults of the original EAGLE-3 code. EAGLE uses the output of the last norm.
    """
    if kind == "eagle":
        return (num_layers,)
    key = "eagle_aux_hidden_state_layer_ids"
    named = given.get(key) or (given.get("eagle_config") or {}).get(key)
    layers = tuple(named or (2, num_layers // 2, num_layers - 3))
    for layer in layers:
        if not isinstance(layer, int) or not 0 <= layer < num_layers:
            where = (
                f"the head's {key} has {layer!r}"
                if named
                else f"the head does not set {key}, and the default has layer {layer}"
            )
            raise ModelLoadError(f"{where}, but the model has only layers 0 to {num_layers - 1}")
    return layers


class DraftHead(nn.Module):
    """Base of modules that predict a token from the target's hidden states and the next token.

    Attributes:
        config: Config of the layers.
        states_width: Width of the target's hidden states of one token.
        embed_tokens: The head's own embedding, or None if the head uses the target's embedding.
    """

    config: PretrainedConfig
    states_width: int
    embed_tokens: nn.Embedding | None

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return logits ``[tokens, vocabulary]`` of the output of ``forward``."""
        raise NotImplementedError


class EagleHead(DraftHead):
    """Module of an EAGLE head.

    At position i, the head gets token i + 1 and the target's hidden states of token i, and predicts token i + 2. While
    drafting, the head gets its own output for the previous position instead of the target's states. ``embed_tokens``
    and ``lm_head`` are None if the head uses those of the target.
    """

    def __init__(self, config: HeadConfig, states_width: int, *, has_bias: bool, embeds: bool, has_head: bool) -> None:
        """Args:
        states_width: Width of the target's hidden states of one token.
        has_bias: Whether ``fc`` has a bias.
        embeds: Whether the head has its own ``embed_tokens``.
        has_head: Whether the head has its own ``lm_head``.
        """
        super().__init__()
        layer = config.layer
        layer._attn_implementation = ATTENTION_NAME
        make_layer, norm, rotary = _PARTS[layer.model_type]
        self.config = layer
        self.kind = config.kind
        self.states_width = states_width
        hidden, inputs = layer.hidden_size, states_width
        if self.kind == "eagle":
            inputs += hidden
        self.fc = nn.Linear(inputs, hidden, bias=has_bias)
        self.layers = nn.ModuleList(make_layer(layer, index) for index in range(layer.num_hidden_layers))
        first: Any = self.layers[0]
        if self.kind == "eagle":
            first.input_layernorm = nn.Identity()
        else:
            first.hidden_norm = norm(hidden, eps=layer.rms_norm_eps)
            self._widen(first.self_attn)
        self.norm = nn.Identity() if self.kind == "eagle" else norm(hidden, eps=layer.rms_norm_eps)
        self.normed_residual = config.normed_residual
        self.rotary_emb = rotary(layer)
        self.embed_tokens = nn.Embedding(layer.vocab_size, hidden) if embeds else None
        self.lm_head = nn.Linear(hidden, config.vocab_size, bias=False) if has_head else None

    def forward(
        self, embedded: torch.Tensor, states: torch.Tensor, positions: torch.Tensor, *, own: bool = False
    ) -> torch.Tensor:
        """Return the head's output, ``[tokens, hidden size]``. Attention calls use the current context.

        Args:
            embedded: Embedded tokens ``[tokens, hidden size]``.
            states: The target's states ``[tokens, states width]``, or with ``own`` the head's output ``[tokens, hidden
                size]``.
            positions: int64 ``[tokens]``.
            own: Whether ``states`` are the head's own output.
        """
        turns = self.rotary_emb(embedded[None], positions[None])
        if self.kind == "eagle":
            x = self.fc(torch.cat([embedded, states], dim=-1))[None]
            rest = list(self.layers)
        else:
            x = self._first(embedded[None], (states if own else self.fc(states))[None], turns)
            rest = list(self.layers)[1:]
        for layer in rest:
            made: Any = layer(x, position_embeddings=turns, attention_mask=None)
            x = made[0] if isinstance(made, tuple) else made
        return cast("torch.Tensor", x[0])

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return logits ``[tokens, vocabulary]`` of the output of ``forward``. The head must have its own ``lm_head``."""
        return cast("torch.Tensor", cast("nn.Linear", self.lm_head)(self.norm(states)))

    def _first(self, embedded: torch.Tensor, states: torch.Tensor, turns: Any) -> torch.Tensor:
        """Run EAGLE-3's first layer. The input of attention has the embeddings and the states of the tokens,
        concatenated. The residual has only the states.
        """
        layer: Any = self.layers[0]
        normed = layer.hidden_norm(states)
        both = torch.cat([layer.input_layernorm(embedded), normed], dim=-1)
        attended, _ = layer.self_attn(both, position_embeddings=turns, attention_mask=None)
        x = (normed if self.normed_residual else states) + attended
        return cast("torch.Tensor", x + layer.mlp(layer.post_attention_layernorm(x)))

    @staticmethod
    def _widen(attention: Any) -> None:
        """Replace the projections of the attention by projections with twice the input width, for embeddings and
        states.
        """
        for name in ("q_proj", "k_proj", "v_proj"):
            old = getattr(attention, name)
            setattr(attention, name, nn.Linear(2 * old.in_features, old.out_features, bias=old.bias is not None))


def read_head(
    directory: Path,
    config: HeadConfig,
    *,
    hidden_size: int,
    vocab_size: int,
    lm_head: Callable[[], torch.Tensor] | None,
) -> tuple[EagleHead, torch.Tensor | None]:
    """Read the head in ``directory`` in float32 on the host. Returns the head and its token mapping: the ids of the
    target's tokens that the head can predict, int64 and ascending. A mapping of None means all tokens.

    Args:
        directory: Directory of the checkpoint.
        config: Config of the head.
        hidden_size: Hidden size of the target.
        vocab_size: Vocabulary size of the target.
        lm_head: Function that reads the target's lm_head, for a head without an lm_head.

    Raises:
        ModelLoadError: A tensor is missing or has a wrong size.
    """
    with open_tensors(directory) as stored:
        named = {name: tensor for raw, tensor in stored.items() if (name := known_name(raw)) is not None}
        tensors = {name: tensor[...] for name, tensor in named.items()}
    offsets = tensors.pop("d2t", None)
    _check_sizes(tensors, config, hidden_size, vocab_size)
    if "lm_head.weight" not in tensors and lm_head is not None:
        tensors["lm_head.weight"] = lm_head()
    head = EagleHead(
        config,
        hidden_size * len(config.state_layers),
        has_bias="fc.bias" in tensors,
        embeds="embed_tokens.weight" in tensors,
        has_head=True,
    )
    _load(head, tensors)
    freeze_rotary(head, config.layer.max_position_embeddings)
    return head.eval(), _in_order(head, _target_tokens(offsets, config, vocab_size))


def _check_sizes(tensors: dict[str, torch.Tensor], config: HeadConfig, hidden_size: int, vocab_size: int) -> None:
    own, count = config.layer.hidden_size, len(config.state_layers)
    expected = hidden_size * count + (own if config.kind == "eagle" else 0)
    fc = tensors.get("fc.weight")
    if fc is not None and fc.shape[1] != expected:
        states = f"{count} of {hidden_size}" if count > 1 else f"{hidden_size}"
        raise ModelLoadError(
            f"the head's fc expects {fc.shape[1]} inputs, but the model's hidden states of a token have {states} numbers; "
            "the head is for a model with another hidden size"
        )
    if config.kind == "eagle" and own != hidden_size:
        raise ModelLoadError(
            f"the head's hidden_size is {own}, but the model's hidden_size is {hidden_size}; "
            "an EAGLE head needs the model's hidden_size"
        )
    embeds = tensors.get("embed_tokens.weight")
    if embeds is None and own != hidden_size:
        raise ModelLoadError(
            f"the head's hidden_size is {own} and the model's hidden_size is {hidden_size}, so the head needs its own "
            "embed_tokens"
        )
    if embeds is not None and len(embeds) != vocab_size:
        raise ModelLoadError(f"the head's embed_tokens has {len(embeds)} tokens, but the model has {vocab_size}")


def _load(head: EagleHead, tensors: dict[str, torch.Tensor]) -> None:
    """Copy all tensors into the head. Raises ModelLoadError if a tensor is missing, is unknown or has a wrong shape."""
    places = dict(head.state_dict())
    for name in sorted(places.keys() - tensors.keys()):
        raise ModelLoadError(f"the head has no tensor {name}, which speculative.method {head.kind!r} needs")
    for name in sorted(tensors.keys() - places.keys()):
        raise ModelLoadError(f"the head has a tensor {name}, which speculative.method {head.kind!r} does not support")
    for name, tensor in tensors.items():
        if tensor.shape != places[name].shape:
            raise ModelLoadError(
                f"the head's {name} has shape {list(tensor.shape)}, but its config.json requires shape "
                f"{list(places[name].shape)}"
            )
    head.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})


def _in_order(head: EagleHead, tokens: torch.Tensor | None) -> torch.Tensor | None:
    """Return ``tokens`` in ascending order, and reorder the rows of ``lm_head`` accordingly.

    In this order, a random number selects the same token as in sampling from the complete vocabulary with the other
    tokens excluded.
    """
    if tokens is None:
        return None
    found, order = tokens.sort()
    output: Any = head.lm_head
    output.weight = nn.Parameter(output.weight.detach()[order], requires_grad=False)
    return found


def _target_tokens(offsets: torch.Tensor | None, config: HeadConfig, vocab_size: int) -> torch.Tensor | None:
    """Return the id of the target's token for each token of the head."""
    if offsets is None:
        if config.vocab_size != vocab_size:
            raise ModelLoadError(
                f"the head predicts {config.vocab_size} tokens and the model has {vocab_size}, but the head has no "
                "tensor d2t that maps the tokens"
            )
        return None
    if len(offsets) != config.vocab_size:
        raise ModelLoadError(
            f"the head's d2t has {len(offsets)} tokens, but the head's draft_vocab_size is {config.vocab_size}"
        )
    tokens = torch.arange(len(offsets)) + offsets.to(torch.int64)
    outside = torch.nonzero((tokens < 0) | (tokens >= vocab_size))
    if len(outside):
        first = int(outside[0])
        raise ModelLoadError(
            f"the head's d2t maps token {first} to token {int(tokens[first])}, but the model has only {vocab_size} tokens"
        )
    return tokens
