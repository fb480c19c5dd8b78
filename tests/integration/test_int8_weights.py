"""An engine with weights rounded to 8-bit integers gives the tokens of transformers with the same rounded weights."""

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock_enginecore.native.weights import round_linears
from tests.fakes.engines.in_process import build_engine
from tests.fakes.models.tiny_models import save_narrow_model, save_tiny_model
from tests.integration.test_native_parity import CACHE, computing, expected_tokens, greedy


@pytest.mark.parametrize(
    ("architecture", "save"),
    [
        ("llama", save_tiny_model),
        ("qwen3", save_narrow_model),
        ("gemma2", save_tiny_model),
        ("gemma4_moe", save_narrow_model),
        ("gemma4_shared", save_narrow_model),
        ("mixtral", save_narrow_model),
    ],
)
def test_tokens_are_those_of_the_rounded_weights(architecture: str, save: Any, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    model = save(architecture, tmp_path, hidden_size=64)
    with torch.no_grad():
        round_linears(model, but=model.get_output_embeddings())
    expected = expected_tokens(model)
    engine = build_engine(tmp_path, cache=CACHE, model={"quantization": "int8"})
    assert "int8 weights, attention, sampler" in computing(engine)
    assert engine.executor.collective_rpc("worker_info")[0]["dtype"] == "float32"
    assert greedy(engine) == expected
    engine.shutdown()
    chunked = build_engine(
        tmp_path, cache=CACHE, model={"quantization": "int8"}, scheduler={"max_num_batched_tokens": 7}
    )
    assert greedy(chunked) == expected
    chunked.shutdown()


def test_the_layers_take_a_quarter_of_the_memory(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    save_tiny_model("llama", tmp_path, hidden_size=64, intermediate_size=2048, num_hidden_layers=4)
    held = []
    for quantization in ("auto", "int8"):
        engine = build_engine(tmp_path, cache=CACHE, model={"quantization": quantization})
        held.append(engine.executor.collective_rpc("worker_info")[0]["weight_bytes"])
        engine.shutdown()
    assert 0.25 < held[1] / held[0] < 0.3
