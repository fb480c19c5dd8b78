"""PEFT's file format: the settings in ``adapter_config.json`` and the names of tensors. Settings that change the
computation are either supported or refused.
"""

import logging
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import msgspec

from penstock_common.files import MAX_DEPTH
from penstock_common.nesting_depth import nests_deeper
from penstock_enginecore.lora.errors import LoraError, LoraReason
from penstock_enginecore.lora.target import AdapterTarget

logger = logging.getLogger(__name__)

CONFIG_FILE = "adapter_config.json"
MAX_CONFIG_BYTES = 1 << 20
_MAX_PATTERNS = 4096
TASK_TYPES = ("CAUSAL_LM", "FEATURE_EXTRACTION", "SEQ_CLS", "TOKEN_CLS")
_WITHOUT_EFFECT = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "ensure_weight_tying",
        "eva_config",
        "inference_mode",
        "lora_dropout",
        "lora_ga_config",
        "loftq_config",
        "megatron_config",
        "megatron_core",
        "merge_weights",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "velora_config",
    }
)
"""Settings that do not change the computation: training settings, initializations that ``_check_init`` checks by name,
and options of LoRA variants, because the setting that enables the variant is checked.
"""
_NOTES = ("_", "unsloth_")
"""Prefixes of keys that are not PEFT settings. Training programs write their own information under these keys."""
_HARMLESS_INITS = ("gaussian", "eva", "orthogonal", "mica")
"""Initializations, in addition to true and false, that leave the base model's weights unchanged and use ``B A`` as the
update.
"""
_NONE: tuple[Any, ...] = (None, False, [], {}, "")


class _Settings(msgspec.Struct, frozen=True):
    """Settings with the names and types that they have in the file, and with PEFT's defaults."""

    peft_type: str
    r: int = 8
    lora_alpha: float = 8
    target_modules: str | list[str] | None = None
    exclude_modules: str | list[str] | None = None
    use_rslora: bool = False
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
    layers_to_transform: int | list[int] | None = None
    layers_pattern: str | list[str] | None = None
    task_type: str | None = None
    init_lora_weights: bool | str | None = True
    base_model_name_or_path: str | None = None


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """Parsed settings of an adapter.

    Attributes:
        rank: Rank of layers that no pattern of ``rank_pattern`` matches.
        alpha: Alpha of layers that no pattern of ``alpha_pattern`` matches.
        target_modules: A regular expression, or suffixes of module names.
        exclude_modules: A regular expression, or suffixes of module names.
        layers: Numbers of the layers that the adapter updates, or None for all layers.
        layers_patterns: Names that the model's list of layers may have.
        base_model: Model on which the adapter was trained, or empty if the file does not name it.
    """

    rank: int
    alpha: float
    use_rslora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    target_modules: str | frozenset[str]
    exclude_modules: str | frozenset[str]
    layers: frozenset[int] | None
    layers_patterns: tuple[str, ...]
    task_type: str
    base_model: str

    def scale(self, rank: int, alpha: float) -> float:
        """Return the factor of ``B A``: alpha / rank, or alpha / sqrt(rank) with rsLoRA (Kalajdzievski, 2023)."""
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def parse_peft_config(text: bytes, max_rank: int) -> PeftConfig:
    """Parse the content of ``adapter_config.json``. Raises LoraError with the setting's name if a setting is
    unsupported or a rank is below 1.
    """
    if len(text) > MAX_CONFIG_BYTES:
        raise _garbled("the file is too large", f"{len(text)} bytes", f"at most {MAX_CONFIG_BYTES}")
    try:
        given = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise _garbled("the file cannot be read", str(e)) from e
    # Deeply nested values must not cause a RecursionError when they are written into an error message.
    if nests_deeper(given, MAX_DEPTH):
        raise _garbled("the JSON is nested too deeply", "", f"at most {MAX_DEPTH} levels")
    if not isinstance(given, dict):
        raise _garbled("the file is not a JSON object", type(given).__name__)
    kind = given.get("peft_type")
    if kind != "LORA":
        raise _refused(LoraReason.PEFT_TYPE, "peft_type", kind, "only LORA is supported")
    for key, value in given.items():
        _check(key, value)
    try:
        settings = msgspec.convert(given, _Settings)
    except msgspec.ValidationError as e:
        raise _garbled("a setting has the wrong type", str(e)) from e
    _check_init(settings.init_lora_weights)
    if settings.task_type not in (None, *TASK_TYPES):
        raise _refused(LoraReason.TASK_TYPE, "task_type", settings.task_type, f"supported: {', '.join(TASK_TYPES)}")
    _check_ranks(settings, max_rank)
    return _config(settings)


