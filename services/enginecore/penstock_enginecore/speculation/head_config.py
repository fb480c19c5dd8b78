"""What a checkpoint of an EAGLE head says of itself, in either of the layouts in which heads are published.

EAGLE (Li et al., 2024) guesses by the target's last hidden states, EAGLE-3 (2025) by those of some layers. SafeAILab's repository
names a head's parts one way, the speculators library another.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from transformers import AutoConfig, PretrainedConfig

from penstock_common.input_files import read_json
from penstock_enginecore.models.errors import ModelLoadError

Kind = Literal["eagle", "eagle3"]
LAYER_TYPES = ("llama", "qwen3")
"""``model_type`` of the layers that heads are made of."""
_ALIASES = {
    "midlayer.": "layers.0.",
    "transformer.": "layers.0.",
    "fusion_fc.": "fc.",
    "model.": "",
}
"""What prefixes of tensors' names stand for."""
_UNUSED = ("t2d", "verifier_", "rotary_emb.", "layers.0.self_attn.rotary_emb.")
"""Tensors that serving does not need, by the beginnings of their names."""
_UNSERVED = ("norm_before_fc", "fc_norm", "norm_output", "layernorms")
"""Switches of variants whose parts are not here."""


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """``layer``: configuration of its layers. ``vocab_size``: tokens that it may guess. ``state_layers``: hidden states of the
    target that it gets, as ``ForwardPass.keep_hidden`` counts them. ``normed_residual``: what goes around the first layer's
    attention is normed.
    """

    kind: Kind
    layer: PretrainedConfig
    vocab_size: int
    state_layers: tuple[int, ...]
    normed_residual: bool


def read_head_config(directory: Path, kind: Kind, num_layers: int) -> HeadConfig:
    """Of the head in ``directory``, for a target of ``num_layers``. Raises ModelLoadError."""
    given = _read(directory)
    named = str(given.get("speculators_model_type") or "")
    if (found := named or _kind_of(given)) and found != kind:
        raise ModelLoadError(f"its config.json describes a head for {found!r}; speculative.method is {kind!r}")
    for switch in _UNSERVED:
        if given.get(switch):
            raise ModelLoadError(f"its {switch} is {given[switch]}; heads with that are not served")
    layer = _layer_config(given["transformer_layer_config"] if named else given)
    return HeadConfig(
        kind=kind,
        layer=layer,
        vocab_size=int(given.get("draft_vocab_size") or layer.vocab_size) if kind == "eagle3" else layer.vocab_size,
        state_layers=_state_layers(given, kind, num_layers),
        normed_residual=bool(given.get("norm_before_residual")),
    )


def known_name(name: str) -> str | None:
    """What a tensor called ``name`` is called here; None for what serving does not need."""
    for alias in ("model.", *_ALIASES):
        if name.startswith(alias):
            name = _ALIASES[alias] + name.removeprefix(alias)
    return None if name.startswith(_UNUSED) else name


def _read(directory: Path) -> Mapping[str, Any]:
    try:
        given = read_json(directory / "config.json")
    except (OSError, ValueError) as e:
        raise ModelLoadError(f"its config.json cannot be read: {e}") from e
    if not isinstance(given, dict):
        raise ModelLoadError("its config.json is no JSON object")
    return given


def _kind_of(given: Mapping[str, Any]) -> str:
    """By the names of classes; empty where these do not tell."""
    names = "".join(map(str, given.get("architectures") or ())).lower()
    return "eagle3" if "eagle3" in names else "eagle" if "eagle" in names else ""


def _layer_config(given: Mapping[str, Any]) -> PretrainedConfig:
    model_type = given.get("model_type", "llama")
    if model_type not in LAYER_TYPES:
        raise ModelLoadError(f"its layers' model_type is {model_type!r}; served: {', '.join(LAYER_TYPES)}")
    fields = {
        key: value for key, value in given.items() if key not in ("model_type", "architectures", "dtype", "torch_dtype")
    }
    try:
        layer: PretrainedConfig = AutoConfig.for_model(model_type, **fields)
    except (TypeError, ValueError, KeyError) as e:
        raise ModelLoadError(f"its configuration cannot be read: {e}") from e
    return layer


def _state_layers(given: Mapping[str, Any], kind: Kind, num_layers: int) -> tuple[int, ...]:
    """Those that it names, or those that EAGLE-3's own code takes. EAGLE takes what the last norm puts out."""
    if kind == "eagle":
        return (num_layers,)
    key = "eagle_aux_hidden_state_layer_ids"
    named = given.get(key) or (given.get("eagle_config") or {}).get(key)
    layers = tuple(named or (2, num_layers // 2, num_layers - 3))
    for layer in layers:
        if not isinstance(layer, int) or not 0 <= layer < num_layers:
            where = f"its {key} has {layer!r}" if named else f"it names no {key}, and by default has layer {layer}"
            raise ModelLoadError(f"{where}; the model has layers 0 to {num_layers - 1}")
    return layers
