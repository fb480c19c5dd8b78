"""Drafts for prompts with images: greedy tokens equal transformers' tokens without drafts."""

from pathlib import Path

import pytest
import torch

from tests.integration.test_multimodal_engine import Case, run

METHODS = ("ngram", "suffix", "draft_model")
SOON = ("qwen2_vl", "draft_model")


@pytest.mark.parametrize(
    ("family", "method"),
    [
        pytest.param(family, method, marks=() if (family, method) == SOON else pytest.mark.slow)
        for family in ("llava", "qwen2_vl", "qwen3_vl", "gemma3")
        for method in METHODS
    ],
)
def test_drafts_change_no_token_behind_images(family: str, method: str, tmp_path: Path) -> None:
    """Uses the same checkpoint without its encoders as draft model.

    The draft model sees placeholder tokens in place of images, at text positions.
    """
    torch.set_num_threads(1)
    case = Case(family, tmp_path)
    model = {"model": str(tmp_path)} if method == "draft_model" else {}
    speculative = {"method": method, "num_speculative_tokens": 3, "adaptive": False, **model}
    answers = run(case.engine(cache={"block_size": 16}, speculative=speculative), case.requests())
    assert answers.tokens == case.expected
    # The other methods find few drafts, because models with random weights seldom repeat tokens.
    if method == "draft_model":
        assert answers.stats.spec_decoding_stats is not None
        assert answers.stats.spec_decoding_stats.num_draft_tokens > 0