def _config(settings: _Settings) -> PeftConfig:
    if settings.target_modules is None:
        raise _garbled("target_modules is missing", "", "a list of names, an expression or 'all-linear'")
    layers = settings.layers_to_transform
    if layers is not None and isinstance(settings.target_modules, str):
        raise _garbled("layers_to_transform cannot be combined with an expression for target_modules", repr(layers))
    names = settings.layers_pattern or []
    return PeftConfig(
        rank=settings.r,
        alpha=settings.lora_alpha,
        use_rslora=settings.use_rslora,
        rank_pattern=settings.rank_pattern or {},
        alpha_pattern=settings.alpha_pattern or {},
        target_modules=_names(settings.target_modules),
        exclude_modules=_names(settings.exclude_modules or ()),
        layers=None if layers is None or layers == [] else frozenset([layers] if isinstance(layers, int) else layers),
        layers_patterns=tuple([names] if isinstance(names, str) else names),
        task_type=settings.task_type or "",
        base_model=settings.base_model_name_or_path or "",
    )


def _names(given: str | list[str] | tuple[()]) -> str | frozenset[str]:
    return given if isinstance(given, str) else frozenset(given)


def _check_ranks(settings: _Settings, max_rank: int) -> None:
    """Check ranks and alphas, including those that apply only to some layers. Raises LoraError for impossible values."""
    rank_pattern, alpha_pattern = settings.rank_pattern or {}, settings.alpha_pattern or {}
    for key, count in (("rank_pattern", len(rank_pattern)), ("alpha_pattern", len(alpha_pattern))):
        if count > _MAX_PATTERNS:
            raise _garbled(f"{key} has too many entries", f"{count}", f"at most {_MAX_PATTERNS}")
    for key, rank in {
        "r": settings.r,
        **{f"rank_pattern[{key!r}]": each for key, each in rank_pattern.items()},
    }.items():
        if rank < 1:
            raise _refused(LoraReason.RANK, key, rank, f"from 1 to {max_rank}")
    alphas = {"lora_alpha": settings.lora_alpha} | {
        f"alpha_pattern[{key!r}]": each for key, each in alpha_pattern.items()
    }
    for key, alpha in alphas.items():
        if not math.isfinite(alpha):
            raise _garbled(f"{key} is not a finite number", str(alpha))


def _check_init(init: bool | str | None) -> None:
    if not isinstance(init, str) or init.lower() in _HARMLESS_INITS:
        return
    raise LoraError(
        LoraReason.CHANGED_BASE,
        "init_lora_weights: the adapter was trained on changed weights of the base model",
        CONFIG_FILE,
        value=repr(init),
        limit=f"supported: true, false, {', '.join(_HARMLESS_INITS)}",
        remedy="convert the adapter: save_pretrained with path_initial_model_for_weight_conversion",
    )


def _check(key: str, value: Any) -> None:
    """Raise LoraError if a setting changes the computation and is not supported."""
    if key in _Settings.__struct_fields__ or key in _WITHOUT_EFFECT or value in _NONE:
        return
    if key.startswith(_NOTES):
        logger.info("%s of a LoRA adapter: ignoring %r, because PEFT has no such setting", CONFIG_FILE, key[:100])
        return
    if key == "bias":
        if value == "none":
            return
        raise _refused(LoraReason.BIAS, key, value, "only 'none' is supported", "train with bias='none'")
    reason, remedy = _SWITCHES.get(key, (LoraReason.SETTING, ""))
    raise _refused(reason, key, value, "", remedy)


