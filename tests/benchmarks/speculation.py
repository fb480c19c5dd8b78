"""Speedup from drafts: ``python -m tests.benchmarks.speculation --model PADDED --drafter DRAFTER``.

Two servers of the whole stack, one without drafts and one with, get requests over HTTP in turn. The result is the
median of the rounds' ratios. ``examples/demo_model/pad_model.py`` makes a model with the demo model's outputs and the
cost of 100 million parameters.
"""

import argparse
import asyncio
import json
import random
import shutil
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import safetensors.torch
import torch

from tests.benchmarks.extraction import extractions
from tests.benchmarks.peers import Server
from tests.fakes.network.ports import free_port

WORDS = ("dog", "fox", "king", "bird", "boat", "garden", "river", "cat", "teacher", "dragon", "baker", "moon")
FIELDS = ("name", "age", "title", "color", "size", "count", "owner", "city", "kind", "price", "animal", "place")


def story(number: int) -> str:
    """Return a prompt for a story."""
    return f"Tell me a story about a {WORDS[number % len(WORDS)]} and a {WORDS[(number * 7 + 3) % len(WORDS)]}."


def schema(number: int) -> dict[str, Any]:
    """Return one of many object schemas."""
    random_ = random.Random(number)
    kinds = (
        {"type": "string", "maxLength": 12},
        {"type": "integer", "minimum": 0, "maximum": 999},
        {"type": "boolean"},
        {"enum": ["red", "green", "blue"]},
    )
    names = random_.sample(FIELDS, random_.randrange(3, 7))
    properties = {name: random_.choice(kinds) for name in names}
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


def changed(text: str) -> str:
    """Return ``text`` with a tenth of the words changed."""
    words = text.split(" ")
    return " ".join("something" if place % 10 == 9 else word for place, word in enumerate(words))


@contextmanager
def served(name: str, model: Path, flags: list[str], folder: Path) -> Iterator[str]:
    """Start a server and yield its base URL."""
    port = free_port()
    server = Server(name, serve_command(model, port, flags), {}, folder / f"{name}.log")
    url = f"http://127.0.0.1:{port}"
    try:
        server.wait(lambda: healthy(url))
        yield url
    finally:
        server.close()


def serve_command(model: Path, port: int, flags: list[str]) -> list[str]:
    """Return the command line of ``penstock serve`` with HTTP on ``port``."""
    command = [sys.executable, "-m", "penstock_local", "serve", str(model), "--http-port", str(port)]
    return [*command, "--grpc-port", str(free_port()), "--admin-port", str(free_port()), *flags]


def healthy(url: str) -> bool:
    """Return whether a server reports that it serves."""
    try:
        return httpx.get(f"{url}/health", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


class Answers:
    """Result of a run: texts, output tokens, seconds, and counts of drafts."""

    def __init__(self, answers: list[dict[str, Any]], seconds: float) -> None:
        self.texts = [answer["choices"][0]["message"]["content"] for answer in answers]
        usages = [answer["usage"] for answer in answers]
        self.tokens = sum(usage["completion_tokens"] for usage in usages)
        details = [usage.get("completion_tokens_details") or {} for usage in usages]
        self.accepted = sum(each.get("accepted_prediction_tokens", 0) for each in details)
        self.rejected = sum(each.get("rejected_prediction_tokens", 0) for each in details)
        self.rate = self.tokens / seconds


async def run(url: str, bodies: list[dict[str, Any]], streams: int) -> Answers:
    """Send all requests, ``streams`` at a time."""
    waiting = list(enumerate(bodies))
    answers: dict[int, dict[str, Any]] = {}
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:

        async def work() -> None:
            while waiting:
                number, body = waiting.pop(0)
                answer = await client.post("/v1/chat/completions", json=body)
                answer.raise_for_status()
                answers[number] = answer.json()

        began = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(streams)))
        seconds = time.perf_counter() - began
    return Answers([answers[number] for number in range(len(bodies))], seconds)


def stories(count: int, tokens: int, **fields: Any) -> list[dict[str, Any]]:
    """Return requests for stories."""
    return [
        {"messages": [{"role": "user", "content": story(number)}], "max_tokens": tokens, "seed": number, **fields}
        for number in range(count)
    ]


def objects(count: int, **fields: Any) -> list[dict[str, Any]]:
    """Return requests for JSON objects."""
    return [
        {
            "messages": [{"role": "user", "content": story(number)}],
            "max_tokens": 120,
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema(number)}},
            "seed": number,
            **fields,
        }
        for number in range(count)
    ]


USELESS = "useless"
"""Name of the case with a draft model whose drafts are always rejected, in place of a method."""

