"""Effect of images on concurrent text requests, and speed of images: ``python -m tests.benchmarks.multimodal_serving
--model MODEL``.

MODEL is a checkpoint with a vision encoder from ``make_model --tower``. Servers of the whole stack get requests over
HTTP, in turn:

- *neighbours*: eight streams of text, alone and while different images arrive one after the other. The result is the
longest gap
  between two pieces of a stream, next to the time of a block of the vision encoder alone. It is measured with default
  settings, without slicing the encoder or sharing steps, and for vLLM with ``--peer``.
- *text*: tokens per second of text alone, compared with the same checkpoint without its vision encoder.
- *images*: seconds to the first token at one stream, and images per second at eight; with ``--peer DIR`` also for
vLLM's CPU build
  in ``DIR/venv``.
"""

import argparse
import asyncio
import base64
import contextlib
import io
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from PIL import Image

from tests.benchmarks.peers import ALL_CORES, KV_CACHE, Server, machine, vllm_environment
from tests.benchmarks.speculation import healthy, served
from tests.fakes.network.ports import free_port

STREAMS, PROMPT = 8, 64
NOT_SLICED = ("engine.scheduler.max_num_encoder_tokens=1000000000", "engine.scheduler.max_prompt_batch_tokens=0")
SIDE = 672


class Pictures:
    """Source of different images of noise and gradients."""

    def __init__(self) -> None:
        self._random = np.random.default_rng(time.time_ns())

    def message(self) -> list[dict[str, Any]]:
        """Return a user message with an image."""
        coarse = self._random.integers(0, 256, (12, 12, 3), dtype=np.uint8)
        file = io.BytesIO()
        Image.fromarray(coarse).resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(file, "JPEG", quality=85)
        url = f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "def show("}]
        return [{"role": "user", "content": content}]


def text_body(tokens: int) -> dict[str, Any]:
    """Return a completion request with a new random prompt."""
    prompt = [random.randrange(300, 8000) for _ in range(PROMPT)]
    return {"model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}


async def stream(client: httpx.AsyncClient, body: dict[str, Any], gaps: list[float]) -> None:
    """Request a stream, and append the seconds between its pieces to ``gaps``."""
    last = 0.0
    async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            now = time.perf_counter()
            if last:
                gaps.append(now - last)
            last = now


async def show(client: httpx.AsyncClient, pictures: Pictures, tokens: int = 4) -> float:
    """Return the seconds to the first piece of the answer to an image."""
    body = {"model": "m", "messages": pictures.message(), "max_tokens": tokens, "temperature": 0, "stream": True}
    began, first = time.perf_counter(), 0.0
    async with client.stream("POST", "/v1/chat/completions", json=body | {"ignore_eos": True}) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {") and not first:
                first = time.perf_counter() - began
    return first


async def gaps_of(url: str, tokens: int, images: int) -> list[float]:
    """Return the seconds between pieces of eight streams, while images arrive one after the other."""
    gaps: list[float] = []
    pictures = Pictures()
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        streams = [asyncio.create_task(stream(client, text_body(tokens), gaps)) for _ in range(STREAMS)]
        await asyncio.sleep(1.5)
        gaps.clear()
        for _ in range(images):
            await show(client, pictures)
        if not images:
            await asyncio.sleep(8)
        noted = list(gaps)
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    return noted


async def text_rate(url: str, requests: int) -> float:
    """Return the output tokens per second of eight text streams."""
    waiting = [text_body(128) for _ in range(requests)]
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:

        async def work() -> None:
            while waiting:
                (await client.post("/v1/completions", json=waiting.pop())).raise_for_status()

        began = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(STREAMS)))
        return requests * 128 / (time.perf_counter() - began)


async def image_rates(url: str, images: int) -> dict[str, float]:
    """Return the seconds to the first token with one stream, and the images per second with eight streams."""
    pictures = Pictures()
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        await show(client, pictures)
        alone = [await show(client, pictures, 1) for _ in range(2)]
        waiting = list(range(images))

        async def work() -> None:
            while waiting:
                waiting.pop()
                await show(client, pictures, 8)

        began = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(STREAMS)))
        rate = images / (time.perf_counter() - began)
        return {"ttft": round(statistics.median(alone), 3), "images/s": round(rate, 4)}


@contextlib.contextmanager
def penstock(model: Path, folder: Path, name: str, *flags: str) -> Iterator[str]:
    """Start a server and yield its base URL."""
    common = [
        "--served-model-name",
        "m",
        "--dtype",
        "float32",
        "--max-model-len",
        "4096",
        "--kv-cache-memory",
        KV_CACHE,
    ]
    with served(name, model, [*common, *flags], folder) as url:
        yield url


@contextlib.contextmanager
def vllm(peer: Path, packages: Path | None, model: Path, folder: Path) -> Iterator[str]:
    """Start vLLM and yield its base URL. ``packages`` is a folder of additional packages."""
    port = free_port()
    command = [str(peer / "venv/bin/vllm"), "serve", str(model), "--port", str(port), "--served-model-name", "m"]
    command += ["--dtype", "float32", "--max-model-len", "4096"]
    env = vllm_environment(threads=ALL_CORES, libraries=peer) | ({"PYTHONPATH": str(packages)} if packages else {})
    process, url = Server("vLLM", command, env, folder / "vllm-images.log"), f"http://127.0.0.1:{port}"
    try:
        process.wait(lambda: healthy(url))
        yield url
    finally:
        process.close()


