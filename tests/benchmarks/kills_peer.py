"""Results for clients of vLLM's gRPC server when its engine process is killed during their streams."""

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import msgspec
from rich.table import Table
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from tests.benchmarks.peers import Server, vllm_environment
from tests.fakes.network.ports import free_port

PROMPT_LEN, VOCAB = 16, 2000
KILL_AFTER = 3.0
END_TIMEOUT = 120.0
LIVES_TIMEOUT = 60.0
ENGINE_PROCESS = ("VLLM::EngineCore", "VLLM::Worker")


class PeerResult(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of streams that were complete, that failed (by status), and that did not end within two minutes.

    ``serves_again`` says whether a new request was answered within a minute after the kill.
    """

    streams: int
    undisturbed: int
    finished: int
    pending: int
    errors: dict[str, int]
    serves_again: bool
    said: str


class _Client:
    def __init__(self, port: int) -> None:
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        self._stub: Any = vllm_engine_pb2_grpc.VllmEngineStub(self.channel)

    async def run(self, number: int, tokens: int) -> str:
        """Run a stream. Returns "finished", or the status of the error."""
        rng = random.Random(number)
        prompt = [rng.randrange(10, VOCAB) for _ in range(PROMPT_LEN)]
        sampled = {"temperature": 1.0, "seed": number} if number % 2 else {"temperature": 0.0}
        params = pb.SamplingParams(
            top_p=1.0, repetition_penalty=1.0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True, n=1, **sampled
        )
        request = pb.GenerateRequest(
            request_id=f"kill-{time.time_ns()}-{number}",
            stream=True,
            tokenized=pb.TokenizedInput(original_text="", input_ids=prompt),
            sampling_params=params,
        )
        got = 0
        try:
            async for response in self._stub.Generate(request):
                got += len(response.chunk.token_ids) if response.HasField("chunk") else 0
        except grpc.aio.AioRpcError as e:
            return f"{e.code().name}: {e.details()}"[:120]
        return "finished" if got >= tokens else f"ended after {got} of {tokens} tokens"

    async def answers(self) -> str:
        """The answer to a short request, see ``run``."""
        try:
            async with asyncio.timeout(10):
                return await self.run(0, 4)
        except TimeoutError:
            return "no answer within 10 s"


def measure(peer: Path, model: Path, work: Path, streams: int, tokens: int, log: Callable[[str], object]) -> PeerResult:
    """Start the server and run the streams without faults. Then run them again and kill the engine process."""
    work.mkdir(parents=True, exist_ok=True)
    port = free_port()
    command = [str(peer / "venv/bin/vllm"), "serve", str(model), "--port", str(port), "--grpc"]
    command += ["--dtype", "float32", "--max-model-len", "2048", "--served-model-name", "m"]
    env = vllm_environment(kv_cache=1)
    server = Server("vLLM", command, env, work / "vllm.log")
    try:
        seconds = server.wait(lambda: asyncio.run(_ready(port)))
        log(f"vLLM answers after {seconds:.0f} s")
        return asyncio.run(_measure(server.pid, port, streams, tokens, log))
    finally:
        server.close()


async def _ready(port: int) -> bool:
    client = _Client(port)
    async with client.channel:
        return await client.answers() == "finished"


async def _measure(server_pid: int, port: int, streams: int, tokens: int, log: Callable[[str], object]) -> PeerResult:
    client = _Client(port)
    async with client.channel:
        began = time.monotonic()
        calm = await asyncio.gather(*(client.run(number, tokens) for number in range(streams)))
        log(f"vLLM, undisturbed: {calm.count('finished')} of {streams} in {time.monotonic() - began:.1f} s")
        running = [asyncio.create_task(client.run(number, tokens)) for number in range(streams)]
        await asyncio.sleep(KILL_AFTER)
        pid = engine_process(server_pid)
        os.kill(pid, signal.SIGKILL)
        log(f"process {pid} killed")
        done, pending = await asyncio.wait(running, timeout=END_TIMEOUT)
        ends = [task.result() for task in done]
        for task in pending:
            task.cancel()
        said = await client.answers()
        deadline = time.monotonic() + LIVES_TIMEOUT
        while said != "finished" and time.monotonic() < deadline:
            await asyncio.sleep(2)
            said = await client.answers()
    return PeerResult(
        streams=streams,
        undisturbed=calm.count("finished"),
        finished=ends.count("finished"),
        pending=len(pending),
        errors=dict(Counter(end for end in ends if end != "finished")),
        serves_again=said == "finished",
        said=said,
    )


def engine_process(server_pid: int) -> int:
    """Return the engine process among the server's descendants. Raises RuntimeError if there is none."""
    found = list(_descendants(server_pid))
    for pid in found:
        name = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
        if name.startswith(ENGINE_PROCESS):
            return pid
    raise RuntimeError(f"none of {found} is vLLM's engine process")


def _descendants(pid: int) -> list[int]:
    children = [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
    return [*children, *(each for child in children for each in _descendants(child))]


def table(result: PeerResult) -> Table:
    """Return a table with one row."""
    made = Table(title="vLLM's gRPC server, its engine process killed once")
    for column in ("streams", "finished", "pending", "failed", "serves again", "a new request gets"):
        made.add_column(column, justify="right")
    failed = sum(result.errors.values())
    again = "yes" if result.serves_again else "no"
    made.add_row(str(result.streams), str(result.finished), str(result.pending), str(failed), again, result.said)
    return made
