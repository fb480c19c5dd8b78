"""Mixture-of-experts kernels compared with transformers' own products: ``python -m tests.benchmarks.experts``.

The model runs in an engine in this process, with one thread. It has random weights that bfloat16 represents exactly:
36M parameters, 17M of them active per token. Rounds alternate between packed experts for the kernels and transformers'
experts; results are medians. Everything else is the same. Speeds use processor time, so that other load on the machine
matters less.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from typing import Any
from unittest.mock import patch

import msgspec
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM

from penstock_enginecore.config import CacheConfig, EngineCoreConfig, ExecutorConfig, ModelConfig
from penstock_enginecore.executor.factory import make_executor
from penstock_enginecore.native.experts import PackedExperts
from tests.benchmarks import load
from tests.benchmarks.engine_targets import KV_CACHE_MEMORY, InProcessEngine
from tests.benchmarks.load import Load

SHAPE = {
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 256,
    "intermediate_size": 512,
    "vocab_size": 16_000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
LOADS = (
    Load(streams=1, requests=2, input_len=32, output_len=32),
    Load(streams=16, requests=16, input_len=32, output_len=32),
    Load(streams=2, requests=2, input_len=512, output_len=1),
)


async def measure(model: str, item: Load, seed: int, *, packed: bool) -> tuple[float, int]:
    """Return the tokens per processor second, and the bytes of weights.

    For loads with one output token, the count includes prompt tokens.
    """
    config = EngineCoreConfig(
        model=ModelConfig(path=model, device="cpu", dtype="float32"),
        cache=CacheConfig(kv_cache_memory=KV_CACHE_MEMORY),
        executor=ExecutorConfig(num_threads=1),
    )
    takes = PackedExperts.takes if packed else lambda module: False
    with patch.object(PackedExperts, "takes", takes):
        executor = make_executor(config)
        async with InProcessEngine(config, executor) as engine:
            warm = msgspec.structs.replace(item, requests=min(item.requests, 4), output_len=min(item.output_len, 4))
            await load.run(engine.stream, warm, load.prompts(warm, engine.vocab_size, seed=seed + 1000))
            prompts = load.prompts(item, engine.vocab_size, seed=seed)
            began = time.process_time()
            await load.run(engine.stream, item, prompts)
            seconds = time.process_time() - began
            [info] = executor.collective_rpc("worker_info")
    tokens = item.output_len if item.output_len > 1 else item.input_len + 1
    return item.requests * tokens / seconds, info["weight_bytes"]


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.experts")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    table = Table(title="tokens per second of a processor, prompts' among them in the last row; medians")
    for column in ("streams", "tokens in, out", "transformers", "kernels", "ratio"):
        table.add_column(column, justify="right")
    console = Console()
    weights = {}
    with tempfile.TemporaryDirectory() as directory:
        torch.manual_seed(0)
        auto_class: Any = AutoModelForCausalLM
        model = auto_class.from_config(AutoConfig.for_model("qwen3_moe", **SHAPE), dtype=torch.bfloat16)
        model.save_pretrained(directory)
        for item in LOADS:
            found: dict[bool, list[float]] = {False: [], True: []}
            for seed in range(options.rounds):
                for packed, each in found.items():
                    speed, weights[packed] = asyncio.run(measure(directory, item, seed, packed=packed))
                    each.append(speed)
            before, after = (statistics.median(found[packed]) for packed in (False, True))
            table.add_row(
                str(item.streams),
                f"{item.input_len}, {item.output_len}",
                f"{before:.1f}",
                f"{after:.1f}",
                f"{after / before:.2f}",
            )
    console.print(table)
    console.print(f"bytes of weights: {weights[False]:,} and {weights[True]:,}")


if __name__ == "__main__":
    main()
