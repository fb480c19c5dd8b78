"""Adapters with tensor and pipeline parallelism, in steps that mix adapters.

Tokens and log-probabilities equal PEFT's. Tokens also equal those of one worker.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock_common.lora_registry import LoraAdapter
from penstock_common.types.outputs import Logprobs
from penstock_common.types.request import EngineCoreRequest
from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.core.engine_core import EngineCore
from tests.fakes.engines.in_process import CLIENT, build_engine
from tests.fakes.engines.worker_threads import use_threads
from tests.fakes.models.adapters import save_adapter
from tests.fakes.models.tiny_models import save_tiny_model
from tests.fakes.models.transformers_greedy import greedy_tokens
from tests.fakes.patience import PATIENCE

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_processes")]

KERNELS: dict[str, dict[str, Any]] = {"decoder": {}, "linear": {"decoder": False}, "modules": {"isa": "off"}}
CASES = [
    (2, 1, "decoder"),
    (4, 1, "decoder"),
    (1, 2, "decoder"),
    (1, 3, "decoder"),
    (2, 2, "decoder"),
    (2, 1, "linear"),
    (4, 1, "linear"),
    (2, 2, "linear"),
    (2, 1, "modules"),
    (1, 2, "modules"),
]
"""Tensor parallel size, pipeline parallel size, and implementation of the layers."""
SECTIONS: dict[str, Any] = {
    # Chunked prompts, preempted requests, cached prompts, and a block size that the kernels support.
    "scheduler": {"max_num_batched_tokens": 29},
    "cache": {"num_blocks": 17, "block_size": 16},
    "lora": {"max_loras": 8},
}
ADAPTERS: dict[str, dict[str, Any]] = {
    "one": {"r": 1, "lora_alpha": 1},
    "five": {"r": 5, "lora_alpha": 4, "target_modules": ["v_proj", "down_proj", "gate_proj", "lm_head"]},
    "large": {"r": 24, "lora_alpha": 3, "use_rslora": True, "rank_pattern": {"o_proj": 7}},
    # "head" changes only layers of the last stage, and "first" only layers of the first stage.
    "head": {"r": 3, "lora_alpha": 2, "target_modules": ["lm_head"]},
    "first": {"r": 8, "lora_alpha": 8, "target_modules": ["q_proj", "up_proj"], "layers_to_transform": [0]},
}
ORDER = ("", "one", "five", "", "large", "head", "first", "five", "large")
PROMPT_LENGTHS = (1, 17, 34, 40, 3, 34, 5, 20, 33)
NEW_TOKENS = 8
EXACT = 1e-4
VOCAB_SIZE = 323  # not divisible by four workers


@dataclass
class Saved:
    """A checkpoint at ``path``, and its adapters and PEFT models by adapter name. The base model's name is ``""``."""

    path: Path
    adapters: dict[str, LoraAdapter]
    models: dict[str, Any]

    def requests(self) -> list[EngineCoreRequest]:
        generator = torch.Generator().manual_seed(3)
        found = [torch.randint(1, VOCAB_SIZE, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]
        found[5][:32] = found[2][:32]  # the same prompt with a different adapter
        found[8][:32] = found[2][:32]
        params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, logprobs=3, prompt_logprobs=2, ignore_eos=True)
        return [
            EngineCoreRequest(
                request_id=f"r{i}", prompt_token_ids=prompt, sampling_params=params, lora=self.adapters.get(name)
            )
            for i, (name, prompt) in enumerate(zip(ORDER, found, strict=True))
        ]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Saved]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield save("qwen3", tmp_path_factory.mktemp("qwen3"), hidden_size=64, vocab_size=VOCAB_SIZE)
    torch.set_num_threads(before)


def save(family: str, folder: Path, **changes: Any) -> Saved:
    model = save_tiny_model(family, folder / "model", num_hidden_layers=4, initializer_range=0.1, **changes)
    adapters, models = {}, {"": model}
    for seed, (name, settings) in enumerate(ADAPTERS.items()):
        models[name] = save_adapter(model, folder / name, seed=seed, **settings)
        adapters[name] = LoraAdapter(name, str(folder / name), b"")
    made = Saved(folder / "model", adapters, models)
    for name, request in zip(ORDER, made.requests(), strict=True):
        tokens = [greedy_tokens(models[each], request.prompt_token_ids, NEW_TOKENS) for each in ("", name)]
        assert (tokens[0] == tokens[1]) == (not name), "an adapter says something else"
    return made


@dataclass
class Found:
    """One request's output tokens, and the log-probabilities of the output and of the prompt."""

    tokens: list[int] = field(default_factory=list)
    logprobs: Logprobs = field(default_factory=Logprobs)
    of_prompt: Logprobs = field(default_factory=Logprobs)

    @property
    def numbers(self) -> list[float]:
        return [*self.of_prompt.logprobs, *self.logprobs.logprobs]


