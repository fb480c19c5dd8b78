"""Repeated images: ``python -m tests.benchmarks.media_repeats --model MODEL``.

MODEL is a checkpoint with a vision encoder from ``make_model --tower``. A server of the whole stack gets requests over
HTTP at one stream. Each of ``--images`` images is sent four times: first, the same again, with another question after
the image, and with a text before it. The result is the time to the first token.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from tests.benchmarks.multimodal_serving import Pictures, penstock
from tests.benchmarks.peers import machine

WORDS = ("def show(", "class Picture(", "import ")


def bodies(part: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the requests about an image by kind, in order."""
    text, other, before = ({"type": "text", "text": words} for words in WORDS)
    contents = {
        "first": [part, text],
        "the same again": [part, text],
        "another question": [part, other],
        "another question before it": [before, part, text],
    }
    common = {"model": "m", "max_tokens": 4, "temperature": 0, "stream": True, "ignore_eos": True}
    return {name: common | {"messages": [{"role": "user", "content": parts}]} for name, parts in contents.items()}


async def first_token(client: httpx.AsyncClient, body: dict[str, Any]) -> float:
    """Return the seconds from the request to the first piece."""
    began, first = time.perf_counter(), 0.0
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {") and not first and json.loads(line[6:])["choices"][0]["delta"].get("content"):
                first = time.perf_counter() - began
    return first


async def measure(url: str, images: int) -> dict[str, list[float]]:
    """Return the milliseconds of each image, by kind of request."""
    pictures = Pictures()
    found: dict[str, list[float]] = {}
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        for body in bodies(pictures.message()[0]["content"][0]).values():
            await first_token(client, body)  # warm up, because the first request waits for more than its image
        for _ in range(images):
            for name, body in bodies(pictures.message()[0]["content"][0]).items():
                found.setdefault(name, []).append(round(1000 * await first_token(client, body), 1))
    return found


def main() -> int:
    """Print a line of JSON with each time, then one with medians and their ratios to the first."""
    parser = argparse.ArgumentParser(prog="media_repeats", description=(__doc__ or "").split("\n\n", 1)[1])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--images", type=int, default=10)
    parser.add_argument("--folder", type=Path, default=Path("build/media_repeats"))
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    print(json.dumps({"machine": machine(), "model": args.model.name}), flush=True)
    with penstock(args.model, args.folder, "repeats") as url:
        found = asyncio.run(measure(url, args.images))
    print(json.dumps(found))
    medians = {name: statistics.median(times) for name, times in found.items()}
    ratios = {name: round(median / medians["first"], 3) for name, median in medians.items()}
    print(json.dumps({"medians": medians, "of the first": ratios}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
