"""Checkpoints with media encoders. All weights are read once, and the text model is served like any other text model."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    GenerationMixin,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from penstock_enginecore.models.dtypes import Dtypes, widen_all
from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.models.multimodal.encoder import TowerEncoder
from penstock_enginecore.models.multimodal.families.base import Checkpoint, Family
from penstock_enginecore.models.placement import place
from penstock_enginecore.models.quantization.loading import dequantize_kept

# Supported families, by model type of the configuration.

_HERE = "penstock_enginecore.models.multimodal.families"
_PIXTRAL = "pixtral"
_FAMILIES = {
    "aya_vision": ("tiles", "AyaVision"),
    "gemma3": ("tiles", "Gemma3"),
    "idefics3": ("tiles", "Idefics3"),
    "internvl": ("tiles", "InternVL"),
    "llava": ("llava", "Llava"),
    "llava_next": ("llava", "LlavaNext"),
    "llava_onevision": ("llava", "LlavaOneVision"),
    "mistral3": ("pixtral", "Mistral3"),
    "qwen2_5_vl": ("qwen_vl", "Qwen25VL"),
    "qwen2_audio": ("audio", "Qwen2Audio"),
    "qwen2_vl": ("qwen_vl", "Qwen2VL"),
    "qwen3_5": ("qwen_vl", "Qwen35"),
    "qwen3_5_moe": ("qwen_vl", "Qwen35"),
    "qwen3_vl": ("qwen_vl", "Qwen3VL"),
    "smolvlm": ("tiles", "SmolVLM"),
    "voxtral": ("audio", "Voxtral"),
}
"""Module and class of each family."""
_REFUSED = {
    "mllama": "its layers read images by cross-attention, which the KV cache does not support",
    "paligemma": "tokens of its prompts attend to later tokens",
}


def family_of(config: PretrainedConfig) -> type[Family]:
    """Return the class for the media encoders of a configuration that contains a text model. Raises ModelLoadError,
    with the reason, if it is unsupported.
    """
    kind = config.model_type
    tower = getattr(config, "vision_config", None)
    place = _FAMILIES.get(kind)
    if kind == "llava" and tower is not None and tower.model_type == _PIXTRAL:
        place = ("pixtral", "LlavaPixtral")
    reason = _REFUSED.get(
        kind, f"its media encoders are not supported; supported model types are {', '.join(sorted(_FAMILIES))}"
    )
    if place is not None:
        family: type[Family] = getattr(import_module(f"{_HERE}.{place[0]}"), place[1])
        reason = family.unsupported(config) or ""
        if not reason:
            return family
    named = ", ".join(config.architectures or ()) or kind
    raise ModelLoadError(f"{named} is not supported: {reason}; docs/guides/multimodal.md lists the supported models")


# Causal language models of text models for which transformers has no such class, because they are only part of
# multimodal models.

_OURS = {
    "qwen2_5_vl_text": ("qwen2_5_vl", "Qwen2_5_VL"),
    "qwen2_vl_text": ("qwen2_vl", "Qwen2VL"),
    "qwen3_vl_text": ("qwen3_vl", "Qwen3VL"),
}
"""Package of transformers and prefix of its classes, by model type of the configuration."""


@cache
def for_causal_lm(package: str, prefix: str) -> type[PreTrainedModel]:
    """Return a class ``{prefix}ForCausalLM``: a ``{prefix}TextModel`` with a head, like transformers' classes.

    Positions may be ``[3, 1, tokens]``.
    """
    modeling: Any = import_module(f"transformers.models.{package}.modeling_{package}")
    pretrained, model_class = (getattr(modeling, f"{prefix}{kind}") for kind in ("PreTrainedModel", "TextModel"))

    def init(self: Any, config: Any) -> None:
        pretrained.__init__(self, config)
        self.model = model_class(config)
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self: Any, *, logits_to_keep: int | torch.Tensor = 0, **inputs: Any) -> CausalLMOutputWithPast:
        output = self.model(**inputs)
        rows = slice(-logits_to_keep or None, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(output.last_hidden_state[:, rows])
        return CausalLMOutputWithPast(
            logits=logits, past_key_values=output.past_key_values, hidden_states=output.hidden_states
        )

    members = {
        "__init__": init,
        "__module__": __name__,
        "base_model_prefix": "model",
        "forward": forward,
        "_tied_weights_keys": {"lm_head.weight": "model.embed_tokens.weight"},
        "_tp_plan": {"lm_head": "colwise_gather_output"},
    }
    return type(f"{prefix}ForCausalLM", (pretrained, GenerationMixin), members)


def text_class(config: PretrainedConfig) -> type[PreTrainedModel]:
    """Return the class for a text model's configuration. Raises ModelLoadError if there is none."""
    if ours := _OURS.get(config.model_type):
        return for_causal_lm(*ours)
    mapping: Any = AutoModelForCausalLM._model_mapping
    if type(config) not in mapping:
        raise ModelLoadError(f"{config.model_type} is not supported: there is no causal language model for it")
    entry = mapping[type(config)]
    found: type[PreTrainedModel] = entry[0] if isinstance(entry, tuple) else entry
    return found


