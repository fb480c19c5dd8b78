"""Transport from an engine to a frontend: the gRPC session, with outputs in columns or as messages, compared with
ZeroMQ.

The engines are processes without a model: a busy thread emits frames, and an asyncio I/O thread encodes and sends them.
This process reads as a frontend does, and turns every frame into ``EngineCoreOutputs``. gRPC uses the services' code:
``IoThread`` with its sessions in the engine, ``EngineSession`` here. A request asks for ``max_tokens`` frames. Each
frame has as many outputs of one token as the prompt has tokens; the outputs are in columns if the request has a number.
At most ``WINDOW`` frames are in flight. The reader writes acknowledgements into the engine's standard input.
"""

import asyncio
import contextlib
import gc
import itertools
import os
import queue
import statistics
import sys
import threading
import time
from asyncio.subprocess import PIPE, Process
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Protocol, cast

import msgspec
import zmq
import zmq.asyncio

from penstock_common.config.sections import LogConfig, ServerConfig
from penstock_common.observability.logging import configure
from penstock_common.rpc.handshake import OLDEST_REVISION, PROTOCOL_REVISION
from penstock_common.types.outputs import (
    EngineCoreEvent,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineReady,
    FinishReason,
    Logprobs,
    PrefillStats,
    RequestError,
    SchedulerStats,
    TokenColumns,
    UtilityOutput,
)
from penstock_common.types.request import EngineCoreRequest
from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.config import EngineCoreConfig, ModelConfig
from penstock_enginecore.core.busy_loop import BusyLoop
from penstock_enginecore.rpc.io_thread import IoThread
from penstock_frontend.rpc.engine_session import EngineSession

WINDOW, ACK_EVERY = 64, 16
FRAMES = {1: 8192, 16: 8192, 64: 8192, 256: 2048}
"""Number of frames in one measurement, by outputs per frame."""
ROUND_TRIPS = 200
START_TIMEOUT, MEASURE_TIMEOUT = 120.0, 300.0

Emit = Callable[[str, EngineCoreOutputs], None]


class Row(msgspec.Struct, frozen=True):
    """Medians of a transport.

    Attributes:
        round_trip_us: Microseconds from a request to its only frame.
        engine_us: Processor time of the engine process per output.
        reader_us: Processor time of the reading process per output.
    """

    transport: str
    outputs_per_frame: int
    frames_per_s: float
    outputs_per_s: float
    round_trip_us: float
    engine_us: float
    reader_us: float


# Code of the engine process.


class FrameLoop:
    """Replacement for the busy loop. Emits the same frame as often as a request asks for."""

    def __init__(self) -> None:
        self.emit: Emit
        self._requests: queue.SimpleQueue[tuple[str, EngineCoreRequest]] = queue.SimpleQueue()
        self._parent = os.getppid()

    def add(self, client_id: str, request: EngineCoreRequest) -> None:
        """See ``BusyLoop``."""
        self._requests.put((client_id, request))

    def abort(self, client_id: str, request_ids: list[str]) -> None:
        """See ``BusyLoop``. Does nothing, because no output is refused."""

    def client_gone(self, client_id: str) -> None:
        """See ``BusyLoop``. Does nothing, because the process is stopped soon."""

    wedged = False

    def run(self) -> None:
        """Emit frames until the parent process has ended."""
        gc.collect()
        gc.freeze()  # like the busy loop
        credit = WINDOW
        while (asked := self._next()) is not None:
            client_id, request = asked
            frame = frame_of(len(request.prompt_token_ids), in_columns=request.request_number > 0)
            for _ in range(request.sampling_params.max_tokens or 1):
                while credit == 0:
                    acknowledged = os.read(sys.stdin.fileno(), WINDOW)
                    if not acknowledged:
                        return
                    credit += len(acknowledged) * ACK_EVERY
                self.emit(client_id, frame)
                credit -= 1

    def _next(self) -> tuple[str, EngineCoreRequest] | None:
        while os.getppid() == self._parent:
            with contextlib.suppress(queue.Empty):
                return self._requests.get(timeout=1.0)
        return None