_SWITCHES: Mapping[str, tuple[LoraReason, str]] = {
    "use_dora": (LoraReason.DORA, "merge the adapter into a copy of the base model, or train without DoRA"),
    "modules_to_save": (LoraReason.MODULES_TO_SAVE, "train without modules_to_save, or serve the merged model"),
    "lora_bias": (LoraReason.LORA_BIAS, "train without lora_bias"),
    "fan_in_fan_out": (LoraReason.FAN_IN_FAN_OUT, "this setting is for Conv1D layers, which do not support adapters"),
    "target_parameters": (LoraReason.TARGET_PARAMETERS, "target only linear layers"),
    "layer_replication": (LoraReason.LAYER_REPLICATION, "serve the merged model"),
    "trainable_token_indices": (LoraReason.TRAINABLE_TOKENS, "serve the merged model"),
}


def _refused(reason: LoraReason, key: str, value: object, limit: str = "", remedy: str = "") -> LoraError:
    return LoraError(
        reason, f"{key} has an unsupported value", CONFIG_FILE, value=_short(value), limit=limit, remedy=remedy
    )


def _garbled(what: str, value: str = "", limit: str = "") -> LoraError:
    return LoraError(LoraReason.CONFIG, what, CONFIG_FILE, value=value, limit=limit)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


# Names of tensors in PEFT's files, and the layers of the model to which they belong.

_PREFIX = "base_model.model."
_WRAPPERS = re.compile(r"(?<![^.])(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")
"""Name parts that torch.compile, activation checkpointing and FSDP insert into the names of the modules that they wrap.
"""
_TEXT_MODELS = ("language_model", "text_model")
"""Names that transformers gives to the text model of a multimodal model."""
_UPDATE = re.compile(r"(?P<layer>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight")
_BASE = re.compile(r"(?P<layer>.+?)(?:\.base_layer)?\.(?P<own>weight|bias)")
_OTHERS = (
    (
        re.compile(r".*\.lora_magnitude_vector\b.*"),
        LoraReason.DORA,
        "the tensor is a magnitude vector of DoRA, which is not supported",
    ),
    (
        re.compile(r".*\.lora_embedding_[AB]\b.*"),
        LoraReason.EMBEDDING,
        "the tensor updates an embedding, which is not supported",
    ),
    (
        re.compile(r".*\.lora_[AB]\..*bias"),
        LoraReason.LORA_BIAS,
        "the tensor is a bias of an update, which is not supported",
    ),
    (
        re.compile(r".*\.trainable_tokens_.*"),
        LoraReason.TRAINABLE_TOKENS,
        "the tensor has embeddings of single tokens, which are not supported",
    ),
    (
        re.compile(r".*\.modules_to_save\..*"),
        LoraReason.MODULES_TO_SAVE,
        "the tensor belongs to a layer that the adapter replaces, which is not supported",
    ),
    (
        re.compile(r".*\.experts\b.*"),
        LoraReason.EXPERTS,
        "the tensor belongs to experts, which do not support adapters",
    ),
)
"""Patterns of tensor names that are refused, each with the reason."""


