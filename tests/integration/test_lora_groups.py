"""Adapters on engines that divide the experts of a model: PEFT's tokens, and logits bitwise equal to one engine's."""

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock_common.lora_registry import LoraAdapter
from penstock_common.types.request import EngineCoreRequest
from penstock_common.types.sampling import SamplingParams
from tests.expert_matrix.family import ENGINE, NEW_TOKENS, changes, prompts
from tests.fakes.engines.expert_ranks import ExpertRanks, watch
from tests.fakes.engines.in_process import answer, build_engine
from tests.fakes.models.adapters import save_adapter
from tests.fakes.models.tiny_models import save_tiny_model
from tests.fakes.models.transformers_greedy import greedy_tokens

pytestmark = pytest.mark.slow

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "small": {"r": 2, "lora_alpha": 2, "target_modules": ATTENTION},
    "large": {"r": 24, "lora_alpha": 3, "use_rslora": True, "target_modules": [*ATTENTION, "lm_head"]},
}
ORDER = ("", "small", "large", "small", "large")
SECTIONS: dict[str, Any] = {**ENGINE, "lora": {"max_loras": 4}}


@pytest.mark.parametrize(("size", "kernels"), [(2, {}), (3, {}), (3, {"decoder": False}), (2, {"isa": "off"})])
def test_each_rank_serves_adapters_of_its_own_requests(size: int, kernels: dict[str, Any], tmp_path: Path) -> None:
    torch.set_num_threads(1)
    model: Any = save_tiny_model("qwen3_moe", tmp_path / "model", initializer_range=0.1, **changes("qwen3_moe"))
    models = {"": model}
    for seed, (name, settings) in enumerate(ADAPTERS.items()):
        models[name] = save_adapter(model, tmp_path / name, seed=seed, **settings)
    expected = {
        f"r{i}": greedy_tokens(models[name], prompt, NEW_TOKENS)
        for i, (name, prompt) in enumerate(zip(ORDER, prompts(), strict=True))
    }
    requests = [
        EngineCoreRequest(
            request_id=f"r{i}",
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS),
            lora=LoraAdapter(name, str(tmp_path / name), b"") if name else None,
        )
        for i, (name, prompt) in enumerate(zip(ORDER, prompts(), strict=True))
    ]
    one = build_engine(tmp_path / "model", kernels=kernels, **SECTIONS)
    alone = watch(one)
    assert answer(one, requests).tokens == expected
    one.shutdown()
    ranks = ExpertRanks(tmp_path / "model", size, kernels=kernels, **SECTIONS)
    busy = max(size - 1, 1)  # the last of three ranks has no requests and computes only tokens of the other ranks
    runs = ranks.generate([requests[rank::busy] if rank < busy else [] for rank in range(size)])
    assert {name: tokens for run in runs for name, tokens in run.tokens.items()} == expected
    if not kernels:
        assert ranks.rows() == {row.numpy().tobytes() for row in alone.logits}
    assert [len(engine.loras.cache) for engine in ranks.engines][busy:] == [0] * (size - busy)