def frame_of(outputs: int, *, in_columns: bool) -> EngineCoreOutputs:
    """Return the frame of a step whose outputs have one token each."""
    columns = TokenColumns()
    for number in range(outputs if in_columns else 0):
        columns.add(5000 + number, 100, [300 + number])
    return EngineCoreOutputs(
        outputs=[
            EngineCoreOutput(request_id=f"{number:032x}", offset=100, new_token_ids=[300 + number])
            for number in range(0 if in_columns else outputs)
        ],
        tokens=columns if in_columns else None,
        scheduler_stats=SchedulerStats(num_running_reqs=outputs, kv_cache_usage=0.5, step_counter=1000),
        timestamp=time.monotonic(),
    )


def _serve_grpc(loop: FrameLoop) -> str:
    """Run the engine's real I/O thread."""
    config = EngineCoreConfig(model=ModelConfig(path="none"), server=ServerConfig(host="127.0.0.1", port=0))
    io = IoThread(config)
    io.start()
    loop.emit = io.sessions.emit
    ready = EngineReady(
        engine_id="hop",
        incarnation="1",
        model="none",
        max_model_len=4096,
        num_kv_blocks=1,
        block_size=16,
        vocab_size=4096,
    )
    io.attach(cast(BusyLoop, loop), ready)
    return f"127.0.0.1:{io.port}"


class _Request(msgspec.Struct):
    """The fields of ``EngineCoreRequest`` that this benchmark uses. msgpack could not tell embeddings from other bytes."""

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams


class _ZeroMq:
    """A ZeroMQ I/O thread like the one for gRPC: frames of the busy thread are handed to its event loop, encoded there
    and sent.
    """

    def __init__(self, frames: FrameLoop) -> None:
        self._frames = frames
        self._loop = asyncio.new_event_loop()
        self._encoder = msgspec.msgpack.Encoder()
        threading.Thread(target=self._loop.run_forever, name="io", daemon=True).start()

    def serve(self) -> str:
        """Start to listen."""
        return asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()

    def emit(self, client_id: str, outputs: EngineCoreOutputs) -> None:
        """See ``Sessions``."""
        self._loop.call_soon_threadsafe(self._deliver, outputs)

    def _deliver(self, outputs: EngineCoreOutputs) -> None:
        self._down.send(self._encoder.encode(outputs))

    async def _start(self) -> str:
        self._down: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        self._down.setsockopt(zmq.SNDHWM, 0)  # sending blocks only until the reader has connected
        self._down.setsockopt(zmq.SNDTIMEO, 10_000)
        self._up = zmq.asyncio.Context.instance().socket(zmq.PULL)
        ports = [socket.bind_to_random_port("tcp://127.0.0.1") for socket in (self._down, self._up)]
        self._reader = asyncio.create_task(self._read())
        return " ".join(f"tcp://127.0.0.1:{port}" for port in ports)

    async def _read(self) -> None:
        decoder = msgspec.msgpack.Decoder(_Request)
        while True:
            asked = decoder.decode(await self._up.recv())
            self._frames.add("", EngineCoreRequest(**msgspec.structs.asdict(asked)))


def _serve_zeromq(loop: FrameLoop) -> str:
    io = _ZeroMq(loop)
    loop.emit = io.emit
    return io.serve()


SERVE = {"gRPC": _serve_grpc, "gRPC, messages": _serve_grpc, "ZeroMQ": _serve_zeromq}


def engine_process(transport: str) -> None:
    """Print the address, and serve."""
    configure(LogConfig(level="warning"), service="hop")
    loop = FrameLoop()
    print(SERVE[transport](loop), flush=True)
    loop.run()


# Code of the reading process.


class Link(Protocol):
    """A connection to one engine."""

    async def open(self) -> None:
        """Connect."""

    def add(self, request: EngineCoreRequest) -> None:
        """Send a request."""

    async def close(self) -> None:
        """Disconnect."""


