"""What a checkpoint's files say of its media."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from penstock_common.errors import ConfigError
from penstock_frontend.processing.media.families.base import Encode
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
