"""A hundred broken adapters, each loaded and requested over gRPC and HTTP, while other clients' requests continue."""

import asyncio
import contextlib
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import torch

from penstock.admin.v1 import messages_pb2 as admin_pb
from penstock.admin.v1 import service_pb2_grpc as admin_rpc
from penstock.common.v1.sampling_pb2 import SamplingParams
from penstock.inference.v1 import messages_pb2 as pb
from penstock_common.rpc.channel import make_channel
from penstock_common.rpc.status import from_rpc_error
from penstock_enginecore.lora.errors import LoraReason
from tests.fakes.models.adapters import CONFIG
from tests.fakes.models.broken_adapters import BROKEN, CHANGES, FAMILY, MAX_RANK, Broken, save_good_adapter
from tests.fakes.models.small_tokenizers import save_model
from tests.fakes.models.tiny_models import save_tiny_model
from tests.fakes.network.ports import free_port
from tests.fakes.patience import PATIENCE
from tests.fakes.systems.cluster import Cluster
from tests.soak.lora.run import held_by

pytestmark = pytest.mark.slow

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
TOKENS = 100
NEIGHBOURS = ("", "", "good", "good")
ENDLESS = "an expression without end"
SLOWEST = 0.2
"""Minimum token rate of neighbours while an engine reads adapters for half a second, relative to their usual rate."""


class Neighbour:
    """A client that repeats one request.

    Attributes:
        answers: Tokens of each finished request.
        tokens: Number of tokens received.
    """

    def __init__(self, stub: Any, name: str) -> None:
        self.name = name
        self.answers: list[list[int]] = []
        self.tokens = 0
        self._stub = stub

    async def run(self) -> None:
        while True:
            self.answers.append(await self._ask())

    async def _ask(self) -> list[int]:
        params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT), sampling_params=params, lora=self.name)
        tokens: list[int] = []
        async for response in self._stub.Generate(request):
            tokens += response.token_ids
            self.tokens += len(response.token_ids)
        return tokens


class Server:
    """A running server, and neighbours that send requests.

    Attributes:
        folder: Directory in which the server looks for adapters.
        loaded: Directory of adapters that are loaded by path.
    """

    def __init__(self, cluster: Cluster, admin: Any, http: httpx.AsyncClient, folder: Path, loaded: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        self.loaded = loaded
        self.neighbours = [Neighbour(cluster.stub, name) for name in NEIGHBOURS]
        self._admin = admin
        self._http = http

    async def refusals(self, name: str) -> AsyncIterator[tuple[str, str]]:
        """Yield the code and the message for each way to load or request the broken adapter with this name."""
        path = str(self.loaded / name)
        with pytest.raises(grpc.aio.AioRpcError, match=r".*") as refused:
            await self._admin.LoadLora(admin_pb.LoadLoraRequest(name="loaded", path=path))
        yield self._of_grpc(refused.value)
        yield self._of_http(
            await self._http.post("/v1/load_lora_adapter", json={"lora_name": "loaded", "lora_path": path})
        )
        if not (self.folder / name / CONFIG).exists():
            return  # the directory has no such adapter
        with pytest.raises(grpc.aio.AioRpcError, match=r".*") as refused:
            async for _ in self.cluster.stub.Generate(pb.GenerateRequest(text="a", lora=name)):
                pass
        yield self._of_grpc(refused.value)
        yield self._of_http(await self._http.post("/v1/completions", json={"model": name, "prompt": "a"}))

    async def progress(self) -> None:
        """Wait until every neighbour has received more tokens."""
        before = [each.tokens for each in self.neighbours]
        async with asyncio.timeout(PATIENCE):
            while any(each.tokens == count for each, count in zip(self.neighbours, before, strict=True)):
                await asyncio.sleep(0.002)

    async def pace(self, work: Any) -> float:
        """Return the tokens per second that all neighbours together receive while ``work`` runs."""
        before, began = sum(each.tokens for each in self.neighbours), time.monotonic()
        await work
        return (sum(each.tokens for each in self.neighbours) - before) / (time.monotonic() - began)

    def _of_grpc(self, error: grpc.aio.AioRpcError) -> tuple[str, str]:
        failed = from_rpc_error(error)
        return f"{failed.code} {failed.reason}", failed.message

    def _of_http(self, answer: httpx.Response) -> tuple[str, str]:
        return str(answer.status_code), answer.json()["error"]["message"]


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    model = save_tiny_model(FAMILY, tmp_path / "model", **CHANGES)
    save_model(tmp_path / "model")
    folder, loaded = tmp_path / "directory", tmp_path / "loaded"
    save_good_adapter(model, folder / "good")
    for name, broken in BROKEN.items():
        for where in (folder, loaded):
            shutil.copytree(folder / "good", where / name)
            broken.do(where / name)
    admin_port = free_port()
    flags = {
        "admin__port": admin_port,
        "lora__directory": folder,
        "lora__roots": f"[{loaded}]",
        "lora__http_loading": "true",
    }
    cluster = Cluster(
        tmp_path / "model", engines=1, frontend_flags=flags, lora__max_loras=2, lora__max_lora_rank=MAX_RANK
    )
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(cluster)
        channel = await stack.enter_async_context(make_channel(f"127.0.0.1:{admin_port}"))
        http = await stack.enter_async_context(
            httpx.AsyncClient(
                base_url=f"http://127.0.0.1:{cluster.frontend.metrics_port}", timeout=PATIENCE, trust_env=False
            )
        )
        made = Server(cluster, admin_rpc.AdminServiceStub(channel), http, folder, loaded)
        tasks = [asyncio.create_task(each.run()) for each in made.neighbours]
        yield made
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(each, asyncio.CancelledError) for each in ended), ended


def codes(broken: Broken) -> tuple[str, str]:
    """Return the expected codes over gRPC and over HTTP."""
    if broken.reason in (LoraReason.NOT_FOUND, LoraReason.UNREADABLE):
        return "UNAVAILABLE LORA_UNAVAILABLE", "503"
    return "FAILED_PRECONDITION LORA_REFUSED", "400"


async def test_each_is_refused_by_what_is_broken_while_neighbours_go_on(server: Server) -> None:
    torch.set_num_threads(1)
    await server.progress()
    (held,) = [await held_by(server.cluster, 0)]
    wrong: list[str] = []
    ways = 0
    for name, broken in BROKEN.items():
        of_grpc, of_http = codes(broken)
        expected = iter((of_grpc, of_http, of_grpc, of_http))
        async for code, message in server.refusals(name):
            ways += 1
            wanted = next(expected)
            missing = [word for word in broken.words if word not in message]
            if code != wanted or missing:
                wrong.append(f"{name}: {code} in place of {wanted}, without {missing}: {message}")
        await server.progress()
    assert not wrong, "\n".join(wrong)
    assert len(BROKEN) >= 40
    assert ways > 3 * len(BROKEN)
    await server.progress()
    for neighbour in server.neighbours:
        same = next(each.answers[0] for each in server.neighbours if each.name == neighbour.name)
        assert len(neighbour.answers) > 3
        assert all(answer == same for answer in neighbour.answers)
        assert len(same) == TOKENS
    assert server.neighbours[0].answers[0] != server.neighbours[-1].answers[0]
    assert await held_by(server.cluster, 0) == held


async def test_slow_refusals_delay_no_other_request(server: Server) -> None:
    async def refused() -> None:
        async for _ in server.refusals(ENDLESS):
            pass

    await server.progress()
    quiet = await server.pace(asyncio.sleep(2.0))
    assert await server.pace(refused()) > SLOWEST * quiet
