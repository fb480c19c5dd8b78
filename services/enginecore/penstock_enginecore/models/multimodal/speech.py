"""Whisper checkpoints, and the refusal of all other encoder-decoder models. The decoder of Whisper is served like a
text model, and the encoder computes the sound at the start of each prompt.

The first positions of a prompt stand for the sound, so that the engine schedules, caches and moves the sound like other
media. Their number is the number of encoder outputs, rounded up to complete KV cache blocks.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PretrainedConfig, PreTrainedModel, WhisperConfig, WhisperForConditionalGeneration

from penstock_enginecore.models.dtypes import Dtypes, widen_all
from penstock_enginecore.models.errors import ModelLoadError, refused_model
from penstock_enginecore.models.multimodal.composite import Separated
from penstock_enginecore.models.multimodal.encoder import TowerEncoder
from penstock_enginecore.models.multimodal.families.base import Checkpoint
from penstock_enginecore.models.multimodal.families.whisper import Whisper
from penstock_enginecore.models.placement import place

ALIGNMENT = 32
"""The number of positions for a sound is a multiple of this number of tokens. Block sizes must divide the number of
positions.
"""
_ENCODER_ATTENDS = "sdpa"


def sound_positions(config: WhisperConfig) -> int:
    """Return the number of positions at the start of a prompt that stand for the sound."""
    return -(-config.max_source_positions // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class SpeechCheckpoint:
    """Whisper checkpoint. The loader uses an object of this class in the same way as a ``Composite``."""

    config: WhisperConfig

    @classmethod
    def of(cls, config: PretrainedConfig, *, with_towers: bool) -> "SpeechCheckpoint | None":
        """Return the checkpoint of a configuration, or None for another model type.

        Raises ModelLoadError if the checkpoint cannot be served, or if ``with_towers``, the setting
        ``multimodal.enabled``, is false. Raises ModelLoadError for other models with an encoder and a decoder.
        """
        reason: str | None = (
            f"{config.model_type} models are encoder-decoder models, and of these only Whisper is supported"
        )
        if isinstance(config, WhisperConfig):
            reason = _unsupported(config)
        elif not _is_encoder_decoder(config):
            return None
        if reason is not None:
            raise refused_model(", ".join(config.architectures or ()) or config.model_type, reason)
        if not with_towers:
            raise ModelLoadError(
                "multimodal.enabled is false, but each prompt of a Whisper model has a sound; set multimodal.enabled to true"
            )
        return cls(cast("WhisperConfig", config))

    @property
    def text_config(self) -> WhisperConfig:
        """Configuration of the decoder, which is that of the checkpoint."""
        return self.config

    @property
    def text_class(self) -> type[PreTrainedModel]:
        """Class of the model in transformers."""
        return WhisperForConditionalGeneration

    @property
    def sound_positions(self) -> int:
        """See ``sound_positions``."""
        return sound_positions(self.config)

    @property
    def max_len(self) -> int:
        """Length of the longest sequence in tokens, including the positions for the sound."""
        return self.sound_positions + int(self.config.max_target_positions)

    @property
    def _model_mapping(self) -> Mapping[type[PretrainedConfig], type[PreTrainedModel]]:
        return {type(self.config): self.text_class}

    def from_pretrained(self, *, attn_implementation: str, **options: Any) -> Any:  # noqa: ARG002
        """Return the model, in the same way as transformers' auto classes. Only the encoder uses transformers'
        attention.
        """
        make: Any = self.text_class.from_pretrained
        return make(attn_implementation=_ENCODER_ATTENDS, **options)

    def from_config(
        self,
        config: Any,
        *,
        attn_implementation: str,  # noqa: ARG002
        trust_remote_code: bool,  # noqa: ARG002 - the class is transformers' own
        **options: Any,
    ) -> Any:
        """Return the model without weights, in the same way as transformers' auto classes."""
        make: Any = self.text_class._from_config
        return make(config, attn_implementation=_ENCODER_ATTENDS, **options)

    def separate(self, whole: Any) -> Separated:
        """Remove the encoder from ``whole``, and return the decoder and the encoder. In the decoder's layers, one linear
        layer ``qkv_proj`` replaces the three that compute queries, keys and values of text.
        """
        towers = torch.nn.Module()
        towers.encoder = whole.model.encoder
        del whole.model._modules["encoder"]
        for layer in whole.model.decoder.layers:
            _join_projections(layer.self_attn)
        return Separated(whole, towers)

    def encoder(
        self, towers: Any, directory: Path, max_tokens: int, device: torch.device, dtypes: Dtypes
    ) -> TowerEncoder:
        """Return the encoder on ``device``. The parameters are those of ``Composite.encoder``."""
        widen_all(towers)
        place(towers, str(directory), device)
        checkpoint = Checkpoint(self.config, directory, max_tokens, device)
        return TowerEncoder(Whisper(towers, checkpoint), device, dtypes.computed)


@torch.no_grad()
def _join_projections(attention: Any) -> None:
    """Replace the projections of an attention module by one linear layer. Its outputs are the queries, the keys and the
    values.
    """
    parts = [attention._modules.pop(name) for name in ("q_proj", "k_proj", "v_proj")]
    weight = torch.cat([part.weight for part in parts])
    bias = torch.cat([torch.zeros_like(parts[0].bias) if part.bias is None else part.bias for part in parts])
    joined = torch.nn.Linear(weight.shape[1], weight.shape[0], device="meta")
    joined.weight = torch.nn.Parameter(weight, requires_grad=False)
    joined.bias = torch.nn.Parameter(bias, requires_grad=False)
    attention.qkv_proj = joined


def _is_encoder_decoder(config: PretrainedConfig) -> bool:
    """Return whether the decoder of a model, or of its text model, reads the outputs of an encoder by cross-attention."""
    text = getattr(config, "text_config", None)
    return any(bool(getattr(part, "is_encoder_decoder", False)) for part in (config, text))


def _unsupported(config: WhisperConfig) -> str | None:
    """Return why a Whisper checkpoint cannot be served, or None if it can."""
    named = config.architectures or [WhisperForConditionalGeneration.__name__]
    if named != [WhisperForConditionalGeneration.__name__]:
        return f"of Whisper's classes, only {WhisperForConditionalGeneration.__name__} is supported"
    if getattr(config, "quantization_config", None) is not None:
        return "its weights are quantized, which is not supported for Whisper; use a checkpoint with dense weights"
    if config.max_target_positions > config.max_source_positions:
        return (
            f"max_target_positions is {config.max_target_positions}; it must be at most max_source_positions, "
            f"{config.max_source_positions}"
        )
    if config.d_model % config.decoder_attention_heads:
        return (
            f"d_model is {config.d_model}, which {config.decoder_attention_heads} decoder_attention_heads do not divide"
        )
    return None
