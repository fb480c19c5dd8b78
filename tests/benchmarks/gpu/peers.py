"""Other servers with the same load on the same device: transformers' continuous batching, and vLLM if it is installed."""

import importlib.util
import inspect
import random
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from penstock_enginecore.config import ModelConfig
from penstock_enginecore.models.loader import read_config
from tests.benchmarks.gpu import machine, names
from tests.benchmarks.gpu.plans import plan_of
from tests.benchmarks.gpu.shapes import BLOCK_SIZE, Plan
from tests.device.phases import Row, Settings, Stage

Generate = Callable[[list[list[int]], int], None]
"""Function that generates outputs for prompts. The second argument is the number of output tokens per prompt."""


def stages(settings: Settings) -> list[Stage]:
    """Return a row for each installed peer: tokens per second, and milliseconds per decode step."""
    peers = ["transformers"]
    if not settings.cpu and importlib.util.find_spec("vllm"):
        peers.append("vllm")
    return [Stage("peers", [Row(peer, partial(_measure, settings, peer), 90.0) for peer in peers])]


def _measure(settings: Settings, peer: str, _: None) -> dict[str, Any]:
    plan, device = plan_of(settings), machine.pick(settings)
    prompts = [
        [random.Random(i).randrange(10, plan.shape.vocab) for _ in range(plan.input_len)]
        for i in range(names.peer_streams(plan))
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = plan.shape.write(Path(folder))
        generate = _vllm(path) if peer == "vllm" else _transformers(path, plan, device)
        return _timed(plan, device, prompts, generate)


def _timed(plan: Plan, device: torch.device, prompts: list[list[int]], generate: Generate) -> dict[str, float]:
    """Return the time of decode steps, from the difference between a longer and a shorter output."""
    generate(prompts, 2)
    seconds = {}
    for count in (plan.output_len // 4, plan.output_len):
        begun = time.perf_counter()
        generate(prompts, count)
        machine.synchronize(device)
        seconds[count] = time.perf_counter() - begun
    (few, short), (many, long) = seconds.items()
    return {"tokens_per_s": len(prompts) * many / long, "step_ms": (long - short) / (many - few) * 1e3}


def _transformers(path: Path, plan: Plan, device: torch.device) -> Generate:
    """Return transformers' continuous batching over a paged cache."""
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    auto: Any = AutoModelForCausalLM
    with device:
        model = auto.from_config(
            read_config(ModelConfig(path=str(path), load_format="dummy")),
            dtype=getattr(torch, plan.shape.dtype),
            attn_implementation="sdpa",
        )
    model.eval().requires_grad_(False)
    sizes = None
    if device.type == "cpu":  # transformers does not determine the memory of a CPU
        blocks = "page_size" if "page_size" in inspect.signature(ContinuousBatchingConfig).parameters else "block_size"
        make_sizes: Any = ContinuousBatchingConfig
        sizes = make_sizes(**{blocks: BLOCK_SIZE}, num_blocks=64, max_batch_tokens=64)

    def generate(prompts: list[list[int]], count: int) -> None:
        config = GenerationConfig(  # type: ignore[no-untyped-call]
            max_new_tokens=count, min_new_tokens=count, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        answers = model.generate_batch(prompts, generation_config=config, continuous_batching_config=sizes)
        lengths = {len(answer.generated_tokens) for answer in answers.values()}
        if lengths != {count}:
            raise RuntimeError(f"transformers gave {sorted(lengths)} tokens where {count} were asked for")

    return generate


def _vllm(path: Path) -> Generate:
    vllm: Any = importlib.import_module("vllm")
    engine = vllm.LLM(model=str(path), load_format="dummy", enable_prefix_caching=False, gpu_memory_utilization=0.6)

    def generate(prompts: list[list[int]], count: int) -> None:
        params = vllm.SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)

    return generate
