"""Expert-parallel ranks as processes: ``python -m tests.benchmarks.expert_groups cost`` and ``... balance``.

``cost`` compares two ranks of one thread with one engine of two threads, at 32 streams, for each dispatch. The
command also prints a rank's memory. ``balance`` runs four ranks with 32 experts and with ten slots per rank. Tokens
select experts by a Zipf distribution whose order changes with the prompts. The command compares the balance and the
time between tokens for fixed and for moving experts.
"""

import argparse
import asyncio
import contextlib
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM, set_seed

from tests.benchmarks import load, processes
from tests.benchmarks.experts import SHAPE
from tests.benchmarks.load import Load
from tests.benchmarks.public_target import PublicClient
from tests.fakes.models.small_tokenizers import byte_level
from tests.fakes.processes import Service
from tests.fakes.systems.cluster import Cluster
from tests.fakes.systems.rank_group import metric, resident

DISPATCHES = ("allgather", "alltoall", "reduce_scatter")
COST = Load(streams=32, requests=64, input_len=32, output_len=48)
MIB = 2**20
console = Console()

ZIPF_SHAPE = SHAPE | {"hidden_size": 256, "head_dim": 32, "num_experts": 32, "vocab_size": 8192}
RANKS, SLOTS, EXPONENT = 4, 10, 1.4
WINDOW, MOVE_BYTES = 100, MIB
STREAMS, OUTPUT_LEN, ROUNDS_OF_AN_ORDER, ORDERS = 16, 50, 8, 4


def make_model(folder: Path, shape: Mapping[str, Any]) -> Any:
    """Write a model with random weights from seed 0 and a byte tokenizer."""
    set_seed(0)
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(AutoConfig.for_model("qwen3_moe", **shape))
    byte_level().save(str(folder / "tokenizer.json"))
    return model


