"""Tensor and pipeline parallel workers, with the kernels and with the model's modules.

Tokens and log-probabilities equal transformers'. Steps mix requests with all kinds of parameters.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from penstock_common.types.outputs import Logprobs
from penstock_common.types.request import EngineCoreRequest
from penstock_common.types.sampling import SamplingParams, StructuredOutput
from penstock_enginecore.core.engine_core import EngineCore
from penstock_enginecore.forward.cuda.sampler import DeviceLauncher
from tests.fakes.engines.in_process import CLIENT, build_engine
from tests.fakes.engines.late_device import LastMoment, choose_on_device
from tests.fakes.engines.worker_threads import use_threads
from tests.fakes.models.tiny_models import VOCAB_SIZE, save_tiny_model
from tests.fakes.models.torch_sampling import TorchSampling
from tests.fakes.models.transformers_greedy import greedy_tokens

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_processes")]

TOKENIZER = Path(__file__).resolve().parents[2] / "examples/demo_model/penstock-tiny/tokenizer.json"
KERNELS = {"decoder": {}, "linear": {"decoder": False}, "modules": {"isa": "off"}}
CASES = [
    (2, 1, "decoder"),
    (4, 1, "decoder"),
    (1, 2, "decoder"),
    (2, 2, "decoder"),
    (2, 1, "linear"),
    (2, 2, "linear"),
    (2, 1, "modules"),
]
"""Tensor parallel size, pipeline parallel size, and implementation of the layers."""
SECTIONS: dict[str, Any] = {
    # Chunked prompts, preempted requests, cached prompts, and a block size that the kernels support.
    "scheduler": {"max_num_batched_tokens": 19},
    "cache": {"num_blocks": 11, "block_size": 16},
}
PROMPT_LENGTHS = (1, 3, 17, 34, 40, 34, 5)
NEW_TOKENS = 10
EXACT = 1e-4


class Result:
    """One request's output tokens, and the log-probabilities of the output and of the prompt."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.of_output, self.of_prompt = Logprobs(), Logprobs()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Any]]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("qwen3")
    shutil.copy(TOKENIZER, path)
    # The size of the vocabulary is not divisible by four workers.
    vocab = Tokenizer.from_file(str(TOKENIZER)).get_vocab_size() | 3
    yield path, save_tiny_model("qwen3", path, num_hidden_layers=4, vocab_size=vocab, hidden_size=64, eos_token_id=1)
    torch.set_num_threads(before)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    found = [torch.randint(1, VOCAB_SIZE, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]
    found[5][:32] = found[3][:32]
    return found


def mixed() -> list[SamplingParams]:
    return [
        SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS),
        SamplingParams(temperature=0.8, seed=3, max_tokens=NEW_TOKENS, top_p=0.9),
        SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, logprobs=3, prompt_logprobs=1),
        SamplingParams(temperature=0.9, seed=4, max_tokens=NEW_TOKENS, repetition_penalty=1.2, logit_bias={5: 2.0}),
        SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, allowed_token_ids=(7, 300, 319)),
        SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS),
        SamplingParams(
            temperature=0.0, max_tokens=NEW_TOKENS, structured_output=StructuredOutput(regex="[0-9]{3}-[a-f]{5}")
        ),
    ]


def run(engine: EngineCore, params: list[SamplingParams]) -> dict[str, Result]:
    results = {}
    for i, (prompt, each) in enumerate(zip(prompts(), params, strict=True)):
        request = EngineCoreRequest(request_id=f"r{i}", prompt_token_ids=prompt, sampling_params=each)
        engine.add(engine.preprocess(CLIENT, request))
        results[f"r{i}"] = Result()
    while engine.has_requests:
        stepped = engine.step(lambda: None)
        if not stepped:
            engine.queues.get(block=True, timeout=0.01)  # a grammar may still be compiling
        for outputs in stepped.values():
            for output in outputs.outputs:
                result = results[output.request_id]
                result.tokens += output.new_token_ids
                result.of_output.extend(output.new_logprobs or Logprobs())
                result.of_prompt.extend(output.new_prompt_logprobs or Logprobs())
    return results


