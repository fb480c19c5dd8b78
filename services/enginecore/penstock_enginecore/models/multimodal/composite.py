"""Checkpoints with media encoders. All weights are read once, and the text model is served like any other text model."""

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForMultimodalLM, PretrainedConfig, PreTrainedModel

from penstock_common.checkpoint import TEXT_ALONE
from penstock_enginecore.models.dtypes import Dtypes, widen_all
from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.models.multimodal import absent_towers
from penstock_enginecore.models.multimodal.encoder import TowerEncoder
from penstock_enginecore.models.multimodal.families.base import Checkpoint, Family
from penstock_enginecore.models.multimodal.text_model import (
    check_same_text,
    for_causal_lm,
    known_class,
    probe_text,
    remove_others,
    text_part,
)
from penstock_enginecore.models.placement import place
from penstock_enginecore.models.quantization.loading import dequantize_kept
from penstock_enginecore.models.support import unsupported

# Supported families of checkpoints with media encoders, by the model type in the configuration.

_HERE = "penstock_enginecore.models.multimodal.families"
_PIXTRAL = "pixtral"
_FAMILIES = {
    "aya_vision": ("tiles", "AyaVision"),
    "gemma3": ("tiles", "Gemma3"),
    "glm46v": ("glm", "Glm4V"),
    "glm4v": ("glm", "Glm4V"),
    "glm4v_moe": ("glm", "Glm4V"),
    "glm_ocr": ("glm", "Glm4V"),
    "gemma4": ("gemma4", "Gemma4"),
    "gemma4_unified": ("gemma4", "Gemma4Unified"),
    "idefics3": ("tiles", "Idefics3"),
    "internvl": ("tiles", "InternVL"),
    "llama4": ("llama4", "Llama4"),
    "llava": ("llava", "Llava"),
    "llava_next": ("llava", "LlavaNext"),
    "llava_onevision": ("llava", "LlavaOneVision"),
    "mistral3": ("pixtral", "Mistral3"),
    "qwen2_5_vl": ("qwen_vl", "Qwen25VL"),
    "paddleocr_vl": ("paddleocr", "PaddleOCRVL"),
    "qwen2_5_omni": ("omni", "Qwen25Omni"),
    "qwen2_audio": ("audio", "Qwen2Audio"),
    "qwen2_vl": ("qwen_vl", "Qwen2VL"),
    "qwen3_5": ("qwen_vl", "Qwen35"),
    "qwen3_5_moe": ("qwen_vl", "Qwen35"),
    "qwen3_asr": ("qwen3_asr", "Qwen3ASR"),
    "qwen3_omni_moe": ("omni", "Qwen3Omni"),
    "qwen3_vl": ("qwen_vl", "Qwen3VL"),
    "qwen3_vl_moe": ("qwen_vl", "Qwen3VL"),
    "smolvlm": ("tiles", "SmolVLM"),
    "voxtral": ("audio", "Voxtral"),
}
"""Names of the module and class of each family, by model type."""
_TESTED = frozenset({"gemma3n"})
"""Model types whose forward pass needs parts of the encoders for every token, so that it cannot run without them."""
_REFUSED = {
    "mllama": "its layers read images by cross-attention, which the KV cache does not support",
    "paligemma": "tokens of its prompts attend to later tokens",
}


def family_of(config: PretrainedConfig) -> type[Family]:
    """Return the family class for the media encoders of a configuration that contains a text model. Raises
    ModelLoadError, with the reason, if the encoders are not supported.
    """
    kind = config.model_type
    tower = getattr(config, "vision_config", None)
    place = _FAMILIES.get(kind)
    if kind == "llava" and tower is not None and tower.model_type == _PIXTRAL:
        place = ("pixtral", "LlavaPixtral")
    reason = f"its media encoders are not supported; supported model types are {', '.join(sorted(_FAMILIES))}"
    if place is not None:
        family: type[Family] = getattr(import_module(f"{_HERE}.{place[0]}"), place[1])
        reason = family.unsupported(config) or ""
        if not reason:
            return family
    raise ModelLoadError(f"{_named(config)} is not supported: {reason}{_SUPPORTED}")


_SUPPORTED = "; docs/guides/multimodal.md lists the supported models"
_TOWERS_ATTEND = "sdpa"
_UNUSED_ATTEND = "eager"
"""Attention implementation for parts that are removed. All models of transformers support this implementation."""
_TEXT_SECTION = "text_config"


class Separated(NamedTuple):
    """Parts of a multimodal model. ``text`` is a separate causal language model with the weights of the text part.
    ``towers`` is the model without the text model.
    """

    text: PreTrainedModel
    towers: Any