@dataclass(frozen=True, slots=True)
class PeftTensors:
    """Tensor names of one file.

    Attributes:
        updates: Names of the A and B tensors, by layer as named in the file and by side ("A" or "B").
        copies: Names of tensors that copy weights of the base model, by parameter name of the model.
    """

    naming: "Naming"
    updates: Mapping[str, Mapping[str, str]]
    copies: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Naming:
    """Maps layer names in a file to layer names in the model.

    An adapter that was trained on a model with a head may be served on the same model without the head. An adapter for
    a multimodal model may be served on the text model of that model.

    Attributes:
        rules: Pairs of a prefix in the file and its replacement in the model. The first matching rule applies.
        of_media: Whether the adapter was trained on a multimodal model that contains a text model.
    """

    rules: tuple[tuple[str, str], ...] = (("", ""),)
    of_media: bool = False

    @classmethod
    def of(cls, layers: Iterable[str], target: AdapterTarget) -> Self:
        """Return the naming that maps most of the file's ``layers`` to layers that exist in the model."""
        inner = f"{target.prefix}." if target.prefix else ""
        ways = [cls()]
        if inner:
            ways += [cls((("", inner),)), cls(((inner, ""),))]
        for text in _TEXT_MODELS:
            for added in dict.fromkeys((inner, "")):  # Names of a model with a head, and of a model without a head.
                ways.append(cls(((f"model.{text}.", added), ("lm_head", "lm_head")), of_media=True))
            # Names of transformers before 4.52, where the head belonged to the text model.
            ways.append(cls(((f"{text}.", ""),), of_media=True))
            ways.append(cls(((f"{text}.model.", ""),), of_media=True))
        return max(ways, key=lambda way: sum(way.in_model(layer) in target.linears for layer in layers))

    def in_model(self, layer: str) -> str:
        """Return the model's name for a layer in the file, or '' if the model has no such name."""
        return next((into + layer.removeprefix(of) for of, into in self.rules if layer.startswith(of)), "")

    def in_file(self, layer: str) -> str:
        """Return the file's name for a layer of the model, or '' if the trained model had no such layer."""
        return next((of + layer.removeprefix(into) for of, into in self.rules if layer.startswith(into)), "")


def sort_tensors(names: Iterable[str], target: AdapterTarget, file: str) -> PeftTensors:
    """Classify the tensors of ``file``. Raises LoraError for tensors that are not supported."""
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
                LoraReason.SURPLUS_TENSOR, "the tensor occurs twice", file, name, f"also as {sides[found['side']]}"
            )
        sides[found["side"]] = name
    naming = Naming.of(updates, target)
    return PeftTensors(naming, updates, dict(_copy(name, naming, target, file) for name in others))


def is_update(name: str) -> bool:
    """Return whether a tensor has the name of an A or B matrix."""
    return _UPDATE.fullmatch(_own_name(name)) is not None


def tensor_name(layer: str, side: str) -> str:
    """Return PEFT's tensor name for one side of a layer."""
    return f"{_PREFIX}{layer}.lora_{side}.weight"


def without_wrappers(name: str) -> str:
    """Return a module's name without the parts that wrappers insert."""
    return _WRAPPERS.sub("", name)


def _own_name(name: str) -> str:
    return without_wrappers(name).removeprefix(_PREFIX)


def _copy(name: str, naming: Naming, target: AdapterTarget, file: str) -> tuple[str, str]:
    """Return the parameter of the base model of which tensor ``name`` is a copy, and ``name``. Raises LoraError if the
    tensor cannot be such a copy.
    """
    own = _own_name(name)
    for pattern, reason, what in _OTHERS:
        if pattern.fullmatch(own):
            raise LoraError(reason, what, file, name)
    found = _BASE.fullmatch(own)
    parameter = f"{naming.in_model(found['layer'])}.{found['own']}" if found else ""
    if parameter in target.samples:
        return parameter, name
    if found and found["own"] == "bias":
        raise LoraError(LoraReason.BIAS, "the tensor is a bias of the base model", file, name)
    layer = naming.in_model(found["layer"]) if found else ""
    if layer in target.unserved and target.unserved[layer].reason == LoraReason.EMBEDDING:
        raise LoraError(
            LoraReason.EMBEDDING,
            "the tensor is an embedding",
            file,
            name,
            remedy="save with save_embedding_layers=False",
        )
    what = "the tensor replaces a layer" if layer in target.linears else "the tensor is not part of a supported update"
    raise LoraError(LoraReason.SURPLUS_TENSOR, what, file, name)