def run(engine: EngineCore, requests: list[EngineCoreRequest]) -> dict[str, Found]:
    assert engine.scheduler.reset_prefix_cache()
    found = {request.request_id: Found() for request in requests}
    for request in requests:
        engine.add(engine.preprocess(CLIENT, request))
    while engine.has_requests:
        for frame in engine.step(lambda: None).values():
            for output in frame.outputs:
                assert output.error is None, output.error
                own = found[output.request_id]
                own.tokens += output.new_token_ids
                own.logprobs.extend(output.new_logprobs or Logprobs())
                own.of_prompt.extend(output.new_prompt_logprobs or Logprobs())
        if engine.stalled and engine.has_requests:  # the engine is reading adapters
            assert engine.queues.get(block=True, timeout=PATIENCE)
    return found


@pytest.fixture(scope="module")
def of_one_worker(saved: Saved) -> dict[str, Found]:
    engine = build_engine(saved.path, **SECTIONS)
    found = run(engine, saved.requests())
    engine.shutdown()
    return found


@pytest.mark.parametrize(("tensor", "pipeline", "kernels"), CASES)
def test_mixed_steps_give_what_peft_and_one_worker_give(
    tensor: int,
    pipeline: int,
    kernels: str,
    saved: Saved,
    of_one_worker: dict[str, Found],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_threads(monkeypatch)
    executor = {"kind": "multiproc", "tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}
    engine = build_engine(saved.path, kernels=KERNELS[kernels], executor=executor, **SECTIONS)
    for info in engine.executor.collective_rpc("worker_info"):
        assert kernels == "modules" or kernels in info["computing"]
    requests = saved.requests()
    crowd = run(engine, requests)
    for request, name in zip(requests, ORDER, strict=True):
        found = crowd[request.request_id]
        assert found.tokens == greedy_tokens(saved.models[name], request.prompt_token_ids, NEW_TOKENS), name
        check_scores(saved.models[name], request.prompt_token_ids, found)
        assert found.tokens == of_one_worker[request.request_id].tokens
    for request in requests[::-1]:
        alone = run(engine, [request])[request.request_id]
        assert alone.tokens == crowd[request.request_id].tokens
        if kernels == "decoder":
            assert alone.numbers == crowd[request.request_id].numbers, "to the last bit"
    check_held(engine, saved, tensor, pipeline)
    engine.shutdown()


def test_sleeping_workers_read_their_parts_again(
    saved: Saved, of_one_worker: dict[str, Found], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_threads(monkeypatch)
    engine = build_engine(saved.path, executor={"kind": "multiproc", "tensor_parallel_size": 2}, **SECTIONS)
    before = run(engine, saved.requests())
    for level in (1, 2):
        engine.executor.collective_rpc("sleep", [level])
        engine.executor.collective_rpc("wake_up", [["weights", "kv_cache"]])
        after = run(engine, saved.requests())
        assert {name: found.numbers for name, found in after.items()} == {
            name: found.numbers for name, found in before.items()
        }
    assert {name: found.tokens for name, found in after.items()} == {
        name: found.tokens for name, found in of_one_worker.items()
    }
    engine.shutdown()


def check_held(engine: EngineCore, saved: Saved, tensor: int, pipeline: int) -> None:
    """Check that all layers of each adapter are listed, and that its size is the bytes on one worker."""
    for name, given in saved.adapters.items():
        asked = engine.loras.add_lora(name, given.path)
        while not asked.done():
            time.sleep(0.01)
            engine.loras.take()
        held = asked.result()
        whole = saved.models[name].peft_config["default"]
        layers = saved.models[name].base_model.model.named_modules()
        adapted = {layer: module for layer, module in layers if hasattr(module, "lora_A")}
        assert set(held.modules) == set(adapted)
        assert held.rank == whole.r
        total = sum(4 * sum(p.numel() for p in module.parameters() if p.requires_grad) for module in adapted.values())
        assert (held.num_bytes == total) == (tensor * pipeline == 1 or (tensor == 1 and name in ("head", "first"))), (
            name
        )
        assert held.num_bytes <= total


def check_scores(model: Any, prompt: list[int], found: Found) -> None:
    with torch.inference_mode():
        exact = model(input_ids=torch.tensor([prompt + found.tokens])).logits[0].log_softmax(dim=-1)
    scored = [(row, found.of_prompt, row) for row in range(len(prompt) - 1)]
    scored += [(len(prompt) - 1 + i, found.logprobs, i) for i in range(len(found.tokens))]
    for row, numbers, i in scored:
        for entry in range(numbers.offsets[i], numbers.offsets[i + 1]):
            assert numbers.logprobs[entry] == pytest.approx(float(exact[row, numbers.token_ids[entry]]), abs=EXACT)
    assert (len(found.of_prompt), len(found.logprobs)) == (len(prompt) - 1, NEW_TOKENS)
