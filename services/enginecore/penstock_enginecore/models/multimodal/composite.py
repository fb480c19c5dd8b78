"""Checkpoints with towers: their weights are read once, and their text model is served as any other."""

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

# The families that are served, by the model type of their configuration.

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
    "qwen3_vl": ("qwen_vl", "Qwen3VL"),
    "smolvlm": ("tiles", "SmolVLM"),
    "voxtral": ("audio", "Voxtral"),
}
"""Module and class."""
_REFUSED = {
    "mllama": "its layers see images by cross-attention, which the KV cache does not hold",
    "paligemma": "tokens of its prompts see those behind them",
}


def family_of(config: PretrainedConfig) -> type[Family]:
    """Of a configuration with a text model's in it. Raises ModelLoadError for one that is not served, with the reason."""
    kind = config.model_type
    tower = getattr(config, "vision_config", None)
    place = _FAMILIES.get(kind)
    if kind == "llava" and tower is not None and tower.model_type == _PIXTRAL:
        place = ("pixtral", "LlavaPixtral")
    reason = _REFUSED.get(kind, f"its towers are not known; those of {', '.join(sorted(_FAMILIES))} are")
    if place is not None:
        family: type[Family] = getattr(import_module(f"{_HERE}.{place[0]}"), place[1])
        reason = family.unsupported(config) or ""
        if not reason:
            return family
    named = ", ".join(config.architectures or ()) or kind
    raise ModelLoadError(f"{named} is not supported: {reason}; docs/guides/multimodal.md lists what is")


# Causal language models of text models for which transformers has none: they live in models with towers alone.

_OURS = {
    "qwen2_5_vl_text": ("qwen2_5_vl", "Qwen2_5_VL"),
    "qwen2_vl_text": ("qwen2_vl", "Qwen2VL"),
    "qwen3_vl_text": ("qwen3_vl", "Qwen3VL"),
}
"""By the model type of their configuration: transformers' package, and what its classes begin with."""


@cache
def for_causal_lm(package: str, prefix: str) -> type[PreTrainedModel]:
    """``{prefix}ForCausalLM``: a ``{prefix}TextModel`` with a head, as transformers' own are. Positions may be
    ``[3, 1, tokens]``.
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
    """Of the configuration of a text model. Raises ModelLoadError where there is none."""
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
    """``text``: a causal language model of its own, with the checkpoint's weights. ``towers``: what is left of the whole."""

    text: PreTrainedModel
    towers: Any


@dataclass(frozen=True, slots=True)
class Composite:
    """A checkpoint whose ``config`` has that of a text model in it. It makes the model as transformers' auto classes do, for the
    loader: without the towers, unless ``with_towers``.
    """

    config: PretrainedConfig
    family: type[Family]
    text_class: type[PreTrainedModel]
    with_towers: bool

    @classmethod
    def of(cls, config: PretrainedConfig, *, with_towers: bool) -> "Composite | None":
        """None for a text model. Raises ModelLoadError for what is not served."""
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
        """Of its text model."""
        return self.config.get_text_config()

    @property
    def _model_mapping(self) -> Mapping[type[PretrainedConfig], type[PreTrainedModel]]:
        return {type(self.config): self._class()}

    def from_pretrained(self, **options: Any) -> Any:
        """As of transformers' auto classes; ``attn_implementation`` is that of the text model."""
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
        """Likewise."""
        make: Any = self._class()._from_config
        return make(config, attn_implementation=self._sections(attn_implementation), **options)

    def separate(self, whole: Any) -> Separated:
        """Take the text model out of ``whole``."""
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
        """What computes with ``towers`` on ``device``, by the processors' files in ``directory``. For them, no weights are kept
        narrow or quantized. ``max_tokens``: of a prompt. None if there are to be none. Raises ModelLoadError.
        """
        if not self.with_towers:
            return None
        dequantize_kept(towers, dtypes.computed)
        widen_all(towers)
        place(towers, str(directory), device)
        checkpoint = Checkpoint(self.config, directory, max_tokens, device)
        return TowerEncoder(self.family(towers, checkpoint), device, dtypes.computed)

    def _class(self) -> type[PreTrainedModel]:
        """Transformers', but that towers attend in torch's way, or are not there, and no more of the files is read."""
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
    """Members of a class whose models have their text model alone."""

    def init(self: Any, config: PretrainedConfig) -> None:
        model_class.__init__(self, config)
        for name in list(self.model._modules):
            if name != text_name:
                delattr(self.model, name)

    unused = {*(model_class._keys_to_ignore_on_load_unexpected or ()), rf"^model\.(?!{text_name}\.)[^.]+\."}
    return {"__init__": init, "_keys_to_ignore_on_load_unexpected": unused}
