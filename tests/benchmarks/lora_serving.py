"""Cost of LoRA adapters for a server: ``python -m tests.benchmarks.lora_serving --model MODEL --json FILE``.

Two servers of the whole stack, one without adapters and one with, get requests over HTTP in turn: 16 streams of
requests with new prompts of 128 tokens and 64 output tokens. The requests of a case use the base model or random
adapters on all seven projections, in turn. The result is the median of the rounds' ratios. With ``--peer DIR``, vLLM's
CPU build in ``DIR/venv`` gets the same load. Its servers run one after the other, because their idle threads keep the
cores busy.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from tests.benchmarks.peers import ALL_CORES, KV_CACHE, Server, machine, vllm_environment
from tests.benchmarks.speculation import healthy, served
from tests.fakes.network.ports import free_port

STREAMS, PROMPT, TOKENS = 16, 128, 64
MAKE_ADAPTERS = "examples/demo_model/make_adapters.py"
CASES = {
    "base": (16, 0, 0.99),
    "one": (16, 1, 0.92),
    "eight": (16, 8, 0.80),
    "sixteen": (16, 16, 0.70),
    "one of 64": (64, 1, 0.80),
}
"""Cases by name: rank, number of adapters in requests, and the target speed relative to no adapters."""
RANKS = {16: 16, 64: 1}
"""Number of adapters of each rank."""


class Asked:
    """Creates requests, each with its own prompt."""

    def __init__(self, requests: int) -> None:
        self._random = random.Random(0)
        self._requests = requests

    def rate(self, url: str, names: list[str]) -> float:
        """Return the output tokens per second of requests that name these models in turn."""
        turns = itertools.cycle(names)
        bodies = [self._body(next(turns)) for _ in range(self._requests)]
        return asyncio.run(_rate(url, bodies))

    def _body(self, name: str) -> dict[str, Any]:
        prompt = [self._random.randrange(300, 2000) for _ in range(PROMPT)]
        return {"model": name, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}


async def _rate(url: str, bodies: list[dict[str, Any]]) -> float:
    waiting = list(bodies)
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:

        async def work() -> None:
            while waiting:
                answer = await client.post("/v1/completions", json=waiting.pop())
                answer.raise_for_status()

        began = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(STREAMS)))
        return len(bodies) * TOKENS / (time.perf_counter() - began)


class Adapters:
    """Random adapters of every rank."""

    def __init__(self, model: Path, folder: Path, dtype: str) -> None:
        self.paths: dict[str, Path] = {}
        for rank, count in RANKS.items():
            out = folder / f"adapters-{rank}-{dtype}"
            shutil.rmtree(out, ignore_errors=True)
            flags = ["--number", str(count), "--rank", str(rank), "--name", f"r{rank}", "--dtype", dtype]
            subprocess.run(
                [sys.executable, MAKE_ADAPTERS, str(model), str(out), *flags], check=True, stdout=subprocess.DEVNULL
            )
            self.paths |= {path.name: path for path in sorted(out.iterdir())}

    def of(self, case: str) -> list[str]:
        """Return the adapter names for the requests of a case."""
        rank, count, _ = CASES[case]
        return [name for name in self.paths if name.startswith(f"r{rank}-")][:count] or ["m"]


@contextlib.contextmanager
def penstock(model: Path, adapters: Adapters | None, folder: Path) -> Iterator[str]:
    """Start a server and yield its base URL."""
    flags = ["--served-model-name", "m", "--dtype", "float32", "--max-model-len", "512", "--kv-cache-memory", KV_CACHE]
    if adapters is not None:
        flags += [word for name, path in adapters.paths.items() for word in ("--lora", f"{name}={path}")]
        flags += ["--set", "engine.lora.max_loras=17"]
    with served("penstock-lora" if adapters else "penstock", model, flags, folder) as url:
        yield url


@contextlib.contextmanager
def vllm(peer: Path, model: Path, adapters: Adapters | None, folder: Path, rank: int) -> Iterator[str]:
    """Start vLLM and yield its base URL.

    vLLM's kernels compute every adapter with ``rank``, the maximum rank that the server supports.
    """
    port = free_port()
    command = [str(peer / "venv/bin/vllm"), "serve", str(model), "--port", str(port), "--served-model-name", "m"]
    command += ["--dtype", "float32", "--max-model-len", "512"]
    if adapters is not None:
        of_rank = [f"{name}={path}" for name, path in adapters.paths.items() if name.startswith(f"r{rank}-")]
        command += [
            "--enable-lora",
            "--max-loras",
            str(len(of_rank)),
            "--max-lora-rank",
            str(rank),
            "--lora-modules",
            *of_rank,
        ]
    env = vllm_environment(threads=ALL_CORES, libraries=peer)
    process, url = Server("vLLM", command, env, folder / "vllm-lora.log"), f"http://127.0.0.1:{port}"
    try:
        process.wait(lambda: healthy(url))
        yield url
    finally:
        process.close()


def in_turn(
    model: Path, adapters: Adapters, asked: Asked, cases: list[str], rounds: int, folder: Path
) -> dict[str, Any]:
    """Return Penstock's rates without and with adapters, by case."""
    with penstock(model, None, folder) as without, penstock(model, adapters, folder) as with_:
        asked.rate(without, ["m"])
        asked.rate(with_, [*adapters.paths, "m"])
        found: dict[str, Any] = {}
        for case in cases:
            pairs = [(asked.rate(without, ["m"]), asked.rate(with_, adapters.of(case))) for _ in range(rounds)]
            found[case] = _row(case, pairs)
            print(json.dumps({"server": "Penstock", "case": case, **found[case]}), flush=True)
    return found