@dataclass(frozen=True, slots=True)
class Composite:
    """Checkpoint whose configuration contains a text model's configuration.

    The loader uses an object of this class in the same way as one of transformers' auto classes.

    Attributes:
        checkpoint: Configuration of the checkpoint.
        section: Name of the section in ``checkpoint`` that configures the model to load, or "" for ``checkpoint``
            itself.
        family: Media encoders to load, or None to serve the text model alone.
        text_class: Class of the text model.
    """

    checkpoint: PretrainedConfig
    section: str
    family: type[Family] | None
    text_class: type[PreTrainedModel]

    @classmethod
    def of(cls, config: PretrainedConfig, *, with_towers: bool) -> "Composite | None":
        """Return the composite of a configuration, or None for a text model.

        Args:
            config: Configuration of the checkpoint.
            with_towers: Whether to load the media encoders too. Otherwise the text model is served alone.

        Raises:
            ModelLoadError: The text model or, if ``with_towers``, the encoders are not supported. If only the encoders
                are not supported, the error names the setting that serves the text model alone.
        """
        if getattr(config, "is_encoder_decoder", False) or config.get_text_config() is config:
            return None
        if reason := _REFUSED.get(config.model_type):
            raise ModelLoadError(f"{_named(config)} is not supported: {reason}{_SUPPORTED}")
        try:
            family = family_of(config) if with_towers else None
        except ModelLoadError as e:
            raise ModelLoadError(f"{e}{_remedy(config)}") from e
        absent_towers.register()
        section = _section_of(config)
        return cls(config, section, family, _text_class(_within(config, section)))

    @property
    def config(self) -> PretrainedConfig:
        """Configuration of the model that is loaded, with the text model's configuration as ``text_config``."""
        return _within(self.checkpoint, self.section)

    @property
    def text_config(self) -> PretrainedConfig:
        """Configuration of the text model."""
        return self.config.get_text_config()

    @property
    def _model_mapping(self) -> Mapping[type[PretrainedConfig], type[PreTrainedModel]]:
        return {type(self.checkpoint): self._class()}

    def from_pretrained(self, **options: Any) -> Any:
        """Return a model, in the same way as transformers' auto classes. ``attn_implementation`` applies to the text model."""
        make: Any = self._class()
        return make.from_pretrained(**options)

    def from_config(
        self,
        config: Any,
        *,
        attn_implementation: str,
        trust_remote_code: bool,  # noqa: ARG002 - the classes are transformers' own
        **options: Any,
    ) -> Any:
        """Return a model, in the same way as transformers' auto classes. ``attn_implementation`` applies to the text model."""
        make: Any = self._class()._from_config
        return make(config, attn_implementation=self._sections(attn_implementation), **options)

    def separate(self, whole: Any) -> Separated:
        """Remove the text model from ``whole`` and return both parts. For an unknown family, raises ModelLoadError if
        the text model alone gives other results than ``whole``. For known families and ``_TESTED``, tests check that
        the results are equal.
        """
        part, head = text_part(whole), whole.get_output_embeddings()
        known = self.checkpoint.model_type in _FAMILIES or self.checkpoint.model_type in _TESTED
        expected = None if known else probe_text(whole)
        if part.has_head:
            module: Any = part.module
        else:
            module = _on_meta(self.text_class, part.module.config)
            setattr(module, module.base_model_prefix, part.module)
            module.set_output_embeddings(head)
        module.config = part.module.config
        module.generation_config = whole.generation_config
        if expected is not None:
            check_same_text(module, expected, type(whole).__name__)
        around, _, leaf = part.name.rpartition(".")
        towers = whole.get_submodule(around)
        del towers._modules[leaf]
        return Separated(module, towers)

    def encoder(
        self, towers: Any, directory: Path, max_tokens: int, device: torch.device, dtypes: Dtypes
    ) -> TowerEncoder | None:
        """Return the media encoders on ``device``, or None if they are not loaded. Raises ModelLoadError if the
        encoders cannot be served.

        Quantized weights of the encoders are converted to dense weights in the dtype of the computation. ``directory``
        has the processors' files, and ``max_tokens`` is the length of the longest prompt.
        """
        if self.family is None:
            return None
        dequantize_kept(towers, dtypes.computed)
        widen_all(towers)
        place(towers, str(directory), device)
        checkpoint = Checkpoint(self.config, directory, max_tokens, device)
        return TowerEncoder(self.family(towers, checkpoint), device, dtypes.computed)

    def _class(self) -> type[PreTrainedModel]:
        """Return transformers' class of the composite, changed so that its media encoders use torch's attention.
        Without ``with_towers``, the class has no media encoders, and the weights of the encoders are not read.
        """
        found = _whole_class(self.config)
        members: dict[str, Any] = {"__module__": found.__module__}
        if self.family is None:
            members["__init__"] = _without_towers(found)

        def from_pretrained(cls: type[Any], /, *args: Any, attn_implementation: str, **options: Any) -> Any:
            inherited: Any = found.from_pretrained
            if "config" in options:
                options["config"] = _within(options["config"], self.section)
            return inherited.__func__(cls, *args, attn_implementation=self._sections(attn_implementation), **options)

        def from_config(cls: type[Any], config: PretrainedConfig, /, **options: Any) -> Any:
            inherited: Any = found._from_config
            return inherited.__func__(cls, _within(config, self.section), **options)

        members |= {"from_pretrained": classmethod(from_pretrained), "_from_config": classmethod(from_config)}
        return type(found.__name__, (found,), members)

    def _sections(self, attention: str) -> dict[str, str]:
        others = _TOWERS_ATTEND if self.family is not None else _UNUSED_ATTEND
        eager = dict.fromkeys(self.family.eager_sections if self.family is not None else (), _UNUSED_ATTEND)
        return {"": others, **dict.fromkeys(self.config.sub_configs, others), **eager, _TEXT_SECTION: attention}


