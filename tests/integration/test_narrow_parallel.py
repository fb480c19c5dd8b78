"""bfloat16 checkpoints over several workers and ranks: the tokens of float32, because hidden states are float32."""

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock_common.types.sampling import SamplingParams
from tests.expert_matrix.family import changes
from tests.fakes.engines.expert_ranks import ExpertRanks
from tests.fakes.engines.in_process import build_engine
from tests.fakes.engines.instruction_sets import runnable
from tests.fakes.engines.worker_threads import use_threads
from tests.fakes.models.tiny_models import save_narrow_model
from tests.integration.test_native_parity import CACHE, NEW_TOKENS, expected_tokens, greedy, prompts

SHARED: dict[str, dict[str, int]] = {"gemma3n": {}, "gemma4_shared": {"vocab_size_per_layer_input": 333}}
"""Changes of model types whose layers share keys and values, so that they have a fixed number of layers."""


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("architecture", "tensor", "pipeline", "part"),
    [
        ("mixtral", 2, 1, "linear"),
        ("qwen3", 2, 1, "decoder"),
        ("gemma2", 1, 2, "decoder"),
        ("gemma3", 2, 1, "decoder"),
        ("gemma3n", 2, 1, "linear"),
        ("gemma4_shared", 2, 1, "decoder"),
        pytest.param(
            *("mixtral", 1, 2, "decoder"),
            marks=pytest.mark.xfail(
                "amx" in runnable(), reason="with AMX one token of this model differs", strict=False
            ),
        ),
        ("qwen3", 1, 2, "decoder"),
        ("cohere", 2, 1, "decoder"),
        ("glm4", 2, 1, "linear"),
        ("gpt_neox", 2, 1, "linear"),
        ("gpt_neox", 1, 2, "decoder"),
        ("granite", 1, 2, "decoder"),
        ("phi", 1, 2, "decoder"),
    ],
)
def test_workers_that_share_a_bfloat16_checkpoint_give_the_tokens_of_float32(
    architecture: str, tensor: int, pipeline: int, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    layers = SHARED.get(architecture, {"num_hidden_layers": 4})
    model = save_narrow_model(architecture, tmp_path, hidden_size=64, vocab_size=333, **layers)
    expected = expected_tokens(model)
    use_threads(monkeypatch)
    executor: dict[str, Any] = {
        "kind": "multiproc",
        "tensor_parallel_size": tensor,
        "pipeline_parallel_size": pipeline,
    }
    engine = build_engine(tmp_path, cache=CACHE, executor=executor)
    infos = engine.executor.collective_rpc("worker_info")
    assert all(part in info["computing"] and info["dtype"] == "float32" for info in infos)
    # Gemma 3n has small matrices, which packed weights pad to tiles. Tiles for AMX are largest.
    padded = 2.0 if "amx" in runnable() else 1.7
    num_parameters = sum(p.numel() for p in model.parameters())
    assert max(info["weight_bytes"] for info in infos) < (padded if architecture == "gemma3n" else 1.6) * num_parameters
    assert greedy(engine) == expected
    engine.shutdown()


@pytest.mark.parametrize("dispatch", ["allgather", "alltoall"])
def test_ranks_sharing_experts_of_a_bfloat16_checkpoint_give_float32_tokens(dispatch: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    expected = expected_tokens(save_narrow_model("qwen3_moe", tmp_path, **changes("qwen3_moe")))
    ranks = ExpertRanks(tmp_path, 2, dispatch=dispatch, cache=CACHE)
    wanted = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
    requests = [(str(i), prompt, wanted) for i, prompt in enumerate(prompts())]
    runs = ranks.generate([requests[:3], requests[3:]])
    assert [run.tokens[str(i)] for run in runs for i in range(len(expected)) if str(i) in run.tokens] == expected
    for engine in ranks.engines:
        engine.shutdown()