def one_by_one(
    peer: Path, model: Path, adapters: Adapters, asked: Asked, cases: list[str], rounds: int, folder: Path
) -> dict[str, Any]:
    """Return vLLM's rates without adapters, and with a server for each rank."""
    with vllm(peer, model, None, folder, 0) as url:
        asked.rate(url, ["m"])
        without = [asked.rate(url, ["m"]) for _ in range(rounds)]
    found: dict[str, Any] = {}
    for rank in sorted({CASES[case][0] for case in cases}):
        with vllm(peer, model, adapters, folder, rank) as url:
            asked.rate(url, [name for name in adapters.paths if name.startswith(f"r{rank}-")])
            for case in (case for case in cases if CASES[case][0] == rank):
                rates = [asked.rate(url, adapters.of(case)) for _ in range(rounds)]
                found[case] = _row(case, list(zip(without, rates, strict=True)))
                print(json.dumps({"server": "vLLM", "case": case, **found[case]}), flush=True)
    return found


def _row(case: str, pairs: list[tuple[float, float]]) -> dict[str, Any]:
    without, with_ = (statistics.median(side) for side in zip(*pairs, strict=True))
    ratio = statistics.median(after / before for before, after in pairs)
    return {"without": round(without, 1), "with": round(with_, 1), "share": round(ratio, 3), "target": CASES[case][2]}


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="the checkpoint that is served")
    parser.add_argument("--peer", type=Path, help="folder whose venv/ holds vLLM's CPU build")
    parser.add_argument("--dtype", default="float32", help="of the adapters")
    parser.add_argument("--only", action="append", choices=list(CASES), help="a case; may be given again")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args()
    folder = Path("build/lora_serving")
    folder.mkdir(parents=True, exist_ok=True)
    adapters, asked = Adapters(options.model, folder.resolve(), options.dtype), Asked(options.requests)
    cases = options.only or list(CASES)
    found = {"Penstock": in_turn(options.model, adapters, asked, cases, options.rounds, folder)}
    if options.peer:
        peer = options.peer.resolve()
        found["vLLM"] = one_by_one(peer, options.model, adapters, asked, cases, options.rounds, folder)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    print(machine())
    return 0


if __name__ == "__main__":
    sys.exit(main())
