"""A tiny mixture-of-experts model on disk with transformers' outputs, for tests of groups of processes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.fakes.models.small_tokenizers import byte_level

Expected = list[list[int]]
"""The tokens of each prompt's answer."""


def save_expert_model(folder: Path, prompts: Sequence[list[int]], count: int, **changes: Any) -> tuple[Path, Expected]:
    """Write a checkpoint with a tokenizer to ``folder``. Returns the folder and transformers' ``count`` greedy tokens
    per prompt.

    Args:
        changes: Fields of the model's configuration.
    """
    # Imported here, so that only the test processes that need the model load torch.
    from tests.fakes.models.tiny_models import save_tiny_model
    from tests.fakes.models.transformers_greedy import greedy_tokens

    made = save_tiny_model("qwen3_moe", folder, **changes)
    byte_level().save(str(folder / "tokenizer.json"))
    return folder, [greedy_tokens(made, prompt, count) for prompt in prompts]