@torch.no_grad()
def follow_zipf(model: Any) -> None:
    """Change the model so that tokens select experts by a Zipf distribution. The order of the experts differs between
    the first and the second half of the vocabulary.

    Two features of the embedding encode the half of the vocabulary. The routers' other inputs are noise. The output
    layer uses the embeddings' weights, so an answer stays in the half of its prompt.
    """
    random = np.random.default_rng(0)
    weight = model.get_input_embeddings().weight
    vocab, hidden = weight.shape
    weight.normal_()
    weight[:, :2] = 0
    weight[: vocab // 2, 0] = weight[vocab // 2 :, 1] = hidden**0.5
    # After the norm, the feature has this value, and all other features have a variance of 1 / 2.
    feature = (hidden / 2) ** 0.5
    for layer in model.model.layers:
        gate = layer.mlp.gate.weight
        gate.normal_(
            std=1.28 / feature
        )  # the deviation of a Gumbel distribution, so that the largest values are a sample without replacement
        for column in range(2):
            order = random.permutation(len(gate)) + 1
            gate[:, column] = torch.from_numpy(np.log(order**-EXPONENT) / feature)


@contextlib.asynccontextmanager
async def one_engine(model: str) -> AsyncIterator[tuple[str, list[Service]]]:
    """Run an engine of two threads. Yields the public address and the engines."""
    async with processes.engine(model, 2) as engine, processes.frontend(model, engine.address) as front:
        await asyncio.gather(engine.serving(), front.serving())
        yield front.address, [engine]


@contextlib.asynccontextmanager
async def group(model: str, size: int, **flags: Any) -> AsyncIterator[tuple[str, list[Service]]]:
    """Run ranks of one thread each. Yields the public address and the ranks."""
    shared: dict[str, Any] = {
        "data_parallel__size": size,
        "data_parallel__min_size": size,
        "expert_parallel__enabled": "true",
    }
    async with Cluster(Path(model), engines=size, kv_cache_memory="256MiB", **shared, **flags) as cluster:
        yield cluster.frontend.address, cluster.engines


async def cost(model: str, rounds: int) -> None:
    """Measure and print a table."""
    tokens: dict[str, list[float]] = {}
    memory: dict[str, list[float]] = {}
    for number in range(rounds):
        for name in ("one engine", *DISPATCHES):
            ways = one_engine(model) if name == "one engine" else group(model, 2, expert_parallel__dispatch=name)
            async with ways as (address, engines), PublicClient(address) as client:
                warm = msgspec.structs.replace(COST, requests=COST.streams, output_len=8)
                await load.run(client.stream, warm, load.prompts(warm, 16_000, seed=100 + number))
                found = await load.run(client.stream, COST, load.prompts(COST, 16_000, seed=number))
                tokens.setdefault(name, []).append(found.tokens_per_s)
                memory.setdefault(name, []).append(max(map(resident, engines)))
                console.log(f"round {number}, {name}: {found.tokens_per_s:.0f} tokens/s")
    table = Table(
        title=f"{COST.streams} streams, {COST.input_len} tokens in, {COST.output_len} out; medians of {rounds}"
    )
    for column in ("", "tokens/s", "of one engine", "MiB of a process"):
        table.add_column(column, justify="right" if column else "left")
    one = statistics.median(tokens["one engine"])
    for name, values in tokens.items():
        median = statistics.median(values)
        size = statistics.median(memory[name])
        table.add_row(
            name if name == "one engine" else f"2 ranks, {name}", f"{median:.0f}", f"{median / one:.2f}", f"{size:.0f}"
        )
    console.print(table)


async def _ask(client: PublicClient, prompt: list[int], between: list[float]) -> None:
    last = 0.0
    async for size in client.stream(prompt, OUTPUT_LEN):
        now = time.perf_counter()
        if last:
            between += [(now - last) / size] * size
        last = now


async def _streams(address: str, rank: Service, seed: int) -> tuple[list[float], list[list[float]]]:
    """Run the load.

    Returns the seconds between tokens, and for each order of the experts the balance of the last window after each
    round.
    """
    between: list[float] = []
    balances: list[list[float]] = []
    rng = np.random.default_rng(seed)
    half = ZIPF_SHAPE["vocab_size"] // 2
    async with PublicClient(address) as client:
        for order in range(ORDERS):
            balances.append([])
            for _ in range(ROUNDS_OF_AN_ORDER):
                prompts = rng.integers(10, half, (STREAMS, 32)) + order % 2 * half
                await asyncio.gather(*(_ask(client, prompt, between) for prompt in prompts.tolist()))
                balances[-1].append(await asyncio.to_thread(metric, rank, "penstock:expert_balance"))
    return between, balances


async def balance(model: str, rounds: int) -> None:
    """Measure and print a table."""
    table = Table(
        title=f"{RANKS} ranks, {SLOTS} slots each, Zipf {EXPONENT}; {STREAMS} streams, another order three times"
    )
    for column in ("experts", "balance by order, lowest and last window", "between tokens p50, ms", "p99, ms"):
        table.add_column(column, justify="right")
    found: dict[str, list[tuple[float, float]]] = {"stay": [], "move": []}
    seen: dict[str, list[list[float]]] = {}
    for number in range(rounds):
        for name, results in found.items():
            flags = {
                "expert_parallel__slots": SLOTS,
                "expert_parallel__window": WINDOW if name == "move" else 0,
                "expert_parallel__move_bytes_per_step": MOVE_BYTES,
            }
            async with group(model, RANKS, **flags) as (address, ranks):
                between, seen[name] = await _streams(address, ranks[0], number)
            p50, p99 = np.percentile(between, (50, 99)) * 1e3
            results.append((p50, p99))
            console.log(f"round {number}, experts {name}: p50 {p50:.1f} ms, p99 {p99:.1f} ms; {seen[name]}")
    for name, results in found.items():
        p50, p99 = (statistics.median(each) for each in zip(*results, strict=True))
        balances = ", ".join(f"{min(each):.2f} {each[-1]:.2f}" for each in seen[name]) if name == "move" else ""
        table.add_row(name, balances, f"{p50:.1f}", f"{p99:.1f}")
    console.print(table)


def main() -> None:
    """Print the results of the selected measurement."""
    parser = argparse.ArgumentParser(
        prog="expert_groups", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=("cost", "balance"))
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder), SHAPE if options.what == "cost" else ZIPF_SHAPE)
        if options.what == "balance":
            follow_zipf(model)
        model.save_pretrained(folder)
        asyncio.run({"cost": cost, "balance": balance}[options.what](folder, options.rounds))


if __name__ == "__main__":
    main()
