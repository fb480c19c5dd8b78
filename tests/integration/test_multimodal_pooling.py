"""Embeddings of prompts with images equal those of transformers' own multimodal model."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from penstock_common.types.request import NO_SAMPLING, PoolingParams, PoolingTask
from penstock_enginecore.models.errors import ModelLoadError
from tests.fakes.engines.in_process import build_engine
from tests.fakes.models.pooling_models import assert_close, pool_requests
from tests.fakes.multimodal_models import make_image, save_multimodal_model
from tests.fakes.multimodal_prompts import MediaPrompt, PromptMaker

EMBED = PoolingParams(task=PoolingTask.EMBED, normalize=False)
FAMILIES = ("llava", "qwen3_vl", "gemma3")


@torch.inference_mode()
def expected(prompt: MediaPrompt) -> torch.Tensor:
    """Return the last layer's hidden state of the last token."""
    state: torch.Tensor = prompt.model.model(**prompt.inputs).last_hidden_state[0, -1]
    return state


@pytest.mark.parametrize("sections", [{}, {"scheduler": {"max_num_batched_tokens": 20, "max_num_encoder_tokens": 1}}])
@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_with_images_are_embedded(family: str, sections: dict[str, Any], tmp_path: Path) -> None:
    torch.set_num_threads(1)
    make = PromptMaker(tmp_path, save_multimodal_model(family, tmp_path)).make
    first, second = make_image(40, 40, 1), make_image(70, 36, 2)
    prompts = [make("Compare ", first, " with ", second), make("Only text."), make(second, " is wide.")]
    requests = [
        msgspec.structs.replace(prompt.request(str(i), 1), sampling_params=NO_SAMPLING, pooling_params=EMBED)
        for i, prompt in enumerate(prompts)
    ]
    engine = build_engine(tmp_path, model={"task": "embed"}, **sections)
    assert_close(pool_requests(engine, requests), [expected(prompt) for prompt in prompts])


def test_models_with_towers_classify_nothing(tmp_path: Path) -> None:
    save_multimodal_model("llava", tmp_path)
    with pytest.raises(ModelLoadError, match="models with vision or audio encoders cannot classify yet"):
        build_engine(tmp_path, model={"task": "classify"})
