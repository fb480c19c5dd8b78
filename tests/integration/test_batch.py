"""``penstock batch`` with the demo model loaded in the command's process, and with a server."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from penstock_enginecore.config import CacheConfig, EngineCoreConfig, ExecutorConfig, ModelConfig
from penstock_enginecore.executor.uniproc import UniprocExecutor
from penstock_local.batch.batch import batch
from penstock_local.batch.options import BatchOptions
from tests.fakes.engines.engine_server import EngineServer
from tests.fakes.frontends.openai_server import openai_server

DEMO = Path(__file__).resolve().parents[2] / "examples/demo_model/penstock-tiny"
ENGINE: dict[str, Any] = {"device": "cpu", "num_threads": 1, "kv_cache_memory": "32MiB", "max_num_seqs": 16}


def requests() -> list[dict[str, Any]]:
    lines = []
    for number in range(24):
        body: dict[str, Any] = {"model": "model", "temperature": 0, "max_tokens": 6}
        url = "/v1/completions" if number % 2 else "/v1/chat/completions"
        body |= (
            {"prompt": f"Once {number}"} if number % 2 else {"messages": [{"role": "user", "content": f"{number}+1?"}]}
        )
        lines.append({"custom_id": str(number), "method": "POST", "url": url, "body": body})
    lines[5]["body"]["model"] = "gpt"
    lines[6]["body"]["messages"] = []
    lines[7]["body"]["prompt"] = "a " * 4000
    lines[8] = {"custom_id": "8", "method": "POST", "url": "/v1/embeddings", "body": {"input": "Hi"}}
    return lines


def read(path: Path) -> dict[str, Mapping[str, Any]]:
    """Return each record's status and its reproducible parts by ``custom_id``."""
    found = {}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        body = record["response"]["body"]
        told = [choice.get("text") or choice["message"]["content"] for choice in body.get("choices", [])]
        found[record["custom_id"]] = {
            "status": record["response"]["status_code"],
            "texts": told,
            "error": body.get("error"),
            "tokens": body.get("usage", {}).get("total_tokens"),
        }
    return found


@pytest.mark.asyncio
async def test_a_batch_is_answered_alike_by_an_engine_of_its_own_and_by_a_server(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in requests()))
    here = BatchOptions(
        input=str(source), output=str(tmp_path / "here.jsonl"), model=str(DEMO), served_model_name="model", **ENGINE
    )
    assert await asyncio.to_thread(batch, here) == 1
    config = EngineCoreConfig(
        model=ModelConfig(path=str(DEMO), served_model_name="model", device="cpu"),
        cache=CacheConfig(num_blocks=256),
        executor=ExecutorConfig(num_threads=1),
    )
    engine = EngineServer(config, UniprocExecutor(config)).start().load()
    async with openai_server(DEMO, engines=[engine.address]) as server:
        url = f"http://127.0.0.1:{server.port}"
        there = BatchOptions(input=str(source), output=str(tmp_path / "there.jsonl"), server=(f"{url}/v1", url))
        assert await asyncio.to_thread(batch, there) == 1
    engine.stop()
    assert read(tmp_path / "here.jsonl") == read(tmp_path / "there.jsonl")
    assert list(read(tmp_path / "here.jsonl")) == [str(number) for number in range(24) if number not in (5, 6, 7, 8)]
    failed = read(tmp_path / "here.errors.jsonl")
    assert failed == read(tmp_path / "there.errors.jsonl")
    assert {name: each["status"] for name, each in failed.items()} == {"5": 404, "6": 400, "7": 400, "8": 400}


@pytest.mark.asyncio
async def test_an_engine_of_its_own_applies_the_adapters_that_lines_name(tmp_path: Path) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 16, "temperature": 0}
    lines = [
        {"custom_id": name, "url": "/v1/completions", "body": {**body, "model": name}} for name in ("model", "pirate")
    ]
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = BatchOptions(
        input=str(source),
        output=str(tmp_path / "out.jsonl"),
        model=str(DEMO),
        served_model_name="model",
        lora={"pirate": str(DEMO.parent / "penstock-tiny-pirate")},
        **ENGINE,
    )
    assert await asyncio.to_thread(batch, options) == 0
    answers = [json.loads(line)["response"]["body"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [answer["model"] for answer in answers] == ["model", "pirate"]
    assert answers[0]["choices"][0]["text"] != answers[1]["choices"][0]["text"]
