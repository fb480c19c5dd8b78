"""Maximum throughput of one frontend process, and its cost per token and per request: ``python -m
tests.benchmarks.frontend_ceiling``.

The frontend is a separate process. This process runs the engines (``FakeEngine``: no model, prepared outputs) and the
clients (``raw_streams``: no HTTP or gRPC library). By default, the engines run a step once the clients have read the
previous step. Then every token is a separate piece of output, even on a busy machine. With ``--ahead``, the engines do
not wait for the clients, and a slow frontend merges tokens into larger pieces. The CPU time is the frontend's, from
/proc: user and system, all threads. CPU times are comparable even on a shared machine.

``--base-url`` measures a running server with the same load. The server must be OpenAI-compatible and run its own
engines. ``--pids`` lists the server's processes.
"""

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from penstock.enginecore.v1 import messages_pb2 as pb
from tests.benchmarks.raw_streams import GrpcStreams, HttpStreams, StreamError, Streams
from tests.fakes.engines.fake_engine import FakeEngine
from tests.fakes.engines.oracle_engine import outputs
from tests.fakes.models.small_tokenizers import save_model
from tests.fakes.network.ports import free_port
from tests.fakes.processes import KEPT, Service

PROMPT = "The quick brown fox jumps over the lazy dog. "
MAX_MODEL_LEN = 65_536


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """A load: ``requests`` requests on ``streams`` concurrent streams, each with ``output_len`` output tokens."""

    streams: int
    requests: int
    output_len: int


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """Results of one run. ``cpu_us``: microseconds of CPU per token, or per request if each request has one token."""

    tokens_per_s: float
    requests_per_s: float
    tokens_per_piece: float
    cpu_us_per_token: float
    cpu_us_per_request: float
    system_share: float


class Engines:
    """Engines that run steps together, at most ``ahead`` steps before the clients have read them."""

    def __init__(self, count: int, *, output_len: int, ahead: int) -> None:
        script = [outputs.token(1, index) for index in range(output_len)]

        def output_of(_: pb.EngineCoreRequest) -> Sequence[int]:
            return script

        self._engines = [
            FakeEngine(
                f"engine-{i}",
                max_model_len=MAX_MODEL_LEN,
                vocab_size=outputs.vocab_size(),
                manual=True,
                script=output_of,
            )
            for i in range(count)
        ]
        self._ahead = ahead
        self._unread = 0
        self._room = asyncio.Event()

    @property
    def addresses(self) -> list[str]:
        """Return the engines' addresses for the frontend."""
        return [engine.address for engine in self._engines]

    async def start(self) -> None:
        """Start to listen."""
        for engine in self._engines:
            await engine.start()

    async def stop(self) -> None:
        """End all sessions."""
        for engine in self._engines:
            await engine.kill()

    def read(self, pieces: int) -> None:
        """Record that a client has read ``count`` pieces."""
        self._unread -= pieces
        self._room.set()

    async def step_for_ever(self) -> None:
        """Take steps while there are requests and the clients keep up."""
        while True:
            running = sum(len(engine.running) for engine in self._engines)
            if running == 0 or self._unread > (self._ahead - 1) * running:
                self._room.clear()
                # A new request does not set this event, so check again after a millisecond.
                await _set_within(self._room, 0.001)
                continue
            self._unread += running
            for engine in self._engines:
                engine.step()
                engine.requests.clear()
            await asyncio.sleep(0)


async def _set_within(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return


def cpu_seconds(pids: Sequence[int]) -> tuple[float, float]:
    """Return the user and system time of all threads of these processes."""
    ticks = os.sysconf("SC_CLK_TCK")
    fields = [Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split() for pid in pids]
    return sum(int(each[11]) for each in fields) / ticks, sum(int(each[12]) for each in fields) / ticks


async def measure(streams: Streams, load: Load, pids: Sequence[int], engines: Engines | None) -> Result:
    """Run the load once. Raises StreamError if a request has too few tokens."""
    ended = asyncio.Event()
    num_started = num_ended = num_pieces = 0
    wrong: list[str] = []
    starting: set[asyncio.Task[None]] = set()

    def on_piece(count: int) -> None:
        nonlocal num_pieces
        num_pieces += count
        if engines is not None:
            engines.read(count)

    def on_end(tokens: int) -> None:
        nonlocal num_ended
        num_ended += 1
        if tokens != load.output_len:
            wrong.append(f"a request gave {tokens} of {load.output_len} tokens")
        if num_ended == load.requests or wrong:
            ended.set()
        elif num_started < load.requests:
            start()

    def start() -> None:
        nonlocal num_started
        num_started += 1
        task = asyncio.get_running_loop().create_task(streams.start(on_piece, on_end))
        starting.add(task)
        task.add_done_callback(starting.discard)

    began, (user, system) = time.perf_counter(), cpu_seconds(pids)
    for _ in range(min(load.streams, load.requests)):
        start()
    await ended.wait()
    seconds = time.perf_counter() - began
    user_now, system_now = cpu_seconds(pids)
    if wrong:
        raise StreamError(wrong[0])
    tokens, cpu = load.requests * load.output_len, user_now - user + system_now - system
    return Result(
        tokens_per_s=tokens / seconds,
        requests_per_s=load.requests / seconds,
        tokens_per_piece=tokens / max(num_pieces, 1),
        cpu_us_per_token=cpu / tokens * 1e6,
        cpu_us_per_request=cpu / load.requests * 1e6,
        system_share=(system_now - system) / cpu if cpu else 0.0,
    )


@asynccontextmanager
async def own_frontend(flags: argparse.Namespace, output_len: int) -> AsyncIterator[tuple[Service, int, Engines]]:
    """Run a frontend with engines. Yields the frontend, its HTTP port, and the engines."""
    engines = Engines(flags.engines, output_len=output_len, ahead=flags.ahead)
    http_port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder))
        await engines.start()
        service = Service(
            "penstock_frontend",
            model__path=folder,
            model__served_model_name="model",
            engines=f"[{', '.join(map(repr, engines.addresses))}]",
            admin__host="127.0.0.1",
            admin__port=0,
            http__host="127.0.0.1",
            http__port=http_port,
            **KEPT,
        )
        async with service:
            await service.serving()
            stepping = asyncio.create_task(engines.step_for_ever())
            try:
                yield service, http_port, engines
            finally:
                stepping.cancel()
                await asyncio.gather(stepping, return_exceptions=True)
        await engines.stop()


