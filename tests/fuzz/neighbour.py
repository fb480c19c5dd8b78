"""A client that does nothing wrong: it streams answers one after the other, in a process of its own, and times their tokens.

``python -m tests.fuzz.neighbour HOST:PORT`` runs until its input is closed, then prints the moments of its tokens.
"""

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import NamedTuple

import grpc

from penstock.common.v1.sampling_pb2 import SamplingParams
from penstock.inference.v1 import messages_pb2 as pb
from penstock.inference.v1 import service_pb2_grpc as rpc
from penstock_common.rpc.channel import make_channel

_STREAMS = 2
_TOKENS = 200


class Itl(NamedTuple):
    """Inter-token latencies in milliseconds."""

    p50: float
    p99: float
    longest: float
    count: int


class Neighbour:
    """The process."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> "Neighbour":
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", __name__, self._address, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    async def end(self) -> tuple[list[tuple[float, float]], list[str]]:
        """Moment and latency (seconds) of every token but the first ones; and what went wrong."""
        assert self._process is not None
        output, _ = await self._process.communicate(b"")
        told = json.loads(output)
        return told["gaps"], told["errors"]


def between(gaps: Sequence[tuple[float, float]], spans: Sequence[tuple[float, float]]) -> Itl:
    """The latencies of spans of time, each of which has a begin and an end (``time.monotonic``)."""
    chosen = [1e3 * gap for at, gap in gaps if any(start <= at < stop for start, stop in spans)]
    if len(chosen) < 2:
        return Itl(0.0, 0.0, 0.0, len(chosen))
    cuts = statistics.quantiles(chosen, n=100)
    return Itl(cuts[49], cuts[98], max(chosen), len(chosen))


async def _main(address: str) -> None:
    ended = asyncio.Event()
    asyncio.get_running_loop().run_in_executor(None, sys.stdin.read).add_done_callback(lambda _: ended.set())
    gaps: list[tuple[float, float]] = []
    errors: list[str] = []

    async def stream(stub: rpc.InferenceServiceStub, number: int) -> None:
        while not ended.is_set():
            number += _STREAMS
            params = SamplingParams(max_tokens=_TOKENS, ignore_eos=True, seed=number, temperature=1.0)
            request = pb.GenerateRequest(text="Once upon a time there was", sampling_params=params)
            last, tokens = 0.0, 0
            try:
                async for output in stub.Generate(request, timeout=60):
                    now = time.monotonic()
                    if last and output.token_ids:
                        gaps.append((now, now - last))
                    last, tokens = now, tokens + len(output.token_ids)
            except grpc.aio.AioRpcError as e:
                errors.append(f"{e.code().name}: {e.details()}")
                await asyncio.sleep(0.1)
                continue
            if tokens != _TOKENS:
                errors.append(f"{tokens} of {_TOKENS} tokens came")

    async with make_channel(address) as channel:
        await asyncio.gather(*(stream(rpc.InferenceServiceStub(channel), number) for number in range(_STREAMS)))
    print(json.dumps({"gaps": gaps, "errors": errors}))


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1]))