_TOWERS_ATTEND = "sdpa"
_TEXT_SECTION = "text_config"


class Separated(NamedTuple):
    """Parts of a multimodal model. ``text`` is a separate causal language model with the weights. ``towers`` is the
    model without the text model.
    """

    text: PreTrainedModel
    towers: Any


@dataclass(frozen=True, slots=True)
class Composite:
    """Checkpoint whose ``config`` contains a text model's configuration.

    The loader uses it like one of transformers' auto classes. If ``with_towers`` is false, the model is created without
    media encoders.
    """

    config: PretrainedConfig
    family: type[Family]
    text_class: type[PreTrainedModel]
    with_towers: bool

    @classmethod
    def of(cls, config: PretrainedConfig, *, with_towers: bool) -> "Composite | None":
        """Return the composite of a configuration, or None for a text model. Raises ModelLoadError if it is
        unsupported.
        """
        if getattr(config, "is_encoder_decoder", False):
            return None
        text = config.get_text_config()
        if text is config:
            return None
        if getattr(config, _TEXT_SECTION, None) is not text:
            raise ModelLoadError(f"{config.model_type} is not supported: its text model is not in {_TEXT_SECTION}")
        return cls(config, family_of(config), text_class(text), with_towers)

    @property
    def text_config(self) -> PretrainedConfig:
        """Configuration of the text model."""
        return self.config.get_text_config()

    @property
    def _model_mapping(self) -> Mapping[type[PretrainedConfig], type[PreTrainedModel]]:
        return {type(self.config): self._class()}

    def from_pretrained(self, **options: Any) -> Any:
        """Return a model like transformers' auto classes. ``attn_implementation`` applies to the text model."""
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
        """Return a model like transformers' auto classes. ``attn_implementation`` applies to the text model."""
        make: Any = self._class()._from_config
        return make(config, attn_implementation=self._sections(attn_implementation), **options)

    def separate(self, whole: Any) -> Separated:
        """Remove the text model from ``whole`` and return both parts."""
        towers, head = whole.model, whole.get_output_embeddings()
        text = towers._modules.pop(self.family.text_name)
        make: Any = self.text_class._from_config
        with torch.device("meta"):
            module = make(text.config)
        module.config = text.config
        setattr(module, module.base_model_prefix, text)
        module.set_output_embeddings(head)
        module.generation_config = whole.generation_config
        return Separated(module, towers)

    def encoder(
        self, towers: Any, directory: Path, max_tokens: int, device: torch.device, dtypes: Dtypes
    ) -> TowerEncoder | None:
        """Return the media encoders on ``device``, or None if they are not loaded. Raises ModelLoadError.

        The encoders' weights are converted to dense weights in the dtype of the computation. ``directory`` has the
        processors' files, and ``max_tokens`` is the longest prompt.
        """
        if not self.with_towers:
            return None
        dequantize_kept(towers, dtypes.computed)
        widen_all(towers)
        place(towers, str(directory), device)
        checkpoint = Checkpoint(self.config, directory, max_tokens, device)
        return TowerEncoder(self.family(towers, checkpoint), device, dtypes.computed)

    def _class(self) -> type[PreTrainedModel]:
        """Return transformers' class, changed so that media encoders use torch's attention.

        Without ``with_towers``, the class has no media encoders, and their weights are not read.
        """
        mapping: Any = AutoModelForMultimodalLM._model_mapping
        entry = mapping[type(self.config)]
        found: type[PreTrainedModel] = entry[0] if isinstance(entry, tuple) else entry
        members: dict[str, Any] = {"__module__": found.__module__}
        if not self.with_towers:
            members |= _without_towers(found, self.family.text_name)

        def from_pretrained(cls: type[Any], /, *args: Any, attn_implementation: str, **options: Any) -> Any:
            inherited: Any = found.from_pretrained
            return inherited.__func__(cls, *args, attn_implementation=self._sections(attn_implementation), **options)

        return type(found.__name__, (found,), {**members, "from_pretrained": classmethod(from_pretrained)})

    def _sections(self, attention: str) -> dict[str, str]:
        return {"": _TOWERS_ATTEND, **dict.fromkeys(self.config.sub_configs, _TOWERS_ATTEND), _TEXT_SECTION: attention}


def _without_towers(model_class: type[PreTrainedModel], text_name: str) -> dict[str, Any]:
    """Return the members of a class whose models have only their text model."""

    def init(self: Any, config: PretrainedConfig) -> None:
        model_class.__init__(self, config)
        for name in list(self.model._modules):
            if name != text_name:
                delattr(self.model, name)

    unused = {*(model_class._keys_to_ignore_on_load_unexpected or ()), rf"^model\.(?!{text_name}\.)[^.]+\."}
    return {"__init__": init, "_keys_to_ignore_on_load_unexpected": unused}
