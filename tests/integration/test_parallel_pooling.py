"""Pooling models over several workers: transformers' embeddings and probabilities, and refused configurations."""

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock_common.lora_registry import LoraAdapter
from penstock_common.types.request import EngineCoreRequest, PoolingParams, PoolingTask
from penstock_enginecore.models.errors import ModelLoadError
from tests.fakes.engines.in_process import build_engine
from tests.fakes.engines.worker_threads import use_threads
from tests.fakes.models.adapters import save_adapter
from tests.fakes.models.pooling_models import DECODERS, VOCAB_SIZE, assert_close, pool, save_pooling_model, tensor

pytestmark = pytest.mark.slow

SECTIONS: dict[str, Any] = {
    "scheduler": {"max_num_batched_tokens": 9},
    "executor": {"tensor_parallel_size": 2},
    "kernels": {"isa": "baseline"},
}
"""Chunked prompts, and the baseline instruction set.

With wider vectors, the packed weights of these small models would have more rows of padding than of weights.
"""


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


@pytest.mark.parametrize("kernels", [{"isa": "baseline"}, {"isa": "off"}])
@pytest.mark.parametrize("head", ["", "ForSequenceClassification"])
def test_adapters_are_split_with_the_layers(head: str, kernels: dict[str, Any], tmp_path: Path) -> None:
    given: dict[str, Any] = {"head": head, "num_labels": 3} if head else {}
    model = save_pooling_model("qwen3", tmp_path / "model", **given)
    task = PoolingTask.CLASSIFY if head else PoolingTask.EMBED
    names, models, requests = ("", "large", "small", "", "large"), {"": model}, []
    for seed, (name, rank) in enumerate((("small", 2), ("large", 16))):
        settings = {"target_modules": ["q_proj", "v_proj", "o_proj", "down_proj"], "task_type": None}
        models[name] = save_adapter(model, tmp_path / name, seed=seed, r=rank, lora_alpha=rank, **settings)
    for i, (name, prompt) in enumerate(zip(names, prompts(), strict=True)):
        lora = LoraAdapter(name, str(tmp_path / name), b"") if name else None
        params = PoolingParams(task=task)
        requests.append(EngineCoreRequest(request_id=str(i), prompt_token_ids=prompt, pooling_params=params, lora=lora))
    sections = {**SECTIONS, "kernels": kernels, "lora": {"max_loras": 4}}
    engine = build_engine(tmp_path / "model", model={} if head else {"task": "embed"}, **sections)
    for request in requests:
        engine.add(engine.preprocess("test", request))
    found: dict[str, torch.Tensor] = {}
    while engine.has_requests:
        for frame in engine.step(lambda: None).values():
            found |= {output.request_id: tensor(output.pooling_output) for output in frame.outputs}
    engine.shutdown()
    with torch.inference_mode():
        made = [models[name](torch.tensor([prompt])) for name, prompt in zip(names, prompts(), strict=True)]
    wanted = [each.logits[0].softmax(-1) if head else each.last_hidden_state[0][-1] for each in made]
    assert_close([found[str(i)] for i in range(len(names))], wanted)


def test_an_encoder_without_a_plan_is_refused_by_name(tmp_path: Path) -> None:
    save_pooling_model("bert", tmp_path)
    with pytest.raises(ModelLoadError, match=r"executor.tensor_parallel_size: BertModel has no tensor-parallel plan"):
        build_engine(tmp_path, **SECTIONS)
