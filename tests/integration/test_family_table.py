"""Models that people deploy are served with transformers' greedy tokens, or refused with a reason and a remedy."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.native.weights import round_linears
from tests.fakes.engines.in_process import build_engine, generate
from tests.fakes.models.published_models import (
    MAX_LENGTH,
    REFUSED,
    SERVED,
    VOCAB_SIZE,
    save_published_config,
    save_published_model,
)
from tests.fakes.models.transformers_greedy import greedy_tokens

NEW_TOKENS = 20
"""Tokens of an output. It crosses the end of a span of a recurrent layer."""
PROMPT_LENGTHS = (1, 15, 34, 70)
assert max(PROMPT_LENGTHS) + NEW_TOKENS < MAX_LENGTH
REMEDY = (
    r"docs/reference/models\.md|docs/guides/multimodal\.md|give a decoder-only model|"
    r"supported model types are|of those, .* are served|--no-media"
)
"""Texts of which a refusal has at least one."""
BLOCK = 16
"""Block size that recurrent layers need."""


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, VOCAB_SIZE, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS]


@pytest.mark.quick(
    *("Llama-3.1-8B", "Qwen3.5-0.8B", "Granite-4.0-h-350m", "LFM2-350M", "Nemotron-3-Nano"),
    *("Kimi-Linear-48B-A3B", "Jamba-1.5-Mini"),
)
@pytest.mark.parametrize("name", SERVED)
def test_a_served_model_gives_the_tokens_of_transformers(name: str, tmp_path: Path) -> None:
    """A ragged batch runs in steps of 24 tokens, and again with cached prefixes."""
    torch.set_num_threads(1)
    model: Any = save_published_model(name, tmp_path)
    expected = [greedy_tokens(model, prompt, NEW_TOKENS) for prompt in prompts()]
    assert len({token for tokens in expected for token in tokens}) > NEW_TOKENS // 2, "the outputs hardly vary"
    assert len({tuple(tokens) for tokens in expected}) == len(expected), "the outputs do not depend on the prompts"
    engine = build_engine(
        tmp_path,
        model={"dtype": "float32", "max_model_len": MAX_LENGTH},
        cache={"block_size": BLOCK, "num_blocks": 256},
        scheduler={"max_num_batched_tokens": 24},
    )
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
    try:
        for turn in ("first", "again"):
            requests = [(f"{turn}{index}", prompt, params) for index, prompt in enumerate(prompts())]
            run = generate(engine, requests)
            assert [run.tokens[key] for key, _, _ in requests] == expected
        assert run.stats.prefix_cache_hits > 0
    finally:
        engine.shutdown()


@pytest.mark.quick("Nemotron-3-Nano")
@pytest.mark.parametrize(
    "name", ["Granite-4.0-h-tiny", "LFM2-350M", "Nemotron-3-Nano", "Qwen3.5-27B-text", "Zamba2-1.2B"]
)
def test_recurrent_layers_with_weights_of_8_bits_give_the_tokens_of_the_rounded_weights(
    name: str, tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    model: Any = save_published_model(name, tmp_path)
    with torch.no_grad():
        round_linears(model, but=model.get_output_embeddings())
    expected = [greedy_tokens(model, prompt, NEW_TOKENS) for prompt in prompts()]
    engine = build_engine(
        tmp_path,
        model={"dtype": "float32", "max_model_len": MAX_LENGTH, "quantization": "int8"},
        cache={"block_size": BLOCK, "num_blocks": 256},
    )
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
    try:
        run = generate(engine, [(str(index), prompt, params) for index, prompt in enumerate(prompts())])
        assert [run.tokens[str(index)] for index in range(len(expected))] == expected
    finally:
        engine.shutdown()


@pytest.mark.quick("Zamba-7B", "DeepSeek-V3.2", "T5-large", "Doge-160M", "PaliGemma-2-3B")
@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_model_names_a_reason_and_a_remedy(name: str, tmp_path: Path) -> None:
    save_published_config(name, tmp_path)
    with pytest.raises(ModelLoadError, match=f" is not supported: .*({REFUSED[name][1]})") as refusal:
        build_engine(tmp_path, model={"load_format": "dummy"}, cache={"block_size": BLOCK})
    assert re.search(REMEDY, str(refusal.value)), f"no remedy in: {refusal.value}"