class GrpcLink:
    """The frontend's session.

    ``revision`` is the revision of the contract. Revision 1 has neither columns nor several frames per message.
    """

    def __init__(
        self, address: str, take: Callable[[EngineCoreOutputs], None], revision: int = PROTOCOL_REVISION
    ) -> None:
        self._session = EngineSession(
            address,
            frontend_id="bench",
            incarnation="1",
            on_outputs=take,
            on_draining=lambda time_left: None,
            revision=revision,
        )

    def add(self, request: EngineCoreRequest) -> None:
        """See ``Link``."""
        self._session.add(msgspec.structs.replace(request, request_number=1))

    async def open(self) -> None:
        """See ``Link``."""
        await self._session.open()
        self._reader = asyncio.create_task(self._session.run())

    async def close(self) -> None:
        """See ``Link``."""
        await self._session.close()  # cancels the stream and the reader
        await asyncio.gather(self._reader, return_exceptions=True)


class _Output(msgspec.Struct, kw_only=True, omit_defaults=True):
    """``EngineCoreOutput`` without vectors, because msgpack could not decode the types of vectors."""

    request_id: str
    attempt: int = 0
    offset: int = 0
    new_token_ids: list[int] = []
    new_logprobs: Logprobs | None = None
    new_prompt_logprobs: Logprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: RequestError | None = None
    events: list[EngineCoreEvent] = []
    prefill_stats: PrefillStats | None = None
    num_nans_in_logits: int = 0


class _Frame(msgspec.Struct):
    """``EngineCoreOutputs`` without cache events, which have no tag that msgpack could decode."""

    engine_index: int
    outputs: list[_Output]
    scheduler_stats: SchedulerStats | None
    timestamp: float
    utility_output: UtilityOutput | None
    finished_requests: list[str]


class ZeroMqLink:
    """Link with one ZeroMQ socket for each direction."""

    def __init__(self, address: str, take: Callable[[EngineCoreOutputs], None]) -> None:
        self._from, self._to = address.split()
        self._take = take
        self._encoder = msgspec.msgpack.Encoder()

    async def open(self) -> None:
        """See ``Link``."""
        self._down = zmq.asyncio.Context.instance().socket(zmq.PULL)
        self._down.setsockopt(zmq.RCVHWM, 0)
        self._down.connect(self._from)
        self._up: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        self._up.connect(self._to)
        self._reader = asyncio.create_task(self._read())

    def add(self, request: EngineCoreRequest) -> None:
        """See ``Link``."""
        self._up.send(self._encoder.encode(request))

    async def close(self) -> None:
        """See ``Link``."""
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        self._down.close(linger=0)
        self._up.close(linger=0)

    async def _read(self) -> None:
        decoder = msgspec.msgpack.Decoder(_Frame)
        while True:
            frame = decoder.decode(await self._down.recv())
            self._take(
                EngineCoreOutputs(
                    engine_index=frame.engine_index,
                    outputs=cast(list[EngineCoreOutput], frame.outputs),
                    scheduler_stats=frame.scheduler_stats,
                    timestamp=frame.timestamp,
                    utility_output=frame.utility_output,
                    finished_requests=frame.finished_requests,
                )
            )


LINKS: dict[str, Callable[[str, Callable[[EngineCoreOutputs], None]], Link]] = {
    "gRPC": GrpcLink,
    "gRPC, messages": partial(GrpcLink, revision=OLDEST_REVISION),
    "ZeroMQ": ZeroMqLink,
}


