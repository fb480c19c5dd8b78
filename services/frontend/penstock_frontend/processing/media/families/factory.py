"""The family of a checkpoint."""

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path

from penstock_common.errors import ConfigError
from penstock_frontend.processing.media.families.base import Encode, Family
from penstock_frontend.processing.media.families.checkpoint import Checkpoint, read_checkpoint

_PACKAGE = "penstock_frontend.processing.media.families"
_FAMILIES: Mapping[str, str] = {
    "llava": "llava:Llava",
    "llava_next": "llava_next:LlavaNext",
    "llava_onevision": "llava_onevision:LlavaOnevision",
    "internvl": "internvl:InternVL",
    "aya_vision": "aya_vision:AyaVision",
    "mistral3": "pixtral:Pixtral",
    "idefics3": "idefics3:Idefics3",
    "smolvlm": "idefics3:Idefics3",
    "qwen2_vl": "qwen_vl:QwenVL",
    "qwen2_5_vl": "qwen_vl:QwenVL",
    "qwen3_vl": "qwen_vl:QwenVL",
    "gemma3": "gemma3:Gemma3",
    "qwen2_audio": "audio:Qwen2Audio",
    "voxtral": "audio:Voxtral",
}
"""Module and class by the model's type in config.json."""
_PIXTRAL = "pixtral:Pixtral"
"""Of that tower, whatever model it is in."""
_REFUSED: Mapping[str, str] = {
    "mllama": "its text model attends to images in layers of their own",
    "paligemma": "its prompts attend both ways",
    "paligemma2": "its prompts attend both ways",
}

_TEXT_ALONE = ". With media.enabled false it is served for text alone"


def load_family(folder: Path, encode: Encode) -> Family | None:
    """The family of the checkpoint in ``folder``; None for models that read text alone. ``encode``: of its tokenizer.

    Raises ConfigError, naming the model, where its media are not served: unknown families, and processors that exist for
    torchvision only.
    """
    checkpoint = read_checkpoint(folder, encode)
    if not reads_media(checkpoint):
        return None
    model_type = checkpoint.model_type
    if (why := _REFUSED.get(model_type)) is not None:
        raise ConfigError(f"{folder}: media of {model_type} are not served: {why}{_TEXT_ALONE}")
    tower = checkpoint.sub_config("vision_config").get("model_type")
    if (name := _PIXTRAL if tower == "pixtral" else _FAMILIES.get(model_type)) is None:
        served = ", ".join(_FAMILIES)
        raise ConfigError(f"{folder}: media of {model_type} are not served; those of {served} are{_TEXT_ALONE}")
    module, _, attribute = name.partition(":")
    make: Callable[[Checkpoint], Family] = getattr(import_module(f"{_PACKAGE}.{module}"), attribute)
    return make(checkpoint)


def reads_media(checkpoint: Checkpoint) -> bool:
    """Whether a model has a tower, as its configuration says."""
    return any(checkpoint.sub_config(name) for name in ("vision_config", "audio_config")) or (
        checkpoint.model_type in _FAMILIES or checkpoint.model_type in _REFUSED
    )
