"""Creation of the component for transcription calls from a model's files."""

import json
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from penstock_common.errors import ConfigError
from penstock_frontend.config import MediaConfig, ModelConfig
from penstock_frontend.speech.calls import SpeechCalls
from penstock_frontend.speech.loading import load_speech
from tests.fakes.frontends.speech_model import ScriptedSpeech


def load(folder: Path, config: dict[str, Any], **media: Any) -> SpeechCalls | None:
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    llm: Any = ScriptedSpeech()
    service: Any = None
    model = ModelConfig(path=str(folder), served_model_name="m")
    return load_speech(model, MediaConfig(**media), llm, service, CollectorRegistry())


def test_only_whisper_models_transcribe(tmp_path: Path) -> None:
    assert load(tmp_path, {"model_type": "voxtral"}, max_audio_seconds=1.0) is None
    assert load(tmp_path, {"model_type": "whisper", "vocab_size": 51865}) is not None


@pytest.mark.parametrize(
    ("media", "text"),
    [
        ({"max_audio_seconds": 29.0}, "media.max_audio_seconds is 29; a Whisper model needs at least 30"),
        ({"max_bytes": 1_000_000}, "media.max_bytes is 1000000; a Whisper model needs at least 1921024 bytes"),
    ],
)
def test_limits_below_a_window_are_refused(tmp_path: Path, media: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        load(tmp_path, {"model_type": "whisper", "vocab_size": 51865}, **media)
