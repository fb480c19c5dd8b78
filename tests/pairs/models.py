"""Tiny checkpoints for pairs of features, and requests to them."""

import json
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file, save_file

from penstock_common.lora_registry import LoraAdapter
from penstock_common.types.request import NO_SAMPLING, EngineCoreRequest, PoolingParams, PoolingTask
from penstock_common.types.sampling import SamplingParams, StructuredOutput
from tests.fakes.models.adapters import save_adapter
from tests.fakes.models.heads import random_head, save_head
from tests.fakes.models.mtp_layers import add_tensors, random_layer
from tests.fakes.models.pooling_models import save_pooling_model
from tests.fakes.models.quantized_models import FORMATS, is_quantized, save_quantized_model
from tests.fakes.models.small_tokenizers import byte_level
from tests.fakes.models.tiny_models import save_tiny_model
from tests.fakes.multimodal_models import make_image, save_multimodal_model
from tests.fakes.multimodal_prompts import PromptMaker
from tests.pairs.features import GROUPS, Feature

VOCAB_SIZE = 352
HIDDEN = 64
LENGTHS = (40, 70, 33, 50, 90, 20)
NEW_TOKENS = 14
REGEX = "[a-f]{2,4}-[0-9]{5}"
EOS = 1
FORM = "fp8-blocks"
"""Format of quantized checkpoints."""
ADAPTERS = {"small": 2, "large": 12}
_SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "vocab_size": VOCAB_SIZE,
    "num_hidden_layers": 2,
    "eos_token_id": EOS,
}
_MTP_SIZES = {"hidden_size": HIDDEN, "vocab_size": VOCAB_SIZE, "eos_token_id": EOS}
_LAYERS = ["sliding_attention", "full_attention"]
"""Layer types of a model with windows. It has two KV cache groups, which use one block pool."""


