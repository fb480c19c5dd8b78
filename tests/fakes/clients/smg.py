"""The SMG gateway, an external program, as a process in front of a frontend."""

import asyncio
import contextlib
import os
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx

from tests.fakes.network.ports import free_port
from tests.fakes.patience import PATIENCE

SMG = os.environ.get("PENSTOCK_SMG") or shutil.which("smg")
MISSING = "no gateway: smg is neither on PATH nor in PENSTOCK_SMG (docs/guides/gateways.md)"
START_TIMEOUT = PATIENCE


@contextlib.asynccontextmanager
async def gateway(
    worker: str, model: Path, name: str, log: Path, *words: str, decode: str = ""
) -> AsyncIterator[httpx.AsyncClient]:
    """Start a gateway in front of a frontend that serves ``model`` as ``name``. Yield a client when it is ready.

    ``words``: further arguments of the gateway's command. ``decode``: address of a decode frontend; ``worker`` is then
    a prefill frontend. Raises RuntimeError with the gateway's log if the gateway does not become ready.
    """
    port, metrics = free_port(), free_port()
    workers = ["--worker-urls", f"grpc://{worker}"]
    if decode:
        workers = ["--pd-disaggregation", "--prefill", f"grpc://{worker}", "--decode", f"grpc://{decode}"]
    arguments = [*workers, "--host", "127.0.0.1", "--port", str(port)]
    arguments += ["--prometheus-port", str(metrics), "--model-path", str(model), *words]
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            str(SMG), "launch", *arguments, stdout=output, stderr=output, env={**os.environ, "PYTHONPATH": ""}
        )
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE) as client:
            async with asyncio.timeout(START_TIMEOUT):
                while not await _is_ready(client, name):
                    if process.returncode is not None:
                        raise RuntimeError(f"the gateway ended with {process.returncode}: {written(log)[-3000:]}")
                    await asyncio.sleep(0.1)
            yield client
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await process.wait()


async def _is_ready(client: httpx.AsyncClient, name: str) -> bool:
    """Return whether the gateway lists the frontend's model."""
    try:
        response = await client.get("/v1/models")
    except httpx.TransportError:
        return False
    return response.is_success and any(each["id"] == name for each in response.json()["data"])


def written(log: Path) -> str:
    """Return the log output of the gateway."""
    return log.read_text()


async def post(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Send a request and return the answer. Fails if the answer is an error."""
    response = await client.post(path, json=body)
    assert response.is_success, response.text
    answer: dict[str, Any] = response.json()
    return answer
