"""Models that run with transformers' modules, and with attention by Triton over the KV cache's arena.

Greedy tokens equal transformers' tokens.
"""

from pathlib import Path

import pytest
import torch

from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.core.engine_core import EngineCore
from penstock_enginecore.forward import build
from penstock_enginecore.forward.cuda import attention
from penstock_enginecore.forward.cuda.graphs import StepGraphs
from tests.fakes.engines.in_process import build_engine, generate
from tests.fakes.engines.late_device import LastMoment, choose_on_device
from tests.fakes.models.interpreted_kernels import interpreted
from tests.fakes.models.recorded_launches import RecordedGraph, RecordedKernels
from tests.fakes.models.tiny_models import CHUNK, SLIDING_WINDOW, VOCAB_SIZE, save_tiny_model
from tests.fakes.models.torch_kernels import TorchKernels
from tests.fakes.models.transformers_greedy import greedy_tokens

# Chunked attention with a query scale, windowed and full layers, latent attention with values smaller than keys, sinks,
# and one key-value head for all query heads.
FAMILIES = ("llama4_text", "cohere2", "deepseek_v3", "gpt_oss", "gpt_bigcode")
PROMPT_LENGTHS = (1, 7, 34)
NEW_TOKENS = 8


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, VOCAB_SIZE, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]


def make_engine(path: Path, computing: str = "Triton attention", **sections: dict[str, int]) -> EngineCore:
    torch.set_num_threads(1)
    # KV cache groups with windows share the arena. The blocks are few, so that requests are preempted.
    engine = build_engine(
        path, model={"attention_backend": "triton"}, cache={"block_size": 16}, kernels={"isa": "off"}, **sections
    )
    assert engine.executor.collective_rpc("worker_info")[0]["computing"].startswith(computing)
    return engine


def greedy(engine: EngineCore, prefix: str, given: list[list[int]], count: int) -> tuple[list[list[int]], int]:
    params = SamplingParams(temperature=0.0, max_tokens=count)
    run = generate(engine, [(f"{prefix}{i}", prompt, params) for i, prompt in enumerate(given)])
    return [run.tokens[f"{prefix}{i}"] for i in range(len(given))], run.stats.prefix_cache_hits


@pytest.mark.parametrize("family", FAMILIES)
def test_pieces_of_prompts_prefix_hits_and_mixed_steps_give_the_same_tokens(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uses torch versions of the kernels, which are about a hundred times faster than interpreted Triton kernels."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(attention, "_kernels", TorchKernels)
    monkeypatch.setattr(build, "with_latents", lambda probed, *_: probed)  # on GPUs, modules cache full keys and values
    model = save_tiny_model(family, tmp_path)
    expected = [greedy_tokens(model, prompt, NEW_TOKENS) for prompt in prompts()]
    assert len({token for tokens in expected for token in tokens}) > 8
    assert max(PROMPT_LENGTHS) > max(SLIDING_WINDOW, CHUNK) + NEW_TOKENS
    engine = make_engine(tmp_path, scheduler={"max_num_batched_tokens": 11})
    assert greedy(engine, "first", prompts(), NEW_TOKENS)[0] == expected
    again, hits = greedy(engine, "second", prompts(), NEW_TOKENS)
    assert again == expected
    assert hits >= 32


def test_replayed_steps_that_choose_their_tokens_give_the_same_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uses several KV cache groups with windows. Tokens are copied to the host as late as possible."""
    kernels = RecordedKernels()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(attention, "_kernels", lambda: kernels)
    monkeypatch.setattr(attention, "can_capture", lambda device: True)
    graphs = StepGraphs(lambda: RecordedGraph(kernels, of_modules=True))
    monkeypatch.setattr(attention, "make_graphs", lambda: graphs)
    choose_on_device(monkeypatch, LastMoment)
    model = save_tiny_model("cohere2", tmp_path)
    expected = [greedy_tokens(model, prompt, NEW_TOKENS) for prompt in prompts()]
    engine = make_engine(tmp_path, "Triton attention in graphs", scheduler={"max_num_batched_tokens": 11})
    assert greedy(engine, "first", prompts(), NEW_TOKENS)[0] == expected
    assert graphs.stats.replays > 8


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama4_text", "deepseek_v3"])
def test_and_so_do_the_kernels_that_gpus_run(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the GPU kernels in Triton's interpreter."""
    interpreted("attention")
    monkeypatch.setattr(build, "with_latents", lambda probed, *_: probed)  # on GPUs, modules cache full keys and values
    model = save_tiny_model(family, tmp_path)
    given = [prompts()[0], prompts()[2]]
    engine = make_engine(tmp_path, scheduler={"max_num_batched_tokens": 24})
    assert greedy(engine, "r", given, 3)[0] == [greedy_tokens(model, prompt, 3) for prompt in given]
