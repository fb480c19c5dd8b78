"""Images through the SMG gateway: as tensors from the gateway, and as references that the frontend fetches."""

import base64
import io
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import pytest_asyncio

from tests.fakes.clients.smg import MISSING, SMG, gateway, post
from tests.fakes.multimodal_models import make_image, save_multimodal_model
from tests.fakes.patience import PATIENCE
from tests.fakes.processes import KEPT, Service

pytestmark = [
    pytest.mark.skipif(SMG is None, reason=MISSING),
    pytest.mark.asyncio(loop_scope="module"),
]

NAMES = {"llava": "llava-1.5-tiny", "qwen3_vl": "qwen3-vl-tiny"}
"""Model names. The gateway chooses its image processing by the model's name."""
FITS = {"llava": [(32, 32), (32, 32)], "qwen3_vl": [(64, 48), (32, 96)]}
"""Image sizes that need no resizing, because some pixels of the gateway's resized images differ by one level."""


class Served(NamedTuple):
    """A model, and a frontend with gRPC and HTTP ports."""

    family: str
    name: str
    folder: Path
    address: str
    client: httpx.AsyncClient


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=sorted(FITS))
async def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    """Yield a served model whose tokenizer adds no special tokens.

    The gateway adds only the special tokens of the chat template.
    """
    name = NAMES[request.param]
    folder = tmp_path_factory.mktemp("models") / name
    save_multimodal_model(request.param, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer | {"post_processor": None}))
    engine = Service("penstock_enginecore", model__path=folder, cache__kv_cache_memory="64MiB", executor__num_threads=1)
    frontend = Service(
        "penstock_frontend",
        metrics_flag="http.port",
        http__host="127.0.0.1",
        model__path=folder,
        engines=json.dumps([engine.address]),
        media__allow_features="true",
        admin__port=0,
        **KEPT,
    )
    async with engine, frontend:
        await engine.serving()
        await frontend.serving()
        url = f"http://127.0.0.1:{frontend.metrics_port}"
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE) as client:
            yield Served(request.param, name, folder, frontend.address, client)


def chat(name: str, *sizes: tuple[int, int]) -> dict[str, Any]:
    """Return a chat request about images of these sizes."""
    content: list[dict[str, Any]] = []
    for number, (width, height) in enumerate(sizes):
        file = io.BytesIO()
        make_image(width, height, seed=number).save(file, "PNG")
        url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
        content.append({"type": "image_url", "image_url": {"url": url}})
    content.append({"type": "text", "text": "What is it?"})
    messages = [{"role": "user", "content": content}]
    return {"model": name, "messages": messages, "temperature": 0, "max_tokens": 16, "ignore_eos": True}


def answered(answer: dict[str, Any]) -> tuple[str, int]:
    """Return the answer's text, without an incomplete character at its end, and the number of prompt tokens."""
    return answer["choices"][0]["message"]["content"].rstrip("\ufffd"), answer["usage"]["prompt_tokens"]


async def assert_the_same(served: Served, client: httpx.AsyncClient, *sizes: tuple[int, int]) -> None:
    """Check that answers are the same with and without the gateway, and that answers to other images differ."""
    body = chat(served.name, *sizes)
    got, wanted = [answered(await post(each, "/v1/chat/completions", body)) for each in (client, served.client)]
    assert got == wanted
    assert wanted[0] != answered(await post(served.client, "/v1/chat/completions", chat(served.name)))[0]


async def test_tensors_of_the_gateway_are_answered_as_files_are(served: Served, tmp_path: Path) -> None:
    words = ("--mm-processing", "router")
    async with gateway(served.address, served.folder, served.name, tmp_path / "log", *words) as client:
        first, second = FITS[served.family]
        await assert_the_same(served, client, first)
        await assert_the_same(served, client, second, first)


async def test_references_are_answered_as_files_are(served: Served, tmp_path: Path) -> None:
    words = ("--mm-processing", "worker")
    async with gateway(served.address, served.folder, served.name, tmp_path / "log", *words) as client:
        if served.family == "llava":  # the gateway does not forward images of this model type
            refused = await client.post("/v1/chat/completions", json=chat(served.name, (32, 32)))
            assert refused.json()["error"]["code"] == "multimodal_worker_processing_unsupported_model"
            return
        await assert_the_same(served, client, (90, 70))
        await assert_the_same(served, client, (300, 40), (64, 64))
