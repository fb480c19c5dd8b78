"""Others at the same load on the same device: transformers' continuous batching, and vLLM where it is installed."""

import importlib.util
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from penstock_enginecore.config import ModelConfig
from penstock_enginecore.models.loader import read_config
from tests.benchmarks.gpu import machine
from tests.benchmarks.gpu.shapes import BLOCK_SIZE, Plan

STREAMS = 32
"""As many as the targets compare."""
Generate = Callable[[list[list[int]], int], None]
"""Takes prompts and how many tokens each gets."""


def measure(plan: Plan, device: torch.device) -> dict[str, Any]:
    """Tokens per second and milliseconds per step of decoding, by peer; None for those that are not here."""
    streams = min(STREAMS, max(plan.engine_streams))
    prompts = [
        [random.Random(i).randrange(10, plan.shape.vocab) for _ in range(plan.input_len)] for i in range(streams)
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = plan.shape.write(Path(folder))
        found = {"transformers": _timed(plan, device, prompts, _transformers(path, plan, device))}
        if device.type == "cuda" and importlib.util.find_spec("vllm"):
            torch.cuda.empty_cache()
            found["vllm"] = _timed(plan, device, prompts, _vllm(path))
    return {"streams": streams, "peers": found}


def _timed(plan: Plan, device: torch.device, prompts: list[list[int]], generate: Generate) -> dict[str, float]:
    """Steps of decoding are what a longer output adds to a shorter one."""
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
    """Its continuous batching over a paged cache."""
    auto: Any = AutoModelForCausalLM
    with device:
        model = auto.from_config(
            read_config(ModelConfig(path=str(path), load_format="dummy")),
            dtype=getattr(torch, plan.shape.dtype),
            attn_implementation="sdpa",
        )
    model.eval().requires_grad_(False)
    sizes = None
    if device.type == "cpu":  # whose memory it does not find out by itself
        sizes = ContinuousBatchingConfig(page_size=BLOCK_SIZE, num_blocks=64, max_batch_tokens=64)

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