def neighbours(url: str, images: int) -> dict[str, float]:
    """Return milliseconds: p99 and maximum of the gaps without images, and the maximum with images."""
    asyncio.run(gaps_of(url, 512, 1))
    alone = asyncio.run(gaps_of(url, 512, 0))
    beside = asyncio.run(gaps_of(url, 2048, images))
    cut = statistics.quantiles(alone, n=100)
    found = {"undisturbed p99": cut[98], "undisturbed longest": max(alone)}
    found |= {"beside p99": statistics.quantiles(beside, n=100)[98], "beside longest": max(beside)}
    return {name: round(1000 * seconds, 1) for name, seconds in found.items()}


def block_seconds(model: Path) -> float:
    """Return the median seconds of a vision encoder block for one image, measured alone in a process of its own."""
    program = f"from {__name__ if __name__ != '__main__' else 'tests.benchmarks.multimodal_serving'} import time_blocks"
    command = [sys.executable, "-c", f"{program}; print(time_blocks({str(model)!r}))"]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def time_blocks(model: str) -> float:
    """Measure in this process with torch's default number of threads."""
    import torch

    from penstock_enginecore.config import KernelsConfig, ModelConfig
    from penstock_enginecore.forward.native import pack_towers
    from penstock_enginecore.models.loader import load_model
    from penstock_enginecore.native.backend import open_backend

    cpu = torch.device("cpu")
    encoder = load_model(ModelConfig(path=model), cpu, lambda _: None, with_towers=True).encoder
    if encoder is None:
        raise SystemExit(f"{model} has no tower")
    pack_towers(encoder, open_backend(KernelsConfig(), cpu, torch.get_num_threads()))
    seconds: list[float] = []
    for _ in range(2):
        seconds.clear()  # discard the first, slower measurements
        encoder.start(encoder.largest("image"))
        while encoder.has_work:
            began = time.perf_counter()
            encoder.advance(0)
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def tell(found: dict[str, Any]) -> None:
    """Print a line of JSON."""
    print(json.dumps(found), flush=True)


def main() -> int:
    """Print a line of JSON for each measurement."""
    parser = argparse.ArgumentParser(prog="multimodal_serving", description=(__doc__ or "").split("\n\n", 1)[1])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--peer", type=Path, help="where vLLM's CPU build is")
    parser.add_argument(
        "--peer-packages", type=Path, help=("folder of the additional packages that vLLM imports: torchvision")
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--images", type=int, default=4, help="number of images per round")
    parser.add_argument(
        "--server",
        choices=("penstock", "not sliced", "vLLM"),
        action="append",
        help=("measure only this server; repeatable"),
    )
    parser.add_argument("--only", choices=("neighbours", "text", "images"), action="append")
    parser.add_argument(
        "--set", action="append", default=[], help="additional settings of the servers with a vision encoder"
    )
    parser.add_argument("--folder", type=Path, default=Path("build/multimodal_serving"))
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    what = arguments.only or ["neighbours", "text", "images"]
    more = [word for setting in arguments.set for word in ("--set", setting)]
    ours = partial(penstock, arguments.model, arguments.folder)
    not_sliced = [word for setting in NOT_SLICED for word in ("--set", setting)]
    servers = {
        "penstock": partial(ours, "images", *more),
        "not sliced": partial(ours, "not-sliced", *more, *not_sliced),
    }
    if arguments.peer:
        servers["vLLM"] = partial(vllm, arguments.peer, arguments.peer_packages, arguments.model, arguments.folder)
    servers = {name: server for name, server in servers.items() if name in (arguments.server or servers)}
    tell({"machine": machine(), "model": arguments.model.name, "settings": arguments.set})
    for number in range(arguments.rounds):
        if "neighbours" in what:
            tell({"round": number, "one block": round(1000 * block_seconds(arguments.model), 1)})
            for name, server in servers.items():
                with server() as url:
                    tell({"round": number, "neighbours": name} | neighbours(url, arguments.images))
        if "text" in what:
            rates = {}
            for name, flags in (("with tower", more), ("without", ["--set", "engine.multimodal.enabled=false"])):
                with penstock(arguments.model, arguments.folder, name.replace(" ", "-"), *flags) as url:
                    asyncio.run(text_rate(url, 16))
                    rates[name] = round(statistics.median([asyncio.run(text_rate(url, 32)) for _ in range(3)]), 1)
            tell({"round": number, "text": rates, "ratio": round(rates["with tower"] / rates["without"], 3)})
        if "images" in what:
            for name, server in servers.items():
                if name == "not sliced":
                    continue
                with server() as url:
                    tell({"round": number, "images": name} | asyncio.run(image_rates(url, 2 * arguments.images)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
