"""Media configuration of a checkpoint, and the choice of the family (code for media) by the checkpoint's model type."""

import json
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from penstock_common.checkpoint import TEXT_ALONE
from penstock_common.errors import ConfigError
from penstock_frontend.processing.media.families.base import Encode, Family
from penstock_frontend.processing.prompts.tokenizer import read_json

_THINKER = "thinker_config"
_PROCESSORS = ("image_processor", "video_processor", "feature_extractor")


class Checkpoint(NamedTuple):
    """Contents of the configuration files of a checkpoint. The content of a missing file is empty.

    Attributes:
        folder: Directory of the checkpoint.
        config: Content of config.json.
        processor: Content of processor_config.json.
        image_processor: Configuration of the image processor, from whichever file contains it.
        video_processor: Configuration of the video processor.
        feature_extractor: Configuration of the feature extractor.
        tokenizer: Content of tokenizer_config.json.
        encode: Function that tokenizes a text with the model's tokenizer.
    """

    folder: Path
    config: Mapping[str, Any]
    processor: Mapping[str, Any]
    image_processor: Mapping[str, Any]
    video_processor: Mapping[str, Any]
    feature_extractor: Mapping[str, Any]
    tokenizer: Mapping[str, Any]
    encode: Encode

    @property
    def model_type(self) -> str:
        """Model type of the checkpoint, as in transformers."""
        return str(self.config.get("model_type", ""))

    @property
    def processor_class(self) -> str:
        """Class name of the processor in transformers. Empty if no file of the checkpoint has the name."""
        named = (self.processor, self.image_processor, self.feature_extractor, self.tokenizer)
        return next((str(each["processor_class"]) for each in named if each.get("processor_class")), "")

    @property
    def identity(self) -> bytes:
        """Bytes that identify every configuration on which a media item's tensors and embeddings depend."""
        depends = {
            "model_type": self.model_type,
            "processor": self.processor,
            "image_processor": self.image_processor,
            "video_processor": self.video_processor,
            "feature_extractor": self.feature_extractor,
            "vision": self.sub_config("vision_config") or None,
            "audio": self.sub_config("audio_config") or None,
        }
        return json.dumps(depends, sort_keys=True, separators=(",", ":")).encode()

    def sub_config(self, name: str) -> Mapping[str, Any]:
        """Return a section of config.json, or an empty mapping if the section is missing.

        In models that also speak, the section may be inside the section of the thinker, which reads media.
        """
        thinker = self.config.get(_THINKER)
        inside = thinker.get(name) if isinstance(thinker, dict) else None
        section = self.config.get(name, inside)
        return section if isinstance(section, dict) else {}

    def token(self, name: str, default: str) -> str:
        """Return the text of the special token with this name.

        The text comes from the configuration of the tokenizer, or else from that of the processor, or else it is
        ``default``.
        """
        for named in (self.tokenizer, self.tokenizer.get("extra_special_tokens"), self.processor):
            value = named.get(name) if isinstance(named, dict) else None
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                return text
        return default

    def token_id(self, token: str) -> int:
        """Return the id of the token with this text. Raises ConfigError if the tokenizer has no such token."""
        ids = self.encode(token)
        if len(ids) != 1:
            raise ConfigError(
                f"{self.folder}: the tokenizer has no token {token!r}, which {self.model_type} uses as a media "
                "placeholder"
            )
        return ids[0]

    def number(self, name: str, *sources: Mapping[str, Any], default: int | None = None) -> int:
        """Return the integer with this name from the first of ``sources`` that has the name.

        If no source has the name, return the default. If there is no default either, raise ConfigError.
        """
        for source in sources:
            if isinstance(value := source.get(name), int):
                return value
        if default is None:
            raise ConfigError(f"{self.folder}: no file of the model defines {name}, which is required for media")
        return default


def read_checkpoint(folder: Path, encode: Encode) -> Checkpoint:
    """Read the configuration files of a checkpoint's directory. Raises ConfigError if a file cannot be read."""
    processor = read_json(folder / "processor_config.json")
    preprocessor = read_json(folder / "preprocessor_config.json")
    nested = {name: section for name in _PROCESSORS if isinstance(section := processor.get(name), dict)}
    is_audio = "feature_extractor_type" in preprocessor
    is_image = not is_audio or "image_processor_type" in preprocessor
    return Checkpoint(
        folder=folder,
        config=read_json(folder / "config.json"),
        processor={name: value for name, value in processor.items() if name not in _PROCESSORS},
        image_processor=nested.get("image_processor", preprocessor if is_image else {}),
        video_processor=nested.get("video_processor", read_json(folder / "video_preprocessor_config.json")),
        feature_extractor=nested.get("feature_extractor", preprocessor if is_audio else {}),
        tokenizer=read_json(folder / "tokenizer_config.json"),
        encode=encode,
    )