def _whole_class(config: PretrainedConfig) -> type[PreTrainedModel]:
    """Return transformers' class of a composite. Raises ModelLoadError if there is none."""
    mapping: Any = AutoModelForMultimodalLM._model_mapping
    if type(config) not in mapping:
        raise ModelLoadError(f"{_named(config)} is not supported: transformers has no model that generates text for it")
    entry = mapping[type(config)]
    found: type[PreTrainedModel] = entry[0] if isinstance(entry, tuple) else entry
    return found


def _without_towers(model_class: type[PreTrainedModel]) -> Any:
    """Return an initializer that creates only the text model of a composite, so that other weights are not read."""

    def init(self: Any, config: PretrainedConfig) -> None:
        model_class.__init__(self, config)
        removed = tuple(f"{name}." for name in remove_others(self, text_part(self)))
        self._keys_to_ignore_on_load_unexpected |= {rf"^{re.escape(prefix)}" for prefix in removed}
        self.all_tied_weights_keys = {
            name: source for name, source in self.all_tied_weights_keys.items() if not name.startswith(removed)
        }

    return init


def _text_class(config: PretrainedConfig) -> type[PreTrainedModel]:
    """Return the class of a composite's text model: transformers' class, or a class that is made here for the text
    model's module.

    Raises ModelLoadError if the text model cannot be identified, or if transformers' class does not contain that
    module.
    """
    whole_class, text = _whole_class(config), config.get_text_config()
    part = text_part(_on_meta(whole_class, config))
    known = known_class(text)
    if part.has_head:
        return type(part.module)
    if known is None:
        made: type[PreTrainedModel] = for_causal_lm(type(part.module))  # type: ignore[arg-type]  # their hash is untyped
        return made
    if type(_on_meta(known, text).base_model) is not type(part.module):
        raise ModelLoadError(
            f"{whole_class.__name__} is not supported: its text model is a {type(part.module).__name__}, which is no "
            f"part of {known.__name__}"
        )
    return known


def _on_meta(model_class: Any, config: PretrainedConfig) -> Any:
    """Return a model on the meta device, without memory for its weights. Raises ModelLoadError if its class fails."""
    try:
        with torch.device("meta"):
            return model_class._from_config(copy.deepcopy(config))
    except Exception as e:
        reason = str(e).strip().split("\n", 1)[0]
        raise ModelLoadError(
            f"{model_class.__name__} cannot be made from config.json: {type(e).__name__}: {reason}"
        ) from e


def _within(config: PretrainedConfig, section: str) -> PretrainedConfig:
    """Return a section of a checkpoint's configuration, or the complete configuration if ``section`` is empty."""
    found: PretrainedConfig = getattr(config, section) if section else config
    return found


def _section_of(config: PretrainedConfig) -> str:
    """Return the name of the section in ``config`` whose ``text_config`` is the text model's configuration, or "" if
    ``config`` itself has this ``text_config``. Raises ModelLoadError if there is none.
    """
    text = config.get_text_config()
    if getattr(config, _TEXT_SECTION, None) is text:
        return ""
    sections: list[str] = list(config.sub_configs)
    found = [name for name in sections if getattr(getattr(config, name), _TEXT_SECTION, None) is text]
    if len(found) != 1:
        raise ModelLoadError(f"{_named(config)} is not supported: its text model is not in {_TEXT_SECTION}")
    return found[0]


def _remedy(config: PretrainedConfig) -> str:
    """Return the settings that serve a composite's text model alone, or why that is not supported either."""
    try:
        text = Composite.of(config, with_towers=False)
        reason = "" if text is None else unsupported(text.text_config, text.text_class) or ""
    except ModelLoadError as e:
        reason = str(e)
    if reason:
        return f"; its text model alone is not supported either: {reason}"
    return f"; {TEXT_ALONE}"


def _named(config: PretrainedConfig) -> str:
    return ", ".join(config.architectures or ()) or config.model_type