SCENARIOS: dict[str, tuple[str, int, Any, float]] = {
    "draft model, greedy": ("draft_model", 1, lambda: stories(5, 160, temperature=0), 2.2),
    "draft model, temperature 0.8": ("draft_model", 1, lambda: stories(5, 160, temperature=0.8), 1.7),
    "draft model, 8 streams": ("draft_model", 8, lambda: stories(16, 120, temperature=0), 1.15),
    "draft model, 32 streams": ("draft_model", 32, lambda: stories(64, 80, temperature=0.8), 0.97),
    "EAGLE-3, greedy": ("eagle3", 1, lambda: stories(5, 160, temperature=0), 0.97),
    "EAGLE-3, temperature 0.8": ("eagle3", 1, lambda: stories(5, 160, temperature=0.8), 0.97),
    "EAGLE-3, 8 streams": ("eagle3", 8, lambda: stories(16, 120, temperature=0), 0.97),
    "prediction, nine tenths right": ("prediction", 1, lambda: stories(5, 160, temperature=0), 3.0),
    "suffix, requests that repeat": ("suffix", 1, lambda: stories(5, 160, temperature=0), 2.5),
    "ngram, extraction": ("ngram", 1, lambda: extractions(24, temperature=0), 1.3),
    "ngram, free stories": ("ngram", 1, lambda: stories(5, 160, temperature=0.8), 0.97),
    "ngram, 8 streams": ("ngram", 8, lambda: stories(16, 120, temperature=0), 0.97),
    "JSON schemas, draft model": ("draft_model", 1, lambda: objects(12, temperature=0), 1.4),
    "JSON schemas, prediction": ("prediction", 1, lambda: objects(12, temperature=0), 1.4),
    "useless drafter": (USELESS, 1, lambda: stories(5, 160, temperature=0), 0.97),
}
"""Cases by name: the method, streams, requests, and the minimum ratio."""


def make_useless(drafter: Path, folder: Path) -> Path:
    """Write a draft model like ``drafter`` with random weights.

    It costs as much, and its drafts are always rejected.
    """
    made = folder / "useless-drafter"
    shutil.copytree(drafter, made, dirs_exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    for path in made.glob("*.safetensors"):
        drawn = {
            name: torch.empty_like(weight).normal_(0, 0.05, generator=generator) if weight.dim() > 1 else weight
            for name, weight in safetensors.torch.load_file(path).items()
        }
        safetensors.torch.save_file(drawn, path, metadata={"format": "pt"})
    return made


def measure(url: str, plain: str, name: str, rounds: int) -> dict[str, Any]:
    """Measure a scenario on both servers in turn."""
    _, streams, make, target = SCENARIOS[name]
    bodies = make()
    without = asyncio.run(run(plain, bodies, streams))
    if name.startswith("prediction"):
        for body, text in zip(bodies, without.texts, strict=True):
            body["prediction"] = {"type": "content", "content": changed(text)}
    asyncio.run(run(url, bodies, streams))
    ratios, rates, same = [], [], True
    for _ in range(rounds):
        without, found = asyncio.run(run(plain, bodies, streams)), asyncio.run(run(url, bodies, streams))
        ratios.append(found.rate / without.rate)
        rates.append((without.rate, found.rate))
        same = same and found.texts == without.texts
    steps = found.tokens - found.accepted
    return {
        "scenario": name,
        "without": round(statistics.median(rate for rate, _ in rates), 1),
        "with": round(statistics.median(rate for _, rate in rates), 1),
        "ratio": round(statistics.median(ratios), 2),
        "target": target,
        "tokens per step": round(found.tokens / max(steps, 1), 2),
        "held": round(found.accepted / max(found.accepted + found.rejected, 1), 2),
        "same": same,
    }


def main() -> int:
    """Print a row per scenario."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="the checkpoint that is served")
    parser.add_argument("--drafter", type=Path, required=True, help="the draft model")
    parser.add_argument("--head", type=Path, help="the EAGLE-3 head; without one its scenarios are left out")
    parser.add_argument("--tokens", type=int, default=5, help="drafts per request and step")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", action="append", help="prefix of scenario names; repeatable")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    args = parser.parse_args()
    names = [name for name in SCENARIOS if not args.only or name.startswith(tuple(args.only))]
    drafters = {"draft_model": args.drafter} | ({"eagle3": args.head} if args.head else {})
    names = [name for name in names if args.head or SCENARIOS[name][0] != "eagle3"]
    folder = Path("build/speculation")
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    common = ["--dtype", args.dtype]
    with served("without", args.model, common, folder) as plain:
        for method in dict.fromkeys(SCENARIOS[name][0] for name in names):
            if method == USELESS:
                drafters[method] = make_useless(args.drafter, folder)
            flags = [*common, "--speculative", "draft_model" if method == USELESS else method]
            flags += ["--speculative-tokens", str(args.tokens)]
            if method in drafters:
                flags += ["--speculative-model", str(drafters[method])]
            with served(method, args.model, flags, folder) as url:
                for name in names:
                    if SCENARIOS[name][0] == method:
                        rows.append(measure(url, plain, name, args.rounds))
                        print(json.dumps(rows[-1]), flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