# The code below chooses the family for a model type.

_PACKAGE = "penstock_frontend.processing.media.families"
_FAMILIES: Mapping[str, str] = {
    "llava": "llava:Llava",
    "llava_next": "llava:LlavaNext",
    "llava_onevision": "llava:LlavaOnevision",
    "internvl": "tiles:InternVL",
    "llama4": "llama4:Llama4",
    "aya_vision": "tiles:AyaVision",
    "mistral3": "pixtral:Pixtral",
    "idefics3": "tiles:Idefics3",
    "smolvlm": "tiles:Idefics3",
    "qwen2_vl": "qwen_vl:QwenVL",
    "qwen2_5_vl": "qwen_vl:QwenVL",
    "qwen3_5": "qwen_vl:QwenVL",
    "qwen3_5_moe": "qwen_vl:QwenVL",
    "qwen3_vl": "qwen_vl:QwenVL",
    "qwen3_vl_moe": "qwen_vl:QwenVL",
    "gemma3": "tiles:Gemma3",
    "glm4v": "glm:Glm4V",
    "glm46v": "glm:Glm4V",
    "glm4v_moe": "glm:Glm4V",
    "glm_ocr": "glm:Glm4V",
    "paddleocr_vl": "paddleocr:PaddleOCRVL",
    "qwen2_5_omni": "omni:QwenOmni",
    "qwen3_asr": "qwen3_asr:Qwen3ASR",
    "qwen3_omni_moe": "omni:QwenOmni",
    "gemma4": "gemma4:Gemma4",
    "gemma4_unified": "gemma4:Gemma4",
    "qwen2_audio": "audio:Qwen2Audio",
    "voxtral": "audio:Voxtral",
    "whisper": "whisper:Whisper",
}
"""Name of the module and of the class of each family, by the model type in config.json."""
_PIXTRAL = "pixtral:Pixtral"
"""Name of the module and of the class for every model with the Pixtral vision encoder."""
_REFUSED: Mapping[str, str] = {
    "mllama": "its text model attends to images in separate cross-attention layers",
    "paligemma": "its prompts use bidirectional attention",
    "paligemma2": "its prompts use bidirectional attention",
}


def load_family(folder: Path, encode: Encode) -> Family | None:
    """Return the family for the media of the checkpoint in ``folder``. Return None for a text-only model.

    ``encode`` tokenizes a text with the model's tokenizer.

    Raises ConfigError with the model's name if the model's media are not supported. Reasons are an unknown model type,
    and a processor that needs torchvision.
    """
    checkpoint = read_checkpoint(folder, encode)
    if not reads_media(checkpoint):
        return None
    model_type = checkpoint.model_type
    if (why := _REFUSED.get(model_type)) is not None:
        raise ConfigError(f"{folder}: media of {model_type} are not supported: {why}")
    if (name := _family_name(checkpoint)) is None:
        served = ", ".join(_FAMILIES)
        raise ConfigError(
            f"{folder}: media of {model_type} are not supported; supported model types are {served}; {TEXT_ALONE}, if its "
            "text model is supported"
        )
    module, _, attribute = name.partition(":")
    make: Callable[[Checkpoint], Family] = getattr(import_module(f"{_PACKAGE}.{module}"), attribute)
    return make(checkpoint)


def why_text_alone(folder: Path, encode: Encode) -> str:
    """Return the reason why a frontend whose setting media.enabled is false accepts only text. Return an empty string
    for a text-only model.
    """
    checkpoint = read_checkpoint(folder, encode)
    if not reads_media(checkpoint):
        return ""
    if _family_name(checkpoint) is None:
        return f"the media encoders of {checkpoint.model_type} models are not supported"
    return "media are disabled (media.enabled is false)"


def _family_name(checkpoint: Checkpoint) -> str | None:
    """Return the name of the module and of the class of the checkpoint's family. Return None if the model type is not
    known.
    """
    tower = checkpoint.sub_config("vision_config").get("model_type")
    return _PIXTRAL if tower == "pixtral" else _FAMILIES.get(checkpoint.model_type)


def reads_media(checkpoint: Checkpoint) -> bool:
    """Return whether the checkpoint's configuration has a vision or audio encoder."""
    return any(checkpoint.sub_config(name) for name in ("vision_config", "audio_config", _THINKER)) or (
        checkpoint.model_type in _FAMILIES or checkpoint.model_type in _REFUSED
    )
