"""Models that are pooled, over several workers: transformers' vectors and probabilities, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock_common.types.pooling import PoolingParams, PoolingTask
from penstock_enginecore.models.errors import ModelLoadError
from tests.fakes.engines.in_process import build_engine
from tests.fakes.engines.worker_threads import use_threads
from tests.fakes.models.pooling_models import DECODERS, VOCAB_SIZE, assert_close, pool, save_pooling_model

pytestmark = pytest.mark.slow

SECTIONS: dict[str, Any] = {
    "scheduler": {"max_num_batched_tokens": 9},
    "executor": {"tensor_parallel_size": 2},
    "kernels": {"isa": "baseline"},
}
"""Prompts in pieces. The widest vectors' packed weights have more rows of zeros than these models have others."""


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(4, VOCAB_SIZE, (n,), generator=generator).tolist() for n in (5, 1, 17, 40, 5)]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    use_threads(monkeypatch)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("family", DECODERS)
def test_vectors_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    model = save_pooling_model(family, tmp_path)
    engine = build_engine(tmp_path, model={"task": "embed"}, **SECTIONS)
    with torch.inference_mode():
        expected = [model(torch.tensor([prompt])).last_hidden_state[0][-1] for prompt in prompts()]
    assert_close(pool(engine, prompts(), PoolingParams(task=PoolingTask.EMBED)), expected)
    first, second = engine.executor.collective_rpc("worker_info")
    assert first["weight_bytes"] == second["weight_bytes"] < 0.65 * sum(each.nbytes for each in model.parameters())
    engine.shutdown()


def test_a_classifier_gives_the_probabilities_of_its_own_head(tmp_path: Path) -> None:
    model = save_pooling_model("qwen3", tmp_path, head="ForSequenceClassification", num_labels=3)
    engine = build_engine(tmp_path, **SECTIONS)
    with torch.inference_mode():
        expected = [model(torch.tensor([prompt])).logits[0].softmax(dim=-1) for prompt in prompts()]
    assert_close(pool(engine, prompts(), PoolingParams(task=PoolingTask.CLASSIFY)), expected)
    engine.shutdown()


def test_an_encoder_without_a_plan_is_refused_by_name(tmp_path: Path) -> None:
    save_pooling_model("bert", tmp_path)
    with pytest.raises(ModelLoadError, match=r"executor.tensor_parallel_size: BertModel has no plan"):
        build_engine(tmp_path, **SECTIONS)