async def one(flags: argparse.Namespace, protocol: str, load: Load) -> Result:
    """Run a warm-up and some rounds over one protocol, against a new frontend or the server at ``--base-url``.

    The result has the median of the times and the minimum of the CPU time, because other load on the machine can only
    increase the CPU time.
    """
    prompt = PROMPT * flags.prompt_repeats
    warm = Load(streams=load.streams, requests=load.streams, output_len=load.output_len)
    if flags.base_url:
        return await _runs(flags, flags.base_url, "", protocol, load, warm, flags.pids, None, prompt)
    async with own_frontend(flags, load.output_len) as (service, http_port, engines):
        url = f"http://127.0.0.1:{http_port}"
        return await _runs(flags, url, service.address, protocol, load, warm, [service.pid], engines, prompt)


async def _runs(
    flags: argparse.Namespace,
    url: str,
    address: str,
    protocol: str,
    load: Load,
    warm: Load,
    pids: Sequence[int],
    engines: Engines | None,
    prompt: str,
) -> Result:
    streams: Streams
    if protocol == "grpc":
        streams = GrpcStreams(
            address, prompt=prompt, max_tokens=load.output_len, connections=min(flags.connections, load.streams)
        )
    else:
        streams = HttpStreams(
            url, model=flags.model, prompt=prompt, max_tokens=load.output_len, chat=protocol == "chat"
        )
    try:
        await measure(streams, warm, pids, engines)
        results = [await measure(streams, load, pids, engines) for _ in range(flags.rounds)]
    finally:
        await streams.close()
    least = min(results, key=lambda each: each.cpu_us_per_token)
    return msgspec.structs.replace(
        least,
        tokens_per_s=statistics.median(each.tokens_per_s for each in results),
        requests_per_s=statistics.median(each.requests_per_s for each in results),
    )


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the parsed flags."""
    parser = argparse.ArgumentParser(prog="frontend_ceiling", description=__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument(
        "--protocols", nargs="+", choices=["grpc", "http", "chat"], help="default: grpc http; http with --base-url"
    )
    parser.add_argument("--output-len", type=int, default=128, help="tokens per request, in the runs that count tokens")
    parser.add_argument("--tokens", type=int, default=65_536, help="of a run, at least one request per stream")
    parser.add_argument("--requests", type=int, default=2048, help="of a run that counts requests, of one token each")
    parser.add_argument("--rounds", type=int, default=3, help="runs; the least CPU and the median time count")
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--ahead", type=int, default=1, help="steps that engines may be ahead of the clients")
    parser.add_argument("--connections", type=int, default=8, help="over gRPC; over HTTP each stream has one")
    parser.add_argument("--prompt-repeats", type=int, default=4, help=f"of {PROMPT!r}")
    parser.add_argument(
        "--base-url", default="", help="base URL of another OpenAI-compatible server, e.g. http://127.0.0.1:8100"
    )
    parser.add_argument("--model", default="model", help="name of the model on that server")
    parser.add_argument(
        "--pids", type=int, nargs="+", default=[], help="processes of that server whose CPU time is counted"
    )
    flags = parser.parse_args(arguments)
    flags.protocols = flags.protocols or (["http"] if flags.base_url else ["grpc", "http"])
    if flags.base_url and "grpc" in flags.protocols:
        parser.error("--protocols grpc: with --base-url there are http and chat")
    if flags.base_url and not flags.pids:
        parser.error("--base-url needs --pids, the processes whose CPU time counts")
    return flags


async def main(flags: argparse.Namespace) -> None:
    """Measure a row for each protocol, load and number of streams."""
    write = sys.stdout.write
    write("protocol streams  load       tokens/s  requests/s  tokens/piece  CPU us/token  CPU us/request  system\n")
    for protocol in flags.protocols:
        for streams in flags.streams:
            tokens = Load(
                streams=streams, requests=max(streams, flags.tokens // flags.output_len), output_len=flags.output_len
            )
            requests = Load(streams=streams, requests=max(streams, flags.requests), output_len=1)
            for name, load in (("tokens", tokens), ("requests", requests)):
                if (name == "tokens" and not flags.tokens) or (name == "requests" and not flags.requests):
                    continue
                result = await one(flags, protocol, load)
                write(
                    f"{protocol:8s} {streams:7d}  {name:8s} {result.tokens_per_s:10.0f}  {result.requests_per_s:10.1f}  "
                    f"{result.tokens_per_piece:12.2f}  {result.cpu_us_per_token:12.1f}  {result.cpu_us_per_request:14.1f}  "
                    f"{result.system_share:6.0%}\n"
                )
                sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main(parse()))
