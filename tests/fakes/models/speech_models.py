"""Whisper checkpoints with random weights, the token ids of their tokenizers, and the tokens of transformers."""

import copy
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers
import torch
from tokenizers import processors
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.whisper.generation_whisper import WhisperGenerationMixin

from penstock_common.types.media import MultiModalFeature, TensorData
from penstock_common.types.request import EngineCoreRequest
from penstock_common.types.sampling import SamplingParams
from tests.fakes.models.small_tokenizers import byte_level

LANGUAGES = ("en", "zh", "de", "es", "ru", "ko", "fr", "ja", "pt", "tr")
END, START, PREVIOUS, SOUND = "<|endoftext|>", "<|startoftranscript|>", "<|startofprev|>", "<|startoflm|>"
TRANSLATE, TRANSCRIBE, NO_SPEECH, NO_TIMESTAMPS = "<|translate|>", "<|transcribe|>", "<|nospeech|>", "<|notimestamps|>"
TIMESTAMPS = tuple(f"<|{step * 0.02:.2f}|>" for step in range(1501))
SOUND_POSITIONS = 1504
"""Number of positions at the start of a prompt that stand for the sound."""
SIZES: dict[str, dict[str, int]] = {
    "small": {"d_model": 64, "layers": 2, "heads": 4, "ffn": 96, "positions": 448},
    "tiny": {"d_model": 384, "layers": 4, "heads": 6, "ffn": 1536, "positions": 448},
    "base": {"d_model": 512, "layers": 6, "heads": 8, "ffn": 2048, "positions": 448},
}
"""Shapes: a small one for tests, and those of openai/whisper-tiny and openai/whisper-base."""


