"""Which encoder-decoder checkpoints are served, and why others are refused."""

from typing import Any

import pytest
from transformers import AutoConfig, LlamaConfig, WhisperConfig

from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.models.multimodal.speech import SpeechCheckpoint

OTHERS = (
    *("t5", "mt5", "umt5", "bart", "mbart", "marian", "m2m_100", "pegasus", "pegasus_x", "blenderbot", "led"),
    *("prophetnet", "fsmt", "bigbird_pegasus", "plbart", "nllb-moe", "florence2", "speech_to_text", "seamless_m4t"),
    *("moonshine", "pix2struct", "t5gemma", "switch_transformers", "longt5"),
)


def of(config: Any, *, with_towers: bool = True) -> SpeechCheckpoint | None:
    return SpeechCheckpoint.of(config, with_towers=with_towers)


def test_whisper_is_served_and_decoders_are_not_its_business() -> None:
    checkpoint = of(WhisperConfig())
    assert checkpoint is not None
    assert (checkpoint.sound_positions, checkpoint.max_len) == (1504, 1952)
    assert of(LlamaConfig()) is None


@pytest.mark.parametrize("kind", OTHERS)
def test_other_encoder_decoder_models_are_refused_by_name(kind: str) -> None:
    config = AutoConfig.for_model(kind)
    with pytest.raises(
        ModelLoadError, match=f"^{kind} is not supported: {kind} models are encoder-decoder models, and of"
    ):
        of(config)


@pytest.mark.parametrize("kind", ["speech-encoder-decoder", "vision-encoder-decoder", "encoder-decoder"])
def test_pairs_of_models_are_refused(kind: str) -> None:
    parts = {"encoder": {"model_type": "wav2vec2"}, "decoder": {"model_type": "gpt2"}}
    with pytest.raises(ModelLoadError, match="of these only Whisper is supported"):
        of(AutoConfig.for_model(kind, is_encoder_decoder=True, **parts))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["WhisperForAudioClassification"]}, "only WhisperForConditionalGeneration is supported"),
        ({"architectures": ["WhisperForCausalLM"]}, "^WhisperForCausalLM is not supported"),
        ({"quantization_config": {"quant_method": "fp8"}}, "use a checkpoint with dense weights"),
        ({"max_target_positions": 1600}, "max_target_positions is 1600; it must be at most max_source_positions, 1500"),
        ({"decoder_attention_heads": 7}, "d_model is 384, which 7 decoder_attention_heads do not divide"),
    ],
)
def test_whisper_checkpoints_that_cannot_be_served(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        of(WhisperConfig(**{"d_model": 384, **changes}))


def test_whisper_without_media_is_refused() -> None:
    with pytest.raises(ModelLoadError, match="set multimodal.enabled to true"):
        of(WhisperConfig(), with_towers=False)
