"""Creation of the component for transcription calls, if the model is a Whisper model."""

from prometheus_client import CollectorRegistry

from penstock_common.errors import ConfigError
from penstock_frontend.calls.generate import AsyncLLM
from penstock_frontend.config import MediaConfig, ModelConfig
from penstock_frontend.metrics import SpeechMetrics
from penstock_frontend.processing.media.service import MediaService
from penstock_frontend.processing.media.windows import MAX_SECONDS
from penstock_frontend.processing.prompts.tokenizer import read_json, resolve
from penstock_frontend.speech.calls import SpeechCalls
from penstock_frontend.speech.prompts import load_tokens

_MODEL_TYPE = "whisper"
_BYTES_PER_SECOND = 64_000
_HEADER = 1024


def load_speech(
    model: ModelConfig, media: MediaConfig, llm: AsyncLLM, service: MediaService, registry: CollectorRegistry
) -> SpeechCalls | None:
    """Return the component for transcription calls, or None for a model of another type.

    Raises ConfigError if a window of speech would exceed a limit on media, or if the tokenizer lacks a control token.
    """
    folder = resolve(model)
    config = read_json(folder / "config.json")
    if config.get("model_type") != _MODEL_TYPE:
        return None
    _check(media)
    tokens = load_tokens(llm.tokenizer, config, read_json(folder / "generation_config.json"))
    metrics = SpeechMetrics(registry, model.name)
    return SpeechCalls(llm, service, tokens, metrics, max_windows=media.max_speech_windows)


def _check(media: MediaConfig) -> None:
    """Raise ConfigError if the limits on media do not allow a window of 30 s."""
    if media.max_audio_seconds < MAX_SECONDS:
        raise ConfigError(
            f"media.max_audio_seconds is {media.max_audio_seconds:g}; a Whisper model needs at least {MAX_SECONDS:g}"
        )
    least = int(MAX_SECONDS * _BYTES_PER_SECOND) + _HEADER
    if media.max_bytes < least:
        raise ConfigError(f"media.max_bytes is {media.max_bytes}; a Whisper model needs at least {least} bytes")