def check_scores(model: Any, prompt: list[int], result: Result) -> None:
    with torch.inference_mode():
        exact = model(torch.tensor([prompt + result.tokens])).logits[0].log_softmax(dim=-1)
    scored = [(row, result.of_prompt, row) for row in range(len(prompt) - 1)]
    scored += [(len(prompt) - 1 + i, result.of_output, i) for i in range(len(result.tokens))]
    for row, found, i in scored:
        for entry in range(found.offsets[i], found.offsets[i + 1]):
            assert found.logprobs[entry] == pytest.approx(float(exact[row, found.token_ids[entry]]), abs=EXACT)
    assert (len(result.of_prompt), len(result.of_output)) == (len(prompt) - 1, NEW_TOKENS)


@pytest.fixture(scope="module")
def of_one_worker(saved: tuple[Path, Any]) -> dict[str, list[int]]:
    engine = build_engine(saved[0], **SECTIONS)
    tokens = {name: result.tokens for name, result in run(engine, mixed()).items()}
    engine.shutdown()
    return tokens


@pytest.mark.parametrize(("tensor", "pipeline", "kernels"), CASES)
def test_mixed_steps_give_what_transformers_and_one_worker_give(
    tensor: int,
    pipeline: int,
    kernels: str,
    saved: tuple[Path, Any],
    of_one_worker: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, model = saved
    use_threads(monkeypatch)
    executor = {"kind": "multiproc", "tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}
    engine = build_engine(path, kernels=KERNELS[kernels], executor=executor, **SECTIONS)
    for info in engine.executor.collective_rpc("worker_info"):
        assert kernels == "modules" or kernels in info["computing"]
    for _ in range(2):  # the second run has prefix hits
        results = run(engine, mixed())
        assert {name: result.tokens for name, result in results.items()} == of_one_worker
        for greedy in (0, 2, 5):
            assert results[f"r{greedy}"].tokens == greedy_tokens(model, prompts()[greedy], NEW_TOKENS)
        check_scores(model, prompts()[2], results["r2"])
    engine.shutdown()


@pytest.mark.parametrize("steps", [1, 2])
def test_devices_that_choose_tokens_each_have_all_logits(
    steps: int, saved: tuple[Path, Any], of_one_worker: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = saved
    use_threads(monkeypatch)
    choose_on_device(monkeypatch, LastMoment)
    executor = {"kind": "multiproc", "tensor_parallel_size": 2, "max_concurrent_batches": steps}
    sections = {**SECTIONS, "scheduler": {**SECTIONS["scheduler"], "async_scheduling": steps > 1}}
    engine = build_engine(path, kernels=KERNELS["modules"], executor=executor, **sections)
    for _ in range(2):
        results = run(engine, mixed())
        assert {name: result.tokens for name, result in results.items()} == of_one_worker
    engine.shutdown()


def test_where_one_device_chooses_no_tokens_none_does(
    saved: tuple[Path, Any], of_one_worker: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = saved
    use_threads(monkeypatch)
    made: list[DeviceLauncher | None] = []

    def launcher(
        device: torch.device, uses: Any, sampler: Any, vocab: int, dtype: torch.dtype
    ) -> DeviceLauncher | None:
        made.append(None if made else DeviceLauncher(vocab, device, TorchSampling))
        return made[-1]

    monkeypatch.setattr("penstock_enginecore.forward.build.device_launcher", launcher)
    executor = {"kind": "multiproc", "tensor_parallel_size": 2}
    engine = build_engine(path, kernels=KERNELS["modules"], executor=executor, **SECTIONS)
    assert len(made) == 2
    assert {name: result.tokens for name, result in run(engine, mixed()).items()} == of_one_worker
    engine.shutdown()