class Checkpoint:
    """A checkpoint in ``folder`` of a model that supports ``features``."""

    def __init__(self, features: frozenset[Feature], folder: Path) -> None:
        torch.set_num_threads(1)
        self.path = folder / "model"
        self.path.mkdir(parents=True)
        self.pools = Feature.POOLING in features
        self.has_media = Feature.MEDIA in features
        self._folder = folder
        self.model = self._save(features)
        if not self.has_media:
            byte_level().save(str(self.path / "tokenizer.json"))
        modules = ["q_proj", "v_proj", "o_proj"]
        task: dict[str, Any] = {"task_type": None} if self.pools else {}
        self._make_adapters: Callable[[], dict[str, LoraAdapter]] = lambda: {
            name: self._adapter(name, rank, seed, target_modules=modules, **task)
            for seed, (name, rank) in enumerate(ADAPTERS.items())
        }

    def _save(self, features: frozenset[Feature]) -> Any:
        if Feature.MTP in features and not self.pools:
            return self._save_mtp(features)
        if self.has_media:
            model = save_multimodal_model("gemma3" if Feature.WINDOWS in features else "qwen2_vl", self.path)
            if Feature.QUANTIZED in features:
                _quantize_text_model(self.path)
            return model
        family = "qwen3_moe" if features & GROUPS else "qwen3"
        if Feature.WINDOWS in features:
            family = "gpt_oss" if Feature.EXPERTS in features else "gemma3"
        sizes = _SIZES | ({"layer_types": _LAYERS} if family == "gemma3" else {})
        if Feature.QUANTIZED in features:
            dense = self._folder / "dense"
            return save_quantized_model(family, FORM, self.path, dense=dense, **sizes)
        if self.pools and family == "qwen3":
            return save_pooling_model("qwen3", self.path, hidden_size=HIDDEN, vocab_size=VOCAB_SIZE, head_dim=16)
        return save_tiny_model(family, self.path, **sizes)

    def _save_mtp(self, features: frozenset[Feature]) -> Any:
        """Write a model with a layer for multi-token prediction."""
        if self.has_media:
            model: Any = save_multimodal_model("qwen3_5", self.path)
        elif Feature.QUANTIZED in features:
            dense = self._folder / "dense"
            model = save_quantized_model("qwen3_5", FORM, self.path, dense=dense, **_MTP_SIZES)
        else:
            family = "qwen3_5_moe" if features & GROUPS else "qwen3_5"
            model = save_tiny_model(family, self.path, **_MTP_SIZES)
        tensors: dict[str, torch.Tensor | None] = {}
        for name, tensor in random_layer(model.config.get_text_config()).items():
            packs = Feature.QUANTIZED in features and is_quantized(name, tensor, FORM)
            tensors |= FORMATS[FORM].pack(name, tensor)[0] if packs else {name: tensor}
        add_tensors(self.path, tensors)
        return model

    def _adapter(self, name: str, rank: int, seed: int, **settings: Any) -> LoraAdapter:
        save_adapter(self.model, self._folder / name, seed=seed, r=rank, lora_alpha=2 * rank, **settings)
        return LoraAdapter(name, str(self._folder / name), b"")

    @cached_property
    def adapters(self) -> dict[str, LoraAdapter]:
        """Return the adapters by name."""
        return self._make_adapters()

    @cached_property
    def head(self) -> Path:
        """Write an EAGLE head with random weights, and return its folder."""
        vocab = int(self.model.config.get_text_config().vocab_size)
        size: dict[str, Any] = {"hidden": HIDDEN, "vocab": vocab}
        save_head(random_head("eagle", **size), self._folder / "head", "SafeAILab", **size)
        return self._folder / "head"

    def requests(self, features: frozenset[Feature]) -> list[EngineCoreRequest]:
        """Return greedy and seeded requests in turn.

        If the pair has constraints, every second request has one. If the pair has adapters, two of three requests have
        one.
        """
        made = self._media_requests() if self.has_media else self._text_requests()
        return [self._with(features, number, request) for number, request in enumerate(made)]

    def _text_requests(self) -> list[EngineCoreRequest]:
        generator = torch.Generator().manual_seed(4)
        prompts = [torch.randint(4, 300, (length,), generator=generator).tolist() for length in LENGTHS]
        prompts[3][:32] = prompts[1][:32]
        return [
            EngineCoreRequest(request_id=f"r{number}", prompt_token_ids=prompt, sampling_params=SamplingParams())
            for number, prompt in enumerate(prompts)
        ]

    def _media_requests(self) -> list[EngineCoreRequest]:
        make = PromptMaker(self.path, self.model).make
        one, two = make_image(40, 40, 1), make_image(70, 36, 2)
        prompts = [
            make("Compare ", one, " with ", two, " please."),
            make("How many of the animals in the picture are asleep?"),
            make("Look: ", two),
            make(two, one, "are two."),
        ]
        return [prompt.request(f"r{number}", NEW_TOKENS) for number, prompt in enumerate(prompts)]

    def _with(self, features: frozenset[Feature], number: int, request: EngineCoreRequest) -> EngineCoreRequest:
        lora = None
        if Feature.LORA in features and number % 3:
            lora = self.adapters[list(ADAPTERS)[number % 3 - 1]]
        if self.pools:
            params = PoolingParams(task=PoolingTask.EMBED, normalize=False)
            return msgspec.structs.replace(request, sampling_params=NO_SAMPLING, pooling_params=params, lora=lora)
        settings: dict[str, Any] = {"temperature": 0.0}
        if number % 2:
            settings = {"temperature": 0.9, "seed": number, "top_k": 40}
        if Feature.STRUCTURED in features and number % 4 < 2:
            settings |= {"structured_output": StructuredOutput(regex=REGEX), "max_tokens": 3 * NEW_TOKENS}
        else:
            settings |= {"ignore_eos": True, "max_tokens": NEW_TOKENS}
        return msgspec.structs.replace(request, sampling_params=SamplingParams(**settings), lora=lora)


def _quantize_text_model(path: Path) -> None:
    """Quantize the text model's weights in a multimodal checkpoint. The encoders' weights stay unchanged."""
    stored = {}
    for name, tensor in load_file(path / "model.safetensors").items():
        quantized = "visual" not in name and is_quantized(name, tensor, FORM)
        stored |= FORMATS[FORM].pack(name, tensor)[0] if quantized else {name: tensor}
    save_file(stored, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": dict(FORMATS[FORM].config)}))
