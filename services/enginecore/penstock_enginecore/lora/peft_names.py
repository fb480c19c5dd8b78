"""What tensors are called in PEFT's files, and which layers of the model they are of."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Self

from penstock_enginecore.lora.errors import LoraError, LoraReason
from penstock_enginecore.lora.target import AdapterTarget

_PREFIX = "base_model.model."
_WRAPPERS = re.compile(r"(?<![^.])(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")
"""What torch's compiler, checkpoints of activations and FSDP put into names of the modules they wrap."""
_TEXT_MODELS = ("language_model", "text_model")
"""What transformers calls the text model of a model that takes media."""
_UPDATE = re.compile(r"(?P<layer>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight")
_BASE = re.compile(r"(?P<layer>.+?)(?:\.base_layer)?\.(?P<own>weight|bias)")
_OTHERS = (
    (re.compile(r".*\.lora_magnitude_vector\b.*"), LoraReason.DORA, "it is a magnitude, of DoRA"),
    (re.compile(r".*\.lora_embedding_[AB]\b.*"), LoraReason.EMBEDDING, "it is of an embedding"),
    (re.compile(r".*\.lora_[AB]\..*bias"), LoraReason.LORA_BIAS, "it is a bias of an update"),
    (re.compile(r".*\.trainable_tokens_.*"), LoraReason.TRAINABLE_TOKENS, "it is of single tokens' embeddings"),
    (re.compile(r".*\.modules_to_save\..*"), LoraReason.MODULES_TO_SAVE, "it is of a layer that is replaced"),
    (re.compile(r".*\.experts\b.*"), LoraReason.EXPERTS, "it is of experts"),
)
"""Tensors that are refused for what they are called."""


@dataclass(frozen=True, slots=True)
class PeftTensors:
    """Names in a file. ``updates``: by layer, in the file's words, and side, A or B. ``copies``: of weights of the base model, by
    parameter of the model.
    """

    naming: "Naming"
    updates: Mapping[str, Mapping[str, str]]
    copies: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Naming:
    """How names of layers in a file become the model's: an adapter that was trained on a model with a head, say, may be served on
    one without, and one of a model that takes media on its text model. ``rules``: what a name begins with in the file, and what
    with in the model; the first that fits holds. ``of_media``: in the file, the text model is a part.
    """

    rules: tuple[tuple[str, str], ...] = (("", ""),)
    of_media: bool = False

    @classmethod
    def of(cls, layers: Iterable[str], target: AdapterTarget) -> Self:
        """By which most of ``layers`` are the model's."""
        inner = f"{target.prefix}." if target.prefix else ""
        ways = [cls()]
        if inner:
            ways += [cls((("", inner),)), cls(((inner, ""),))]
        for text in _TEXT_MODELS:
            for added in dict.fromkeys((inner, "")):  # with a head, and without
                ways.append(cls(((f"model.{text}.", added), ("lm_head", "lm_head")), of_media=True))
            # before transformers 4.52, where the text model had the head
            ways.append(cls(((f"{text}.", ""),), of_media=True))
            ways.append(cls(((f"{text}.model.", ""),), of_media=True))
        return max(ways, key=lambda way: sum(way.in_model(layer) in target.linears for layer in layers))

    def in_model(self, layer: str) -> str:
        """What the model calls it; '' where it has none of that name."""
        return next((into + layer.removeprefix(of) for of, into in self.rules if layer.startswith(of)), "")

    def in_file(self, layer: str) -> str:
        """What a file calls it; '' where the model it was trained on had none."""
        return next((of + layer.removeprefix(into) for of, into in self.rules if layer.startswith(into)), "")


def sort_tensors(names: Iterable[str], target: AdapterTarget, file: str) -> PeftTensors:
    """Which tensor of ``file`` is what. Raises LoraError for those that are nothing that is served."""
    updates: dict[str, dict[str, str]] = {}
    others: list[str] = []
    for name in names:
        found = _UPDATE.fullmatch(_own_name(name))
        if found is None:
            others.append(name)
            continue
        sides = updates.setdefault(found["layer"], {})
        if found["side"] in sides:
            raise LoraError(
                LoraReason.SURPLUS_TENSOR, "it is there twice", file, name, f"also as {sides[found['side']]}"
            )
        sides[found["side"]] = name
    naming = Naming.of(updates, target)
    return PeftTensors(naming, updates, dict(_copy(name, naming, target, file) for name in others))


def is_update(name: str) -> bool:
    """Whether a tensor is called what A and B are called."""
    return _UPDATE.fullmatch(_own_name(name)) is not None


def tensor_name(layer: str, side: str) -> str:
    """What PEFT calls the tensor of a layer."""
    return f"{_PREFIX}{layer}.lora_{side}.weight"


def without_wrappers(name: str) -> str:
    """The name that a module has while nothing wraps it or its parents."""
    return _WRAPPERS.sub("", name)


def _own_name(name: str) -> str:
    return without_wrappers(name).removeprefix(_PREFIX)


def _copy(name: str, naming: Naming, target: AdapterTarget, file: str) -> tuple[str, str]:
    """The parameter of the base model that tensor ``name`` is a copy of, and ``name``. Raises LoraError if it cannot be one."""
    own = _own_name(name)
    for pattern, reason, what in _OTHERS:
        if pattern.fullmatch(own):
            raise LoraError(reason, what, file, name)
    found = _BASE.fullmatch(own)
    parameter = f"{naming.in_model(found['layer'])}.{found['own']}" if found else ""
    if parameter in target.samples:
        return parameter, name
    if found and found["own"] == "bias":
        raise LoraError(LoraReason.BIAS, "it is a bias of the base model", file, name)
    layer = naming.in_model(found["layer"]) if found else ""
    if layer in target.unserved and target.unserved[layer].reason == LoraReason.EMBEDDING:
        raise LoraError(
            LoraReason.EMBEDDING, "it is an embedding", file, name, remedy="save with save_embedding_layers=False"
        )
    what = "it replaces a layer" if layer in target.linears else "it is no part of an update that is served"
    raise LoraError(LoraReason.SURPLUS_TENSOR, what, file, name)
