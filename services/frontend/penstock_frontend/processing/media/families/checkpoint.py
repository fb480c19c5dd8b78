"""Reads what a checkpoint's files say of its media, and finds the model family that serves it."""

import json
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from penstock_common.errors import ConfigError
from penstock_frontend.processing.media.families.base import Encode, Family
from penstock_frontend.processing.prompts.tokenizer import read_json

_PROCESSORS = ("image_processor", "video_processor", "feature_extractor")


class Checkpoint(NamedTuple):
    """``config``: config.json; ``processor``: processor_config.json; ``image_processor``, ``video_processor``,
    ``feature_extractor``: their own configurations, wherever they stand; each empty where there is none. ``tokenizer``:
    tokenizer_config.json. ``encode``: of the model's tokenizer.
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
        """What transformers calls the model."""
        return str(self.config.get("model_type", ""))

    @property
    def processor_class(self) -> str:
        """What transformers calls the processor; empty where no file names it."""
        named = (self.processor, self.image_processor, self.feature_extractor, self.tokenizer)
        return next((str(each["processor_class"]) for each in named if each.get("processor_class")), "")

    @property
    def identity(self) -> bytes:
        """Stands for everything in the configuration that an item's tensors and rows depend on."""
        depends = {
            "model_type": self.model_type,
            "processor": self.processor,
            "image_processor": self.image_processor,
            "video_processor": self.video_processor,
            "feature_extractor": self.feature_extractor,
            "vision": self.config.get("vision_config"),
            "audio": self.config.get("audio_config"),
        }
        return json.dumps(depends, sort_keys=True, separators=(",", ":")).encode()

    def sub_config(self, name: str) -> Mapping[str, Any]:
        """A section of config.json, empty where it has none."""
        section = self.config.get(name)
        return section if isinstance(section, dict) else {}

    def token(self, name: str, default: str) -> str:
        """The text of a special token: as the tokenizer's configuration names it, else the processor's, else ``default``."""
        for named in (self.tokenizer, self.tokenizer.get("extra_special_tokens"), self.processor):
            value = named.get(name) if isinstance(named, dict) else None
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                return text
        return default

    def token_id(self, token: str) -> int:
        """The id of a token. Raises ConfigError where the tokenizer has none of that text."""
        ids = self.encode(token)
        if len(ids) != 1:
            raise ConfigError(
                f"{self.folder}: the tokenizer has no token {token!r}, which stands for media in prompts of {self.model_type}"
            )
        return ids[0]

    def number(self, name: str, *sources: Mapping[str, Any], default: int | None = None) -> int:
        """The first whole number of that name. Raises ConfigError where none has it and there is no default."""
        for source in sources:
            if isinstance(value := source.get(name), int):
                return value
        if default is None:
            raise ConfigError(f"{self.folder}: no file of the model says {name}, which its media depend on")
        return default


def read_checkpoint(folder: Path, encode: Encode) -> Checkpoint:
    """Read the files of a directory. Raises ConfigError for one that cannot be read."""
    processor = read_json(folder / "processor_config.json")
    preprocessor = read_json(folder / "preprocessor_config.json")
    nested = {name: section for name in _PROCESSORS if isinstance(section := processor.get(name), dict)}
    is_audio = "feature_extractor_type" in preprocessor
    return Checkpoint(
        folder=folder,
        config=read_json(folder / "config.json"),
        processor={name: value for name, value in processor.items() if name not in _PROCESSORS},
        image_processor=nested.get("image_processor", {} if is_audio else preprocessor),
        video_processor=nested.get("video_processor", read_json(folder / "video_preprocessor_config.json")),
        feature_extractor=nested.get("feature_extractor", preprocessor if is_audio else {}),
        tokenizer=read_json(folder / "tokenizer_config.json"),
        encode=encode,
    )


# The family of a checkpoint.

_PACKAGE = "penstock_frontend.processing.media.families"
_FAMILIES: Mapping[str, str] = {
    "llava": "llava:Llava",
    "llava_next": "llava:LlavaNext",
    "llava_onevision": "llava:LlavaOnevision",
    "internvl": "tiles:InternVL",
    "aya_vision": "tiles:AyaVision",
    "mistral3": "pixtral:Pixtral",
    "idefics3": "tiles:Idefics3",
    "smolvlm": "tiles:Idefics3",
    "qwen2_vl": "qwen_vl:QwenVL",
    "qwen2_5_vl": "qwen_vl:QwenVL",
    "qwen3_vl": "qwen_vl:QwenVL",
    "gemma3": "tiles:Gemma3",
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
