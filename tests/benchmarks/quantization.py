"""Savings and costs of weights rounded to 8-bit integers: ``python -m tests.benchmarks.quantization --model DIR``.

It first measures a product of 2048 inputs and 8192 outputs by number of rows, then engines with two threads in this
process. They run in turn over several rounds; results are medians. The weights are float32, bfloat16, or integers with
a bfloat16 output layer. With ``--text`` it also measures the effect of rounding on a model's predictions of a text, for
each position.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock_enginecore.config import CacheConfig, EngineCoreConfig, ExecutorConfig, ModelConfig
from penstock_enginecore.executor.uniproc import UniprocExecutor
from penstock_enginecore.native.library import NativeLibrary, open_library
from penstock_enginecore.native.weights import PackedWeight, round_linears, round_to_int8
from tests.benchmarks import load
from tests.benchmarks.engine_targets import KV_CACHE_MEMORY, InProcessEngine
from tests.benchmarks.load import Load

STREAMS = (1, 4, 8, 24)
ROWS = (1, 2, 4, 8, 16, 64)
_WINDOW = 256
_OUTPUTS, _INPUTS = 8192, 2048
_COPIES = 4
"""Number of weights of each kind. They are used in turn, so that none is in a cache."""


def products(library: NativeLibrary, rows: int, rounds: int) -> dict[str, float]:
    """Return the seconds of a product by the format of its weight."""
    weight = torch.randn(_OUTPUTS, _INPUTS)
    kinds = {"float32": weight, "bfloat16": weight.bfloat16(), "int8": round_to_int8(weight)}
    packed = {name: [PackedWeight(library, kind) for _ in range(_COPIES)] for name, kind in kinds.items()}
    x, out = torch.randn(rows, _INPUTS), torch.empty(rows, _OUTPUTS)
    found: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(rounds):
        for name, copies in packed.items():
            began = time.perf_counter()
            for copy in copies:
                library.call("linear", copy.pointer, x.data_ptr(), rows, _INPUTS, out.data_ptr(), _OUTPUTS)
            found[name].append((time.perf_counter() - began) / _COPIES)
    return {name: statistics.median(each) for name, each in found.items()}


async def speed(model: ModelConfig, item: Load, seed: int) -> float:
    """Return the tokens per second of a new engine after a warm-up."""
    config = EngineCoreConfig(
        model=model,
        cache=CacheConfig(kv_cache_memory=KV_CACHE_MEMORY),
        executor=ExecutorConfig(num_threads=2),
    )
    async with InProcessEngine(config, UniprocExecutor(config)) as engine:
        warm = msgspec.structs.replace(item, requests=min(item.requests, 4), output_len=4)
        await load.run(engine.stream, warm, load.prompts(warm, engine.vocab_size, seed=seed + 1000))
        return (await load.run(engine.stream, item, load.prompts(item, engine.vocab_size, seed=seed))).tokens_per_s


def in_bfloat16(model: str, directory: Path) -> ModelConfig:
    """Write the checkpoint with weights rounded to bfloat16. The engine computes with them in float32."""
    AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).save_pretrained(directory)
    for file in Path(model).glob("tokenizer*"):
        (directory / file.name).write_bytes(file.read_bytes())
    return ModelConfig(path=str(directory), dtype="float32", device="cpu")


@torch.inference_mode()
def predictions(model: str, text: str) -> tuple[float, float, float]:
    """Mean negative log-likelihood of the text's tokens before and after rounding, and the share of positions at which
    the likeliest token is still the same.
    """
    ids: Any = torch.tensor(AutoTokenizer.from_pretrained(model)(text)["input_ids"])
    windows = [window for window in ids.split(_WINDOW) if len(window) == _WINDOW]
    module: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    before = [module(window[None]).logits[0, :-1] for window in windows]
    round_linears(module, but=module.get_output_embeddings())
    after = [module(window[None]).logits[0, :-1] for window in windows]
    targets = torch.cat([window[1:] for window in windows])
    logits = [torch.cat(found) for found in (before, after)]
    losses = [float(torch.nn.functional.cross_entropy(each, targets)) for each in logits]
    same = float((logits[0].argmax(-1) == logits[1].argmax(-1)).double().mean())
    return losses[0], losses[1], same


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.quantization")
    parser.add_argument("--model", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--text", type=Path, help="text file whose tokens the model predicts")
    options = parser.parse_args()
    console = Console()
    if options.text:
        before, after, same = predictions(options.model, options.text.read_text())
        console.print(
            f"loss per token {before:.4f}, rounded {after:.4f}; the likeliest token is the same in {same:.2%}"
        )
    library = open_library("auto", 2)
    table = Table("rows", "float32", "bfloat16", "int8", title=f"milliseconds of a product, {library.isa}, two threads")
    for rows in ROWS:
        taken = products(library, rows, 5 * options.rounds)
        table.add_row(str(rows), *(f"{1000 * each:.2f}" for each in taken.values()))
    console.print(table)
    with tempfile.TemporaryDirectory() as directory:
        models = {
            "float32": ModelConfig(path=options.model, dtype="float32", device="cpu"),
            "bfloat16 weights": in_bfloat16(options.model, Path(directory)),
            "int8": ModelConfig(path=directory, quantization="int8", device="cpu"),
        }
        table = Table("streams", *models, title="tokens/s; 64 tokens in, 32 out, medians")
        for streams in STREAMS:
            item = Load(streams=streams, requests=2 * streams, input_len=64, output_len=32)
            found: dict[str, list[float]] = {name: [] for name in models}
            for seed in range(options.rounds):
                for name, model in models.items():
                    found[name].append(asyncio.run(speed(model, item, seed)))
            table.add_row(str(streams), *(f"{statistics.median(each):.1f}" for each in found.values()))
        console.print(table)


if __name__ == "__main__":
    main()
