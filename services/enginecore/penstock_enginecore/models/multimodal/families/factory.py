"""The families that are served, by the model type of their configuration."""

from importlib import import_module

from transformers import PretrainedConfig

from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.models.multimodal.families.base import Family

_HERE = "penstock_enginecore.models.multimodal.families"
_PIXTRAL = "pixtral"
_FAMILIES = {
    "aya_vision": ("tiles", "AyaVision"),
    "gemma3": ("tiles", "Gemma3"),
    "idefics3": ("tiles", "Idefics3"),
    "internvl": ("tiles", "InternVL"),
    "llava": ("llava", "Llava"),
    "llava_next": ("anyres", "LlavaNext"),
    "llava_onevision": ("anyres", "LlavaOneVision"),
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
    raise ModelLoadError(f"{named} is not supported: {reason}; docs/multimodal.md lists what is")