class Hop:
    """Sends requests to one engine and reads its frames."""

    def __init__(self, transport: str, address: str, process: Process) -> None:
        assert process.stdin is not None
        self.pid = process.pid
        self._link = LINKS[transport](address, self._take)
        self._acknowledgements = process.stdin
        self._numbers = itertools.count()
        self._arrived = 0
        self._missing = 0
        self._outputs = 0

    async def __aenter__(self) -> "Hop":
        await self._link.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._link.close()

    async def ask(self, outputs: int, frames: int) -> float:
        """Return the seconds from a request to its last frame. Raises RuntimeError if outputs are missing."""
        self._missing, self._outputs = frames, 0
        self._done = asyncio.get_running_loop().create_future()
        request = EngineCoreRequest(
            request_id=str(next(self._numbers)),
            prompt_token_ids=[7] * outputs,
            sampling_params=SamplingParams(temperature=0.0, max_tokens=frames),
        )
        began = time.perf_counter()
        self._link.add(request)
        await self._done
        seconds = time.perf_counter() - began
        if self._outputs != outputs * frames:
            raise RuntimeError(f"{self._outputs} of {outputs * frames} outputs arrived")
        return seconds

    def _take(self, outputs: EngineCoreOutputs) -> None:
        self._outputs += len(outputs.outputs) if outputs.tokens is None else len(outputs.tokens)
        self._arrived += 1
        if self._arrived % ACK_EVERY == 0:
            self._acknowledgements.write(b"+")
        self._missing -= 1
        if self._missing == 0:
            self._done.set_result(None)


@contextlib.asynccontextmanager
async def _hop(transport: str) -> AsyncIterator[Hop]:
    """Run an engine process, and yield the connection to it."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.benchmarks.hop", transport, stdin=PIPE, stdout=PIPE
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(START_TIMEOUT):
            address = (await process.stdout.readline()).decode().strip()
        if not address:
            raise RuntimeError(f"the engine's side of {transport} ended")
        async with Hop(transport, address, process) as hop:
            yield hop
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def measure(rounds: int) -> list[Row]:
    """One row per number of outputs and transport. All are measured in turn in every round."""
    rates: dict[tuple[int, str], list[float]] = defaultdict(list)
    engine_times: dict[tuple[int, str], list[float]] = defaultdict(list)
    reader_times: dict[tuple[int, str], list[float]] = defaultdict(list)
    round_trips: dict[tuple[int, str], list[float]] = defaultdict(list)
    async with contextlib.AsyncExitStack() as stack:
        hops = {transport: await stack.enter_async_context(_hop(transport)) for transport in LINKS}
        gc.collect()
        gc.freeze()  # exclude objects of other benchmarks from garbage collection, as in a frontend
        stack.callback(gc.unfreeze)
        for number in range(rounds + 1):
            for outputs, frames in FRAMES.items():
                for transport, hop in hops.items():
                    async with asyncio.timeout(MEASURE_TIMEOUT):
                        engine_began, reader_began = _cpu_seconds(hop.pid), _cpu_seconds(os.getpid())
                        rate = frames / await hop.ask(outputs, frames)
                        engine_time = _cpu_seconds(hop.pid) - engine_began
                        reader_time = _cpu_seconds(os.getpid()) - reader_began
                        times = [await hop.ask(outputs, 1) for _ in range(ROUND_TRIPS)]
                    if number:  # the first round warms up
                        rates[outputs, transport].append(rate)
                        engine_times[outputs, transport].append(engine_time / (frames * outputs))
                        reader_times[outputs, transport].append(reader_time / (frames * outputs))
                        round_trips[outputs, transport].append(statistics.median(times))
    rows = []
    for (outputs, transport), found in rates.items():
        rate = statistics.median(found)
        microseconds = statistics.median(round_trips[outputs, transport]) * 1e6
        rows.append(
            Row(
                transport,
                outputs,
                rate,
                rate * outputs,
                microseconds,
                engine_us=statistics.median(engine_times[outputs, transport]) * 1e6,
                reader_us=statistics.median(reader_times[outputs, transport]) * 1e6,
            )
        )
    return rows


def _cpu_seconds(pid: int) -> float:
    """Return the processor time of all threads of a process."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


if __name__ == "__main__":
    engine_process(sys.argv[1])