def save_speech_model(
    directory: Path, *, seed: int = 0, size: str = "small", english_only: bool = False, **changes: Any
) -> WhisperForConditionalGeneration:
    """Write a Whisper checkpoint with random weights to ``directory``, with the files of checkpoints on the hub. Return
    the model in float32. ``changes``: changed fields of the config.

    The vocabulary has few texts but all special tokens, in the order of Whisper's vocabulary.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = _save_tokenizer(directory, english_only=english_only)
    bins = changes.get("num_mel_bins", 80)
    # The constructors and methods of these classes have no types.
    make_extractor: Any = WhisperFeatureExtractor
    make_rules: Any = GenerationConfig
    make_extractor(feature_size=bins).save_pretrained(directory)
    ids: Any = tokenizer.convert_tokens_to_ids
    shape = SIZES[size]
    both = {
        f"{side}_{name}": shape[key]
        for side in ("encoder", "decoder")
        for name, key in (("layers", "layers"), ("attention_heads", "heads"), ("ffn_dim", "ffn"))
    }
    settings: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "num_mel_bins": bins,
        "d_model": shape["d_model"],
        **both,
        "max_target_positions": shape["positions"],
        "bos_token_id": ids(END),
        "eos_token_id": ids(END),
        "pad_token_id": ids(END),
        "decoder_start_token_id": ids(START),
        "architectures": ["WhisperForConditionalGeneration"],
        **changes,
    }
    torch.manual_seed(seed)
    model: Any = WhisperForConditionalGeneration(WhisperConfig(**settings))
    model.eval()
    _randomize(model)
    rules: dict[str, Any] = {
        "is_multilingual": not english_only,
        "bos_token_id": ids(END),
        "eos_token_id": ids(END),
        "pad_token_id": ids(END),
        "decoder_start_token_id": ids(START),
        "prev_sot_token_id": ids(PREVIOUS),
        "no_timestamps_token_id": ids(NO_TIMESTAMPS),
        "max_initial_timestamp_index": 50,
        "begin_suppress_tokens": [ids("h"), ids(END)],
        "suppress_tokens": [ids("z"), ids(START), ids(PREVIOUS), ids(SOUND), ids(NO_SPEECH)],
        "max_length": shape["positions"],
        "return_timestamps": False,
    }
    if not english_only:
        rules["lang_to_id"] = {f"<|{language}|>": ids(f"<|{language}|>") for language in LANGUAGES}
        rules["task_to_id"] = {"transcribe": ids(TRANSCRIBE), "translate": ids(TRANSLATE)}
    model.generation_config = make_rules(**rules)
    model.save_pretrained(directory)
    made: WhisperForConditionalGeneration = model
    return made


@torch.no_grad()
def _randomize(model: WhisperForConditionalGeneration) -> None:
    """Randomize the weights, with a variance so large that the tokens depend on the whole sound."""
    width = model.config.d_model
    for name, parameter in model.named_parameters():
        if "layer_norm" in name or "encoder.embed_positions" in name:
            continue
        if parameter.dim() == 1 or "embed_tokens" in name:
            parameter.normal_(0.0, 0.1)
        elif "embed_positions" in name:
            parameter.normal_(0.0, 1.0)
        else:
            sharp = "encoder_attn" in name and ("q_proj" in name or "k_proj" in name)
            parameter.normal_(0.0, (6.0 if sharp else 1.5) / width**0.5)


def _save_tokenizer(directory: Path, *, english_only: bool) -> PreTrainedTokenizerFast:
    base = byte_level()
    languages = [f"<|{language}|>" for language in LANGUAGES]
    special = [END, START, *languages, TRANSLATE, TRANSCRIBE, SOUND, PREVIOUS, NO_SPEECH, NO_TIMESTAMPS]
    base.add_special_tokens([tokenizers.AddedToken(token, special=True) for token in special])
    base.add_tokens([tokenizers.AddedToken(token, special=False) for token in TIMESTAMPS])
    around = [START, NO_TIMESTAMPS] if english_only else [START, languages[0], TRANSCRIBE, NO_TIMESTAMPS]
    base.post_processor = processors.TemplateProcessing(
        single=[*around, "$A", END],
        special_tokens=[(token, base.token_to_id(token)) for token in (*around, END)],
    )
    make: Any = PreTrainedTokenizerFast
    tokenizer: PreTrainedTokenizerFast = make(
        tokenizer_object=base, bos_token=END, eos_token=END, unk_token=END, pad_token=END, model_max_length=1024
    )
    tokenizer.save_pretrained(directory)
    file = directory / "tokenizer_config.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**content, "processor_class": "WhisperProcessor"}), encoding="utf-8")
    return tokenizer


@dataclass(frozen=True)
class SpeechPrompt:
    """Prompt with a sound.

    Attributes:
        text: Token ids after the sound.
        sound: Samples of the sound, at 16 kHz.
        features: Spectrogram of the sound, float32 ``[1, bins, 3000]``.
    """

    model: WhisperForConditionalGeneration
    placeholder: int
    text: Sequence[int]
    sound: npt.NDArray[np.float32]
    features: torch.Tensor

    def request(self, request_id: str, max_tokens: int, prior: Sequence[int] = (), **params: Any) -> EngineCoreRequest:
        """Return a greedy request whose output no token ends, and which continues after the output ``prior``."""
        return EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=[self.placeholder] * SOUND_POSITIONS + list(self.text),
            prior_output_token_ids=list(prior),
            sampling_params=SamplingParams(
                **{"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, **params}
            ),
            mm_features=[self.feature()],
        )

    def feature(self) -> MultiModalFeature:
        """Return the feature of the sound, as frontends send it."""
        data = self.features.numpy()
        return MultiModalFeature(
            modality="audio",
            identifier=hashlib.sha256(data.tobytes()).hexdigest(),
            offset=0,
            length=self.model.config.max_source_positions,
            data={"input_features": TensorData("float32", tuple(data.shape), data.tobytes())},
        )

    @cached_property
    def _encoded(self) -> torch.Tensor:
        states: torch.Tensor = self.model.model.encoder(self.features).last_hidden_state
        return states

    @torch.no_grad()
    def logits(self, more: Sequence[int] = ()) -> torch.Tensor:
        """Return transformers' logits ``[tokens, vocab]`` for the tokens of the prompt's text, followed by ``more``."""
        output = self.model(
            encoder_outputs=BaseModelOutput(last_hidden_state=self._encoded),
            decoder_input_ids=torch.tensor([[*self.text, *more]]),
            use_cache=False,
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    @torch.no_grad()
    def expected(self, count: int) -> list[int]:
        """Return the next tokens that transformers generates greedily, with the checkpoint's rules for tokens."""
        config: Any = copy.deepcopy(self.model.generation_config)
        config.return_timestamps = self.text[-1] != config.no_timestamps_token_id
        config.no_speech_threshold = None
        make: Any = WhisperGenerationMixin._retrieve_logit_processors
        processors = make(self.model, config, None, len(self.text), 1, "cpu")
        found: list[int] = []
        for _ in range(count):
            scores = self.logits(found)[-1:]
            for processor in processors:
                scores = processor(torch.tensor([[*self.text, *found]]), scores)
            found.append(int(scores.argmax()))
        return found


class SpeechPrompts:
    """Makes prompts for the checkpoint at ``directory``, which is ``model`` in transformers."""

    def __init__(self, directory: Path, model: WhisperForConditionalGeneration) -> None:
        self._model = model
        self.tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
        load: Any = WhisperFeatureExtractor.from_pretrained
        self._extractor = load(directory)

    def ids(self, text: str) -> list[int]:
        """Return the token ids of a text with special tokens."""
        found: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return found

    def make(self, sound: npt.NDArray[np.float32], text: str) -> SpeechPrompt:
        """Return the prompt of a sound at 16 kHz, followed by ``text`` with special tokens."""
        features = self._extractor(sound, sampling_rate=16_000, return_tensors="pt").input_features
        (placeholder,) = self.ids(SOUND)
        return SpeechPrompt(self._model, placeholder, self.ids(text), sound, features)
