"""Tiny models with adapters that PEFT has saved, and PEFT's own answers: tokens and all log-probabilities."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock_common.lora_registry import LoraAdapter
from penstock_common.types.outputs import Logprobs
from penstock_common.types.request import EngineCoreRequest
from penstock_common.types.sampling import SamplingParams
from tests.fakes.models.adapters import load_adapter, save_adapter
from tests.fakes.models.tiny_models import VOCAB_SIZE, save_tiny_model
from tests.fakes.models.transformers_greedy import greedy_tokens

ATOL = 1e-4
"""Maximum difference between a log-probability and PEFT's."""
MARGIN = 1e-3
"""Minimum difference in log-probability between the likeliest and the next token, at each position of PEFT's answers.

It is five times the difference that two values within ``ATOL`` can have, so all tokens must be equal. Prompts with
closer answers are replaced before any engine sees them.
"""
NEW_TOKENS = 12
PROMPT_LENGTHS = (1, 7, 34, 16)
BASE = ""
ADAPTERS: dict[str, dict[str, Any]] = {
    "rank 1": {"r": 1, "lora_alpha": 2},
    "rank 4 and the head": {"r": 4, "lora_alpha": 8, "head": True},
    "rank 16, rsLoRA": {"r": 16, "lora_alpha": 8, "use_rslora": True},
    "rank 64": {"r": 64, "lora_alpha": 128},
    "a rank and an alpha of its own": {
        "r": 8,
        "lora_alpha": 8,
        "rank_pattern": {r".*layers\.0\..*": 3},
        "alpha_pattern": {r".*layers\.1\..*": 24},
    },
}
"""PEFT's settings by adapter. ``head`` has the lm_head in addition to all other linear layers."""


@dataclass(frozen=True, slots=True)
class Question:
    """A ``prompt`` for an ``adapter``, and PEFT's answer."""

    adapter: str
    prompt: list[int]
    tokens: list[int]


class AdaptedModel:
    """A tiny checkpoint in ``folder``, with one adapter of each kind in ``ADAPTERS``."""

    def __init__(self, architecture: str, folder: Path, modules: list[str] | None = None, **changes: Any) -> None:
        """Create the model.

        Args:
            architecture: One of the tiny models.
            folder: Folder for the files.
            modules: Names of the layers that adapters update besides the head. None means all linear layers.
            changes: Changed fields of the model's config.
        """
        self.architecture = architecture
        self.path = folder / "model"
        self.base = save_tiny_model(architecture, self.path, **changes)
        self.models: dict[str, Any] = {BASE: self.base}
        self.adapters: dict[str, LoraAdapter] = {}
        for seed, (name, given) in enumerate(ADAPTERS.items()):
            settings, path = dict(given), folder / f"adapter-{seed}"
            if modules is not None:
                settings["target_modules"] = modules
            if settings.pop("head", False):
                settings["target_modules"] = [*modules, "lm_head"] if modules is not None else self._linear_layers()
            save_adapter(self.base, path, seed=seed, **settings)
            self.models[name] = load_adapter(self.base, path)
            self.adapters[name] = LoraAdapter(name, str(path))
        self.questions = self._ask()

    def _linear_layers(self) -> list[str]:
        named = self.base.named_modules()
        return sorted({name.rpartition(".")[2] for name, layer in named if isinstance(layer, torch.nn.Linear)})

    def _ask(self) -> list[Question]:
        """Return two questions per adapter and four for the base model. Each prompt is used in three questions."""
        generator = torch.Generator().manual_seed(1)
        asked: list[Question] = []
        names = list(self.models)
        for turn, length in enumerate(PROMPT_LENGTHS):
            group = [BASE, *(names[1 + (turn * 5 + i) % len(ADAPTERS)] for i in (0, 1 + turn % 3, 4))]
            while True:
                prompt = torch.randint(1, VOCAB_SIZE, (length,), generator=generator).tolist()
                answers = [greedy_tokens(self.models[name], prompt, NEW_TOKENS) for name in group]
                if all(self.margin(n, prompt, a) >= MARGIN for n, a in zip(group, answers, strict=True)):
                    break
            asked += [Question(name, prompt, tokens) for name, tokens in zip(group, answers, strict=True)]
        return asked

    @torch.inference_mode()
    def logprobs(self, adapter: str, prompt: list[int], tokens: list[int]) -> torch.Tensor:
        """Return PEFT's log-probabilities at the positions of ``tokens``, float32 ``[tokens, vocabulary]``."""
        logits = self.models[adapter](torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        return torch.log_softmax(logits.float(), dim=-1)

    def margin(self, adapter: str, prompt: list[int], tokens: list[int]) -> float:
        """Return the smallest difference in log-probability between the most likely and the second most likely token."""
        top = self.logprobs(adapter, prompt, tokens).topk(2, dim=-1).values
        return float((top[:, 0] - top[:, 1]).min())

    def request(self, number: int, prefix: str = "r", **sampling: Any) -> EngineCoreRequest:
        """Return the request of question ``number``. By default it asks for all log-probabilities of the answer."""
        question = self.questions[number]
        params = {"temperature": 0.0, "max_tokens": NEW_TOKENS, "logprobs": -1, **sampling}
        return EngineCoreRequest(
            request_id=f"{prefix}{number}",
            prompt_token_ids=question.prompt,
            sampling_params=SamplingParams(**params),
            lora=self.adapters.get(question.adapter),
        )

    def requests(self, prefix: str = "r", **sampling: Any) -> list[EngineCoreRequest]:
        """Return the requests of all questions."""
        return [self.request(number, prefix, **sampling) for number in range(len(self.questions))]


def rows_of(logprobs: Logprobs, vocab_size: int = VOCAB_SIZE) -> torch.Tensor:
    """Return the log-probabilities of consecutive positions by token, float32 ``[positions, vocabulary]``."""
    rows = torch.full((len(logprobs), vocab_size), torch.nan)
    for i in range(len(logprobs)):
        start, end = logprobs.offsets[i : i + 2]
        rows[i, logprobs.token_ids[start:end]] = torch.tensor(logprobs.logprobs[start:end])
    return rows


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Check that all values are within ``ATOL``. Returns the largest difference."""
    assert found.shape == expected.shape
    difference = float((found - expected).abs().max())
    assert difference == pytest.approx(0.0, abs=ATOL)
    return difference
