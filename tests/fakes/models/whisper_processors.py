"""transformers' logits processors for Whisper's rules, as an oracle of tests."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList
from transformers.models.whisper.generation_whisper import WhisperGenerationMixin

from penstock_enginecore.models.whisper_rules import WhisperRules

Processors = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Function from token ids ``[rows, tokens]`` and logits ``[rows, vocab]`` to the processed logits."""


def processors_of(rules: WhisperRules, prompt_length: int, *, timed: bool) -> Processors:
    """Return the processors that transformers' Whisper makes for a prompt of ``prompt_length`` tokens. ``timed`` says
    whether the output has timestamps.
    """
    config: Any = GenerationConfig(
        suppress_tokens=list(rules.suppressed),
        begin_suppress_tokens=list(rules.suppressed_first),
        eos_token_id=rules.end,
        no_timestamps_token_id=rules.no_timestamps,
        max_initial_timestamp_index=rules.max_first_timestamp,
        return_timestamps=timed,
        no_speech_threshold=None,
    )
    make: Any = WhisperGenerationMixin._retrieve_logit_processors
    processors: Any = LogitsProcessorList(make(None, config, None, prompt_length, 1, "cpu") or [])
    found: Processors = processors
    return found
