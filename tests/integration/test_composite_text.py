"""Text models of composites whose media encoders are unknown give the greedy tokens of transformers' whole model."""

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock_common.errors import ConfigError, InvalidArgument
from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.models.errors import ModelLoadError
from penstock_local import LLM
from tests.fakes.composite_text_models import COMPOSITES, VOCAB_SIZE, save_composite
from tests.fakes.engines.in_process import build_engine, generate
from tests.fakes.models.transformers_greedy import greedy_tokens
from tests.fakes.multimodal_models import make_image

COUNT = 8
PROMPT_LENGTHS = (1, 7, 34)
IN_ONE_CALL = ("gemma4", "gemma4_e2b", "gemma4_moe", "gemma4_unified")
"""Composites whose text model one kernel call per step must compute."""
TEXT_ALONE = {"enabled": False}
"""Setting of the engine's section ``multimodal``."""


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, VOCAB_SIZE, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS]


@pytest.mark.quick("cohere2_vision", "kimi_k25")
@pytest.mark.parametrize("name", COMPOSITES)
def test_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Runs a ragged batch in steps of seven tokens, and again with cached prefixes."""
    torch.set_num_threads(1)
    model: Any = save_composite(name, tmp_path)
    expected = [greedy_tokens(getattr(model, "thinker", model), prompt, COUNT) for prompt in prompts()]
    assert len({token for tokens in expected for token in tokens}) > COUNT, "all tokens are alike"
    engine = build_engine(
        tmp_path,
        model={"dtype": "float32"},
        multimodal=TEXT_ALONE,
        cache={"block_size": 16, "num_blocks": 128},
        scheduler={"max_num_batched_tokens": 7},
    )
    [info] = engine.executor.collective_rpc("worker_info")
    assert "(decoder" in info["computing"] or name not in IN_ONE_CALL
    wanted = SamplingParams(temperature=0.0, max_tokens=COUNT)
    for turn in ("first", "again"):
        requests = [(f"{turn}{index}", prompt, wanted) for index, prompt in enumerate(prompts())]
        run = generate(engine, requests)
        assert [run.tokens[key] for key, _, _ in requests] == expected
    engine.shutdown()


def test_media_encoders_that_are_unknown_name_the_remedy(tmp_path: Path) -> None:
    save_composite("cohere2_vision", tmp_path)
    with pytest.raises(
        ModelLoadError,
        match=r"Cohere2VisionForConditionalGeneration is not supported: its media encoders are not supported; .*; "
        r"to serve its text model alone, use --no-media \(penstock serve\), media=False \(LLM\), or multimodal.enabled: false",
    ):
        build_engine(tmp_path)


def test_an_llm_without_media_takes_only_text_and_says_why(tmp_path: Path) -> None:
    model = save_composite("cohere2_vision", tmp_path)
    image = make_image(8, 8)
    prompt = prompts()[1]
    with LLM(str(tmp_path), media=False, kv_cache_memory="16MiB", num_threads=1) as llm:
        (answer,) = llm.generate([prompt], {"temperature": 0, "max_tokens": COUNT}, progress=False)
        assert list(answer.outputs[0].token_ids) == greedy_tokens(model, prompt, COUNT)
        with pytest.raises(
            InvalidArgument, match="accepts only text: the media encoders of cohere2_vision models are not supported"
        ):
            llm.generate({"prompt": "a", "multi_modal_data": {"image": image}}, progress=False)
        with pytest.raises(
            InvalidArgument, match="accepts only text: the media encoders of cohere2_vision models are not supported"
        ):
            llm.chat([{"role": "user", "content": [{"type": "image", "image": image}]}], progress=False)
    with pytest.raises(ConfigError, match=r"media of cohere2_vision are not supported; .* media=False \(LLM\)"):
        LLM(str(tmp_path), kv_cache_memory="16MiB", num_threads=1)
