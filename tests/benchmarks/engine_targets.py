"""Load targets: an engine in this process, and an engine over its session."""

import asyncio
import itertools
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Collection
from types import TracebackType

from penstock.common.v1.sampling_pb2 import SamplingParams as WireSamplingParams
from penstock.enginecore.v1 import messages_pb2 as pb
from penstock.enginecore.v1 import service_pb2_grpc
from penstock_common.rpc.channel import make_channel
from penstock_common.types.outputs import EngineCoreOutputs
from penstock_common.types.request import EngineCoreRequest
from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.config import CacheConfig, EngineCoreConfig, ExecutorConfig, ModelConfig
from penstock_enginecore.core.busy_loop import BusyLoop
from penstock_enginecore.core.control import EngineControl
from penstock_enginecore.core.engine_core import EngineCore
from penstock_enginecore.core.executor import Executor
from penstock_enginecore.executor.uniproc import UniprocExecutor

KV_CACHE_MEMORY = 512 * 1024 * 1024


def cpu_engine(model: str, threads: int) -> EngineCoreConfig:
    """Return the configuration of a CPU engine with ``threads`` threads."""
    return EngineCoreConfig(
        model=ModelConfig(path=model),
        cache=CacheConfig(kv_cache_memory=KV_CACHE_MEMORY),
        executor=ExecutorConfig(num_threads=threads),
    )


class InProcessEngine:
    """An engine whose busy loop is a thread of this process, without messages or other processes."""

    def __init__(self, config: EngineCoreConfig, executor: Executor | None = None) -> None:
        self._engine = EngineCore(config, executor or UniprocExecutor(config), progress=lambda line: None)
        self.vocab_size = self._engine.model.vocab_size
        self._pieces: dict[str, asyncio.Queue[tuple[int, bool]]] = defaultdict(asyncio.Queue)
        self._ids = itertools.count()

    async def __aenter__(self) -> "InProcessEngine":
        self._loop = asyncio.get_running_loop()
        self._busy_loop = BusyLoop(self._engine, EngineControl(self._engine), self)
        self._thread = threading.Thread(target=self._busy_loop.run, daemon=True)
        self._thread.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._busy_loop.request_shutdown()
        await asyncio.to_thread(self._thread.join)
        self._engine.shutdown()

    def emit(self, client_id: str, outputs: EngineCoreOutputs) -> None:
        """Part of ``OutputSink``."""
        self._loop.call_soon_threadsafe(self._deliver, outputs)

    def broadcast(self, outputs: EngineCoreOutputs, to: Collection[str] | None = None) -> None:
        """Part of ``OutputSink``. Ignored, because cache events are off."""

    def draining(self, timeout: float) -> None:
        """Part of ``OutputSink``. Ignored, because no request runs when the benchmark stops."""

    def engine_dead(self, reason: str) -> None:
        """Part of ``OutputSink``."""
        raise RuntimeError(reason)

    def _deliver(self, outputs: EngineCoreOutputs) -> None:
        for output in outputs.outputs:
            self._pieces[output.request_id].put_nowait((len(output.new_token_ids), output.finish_reason is not None))

    async def stream(self, prompt: list[int], output_len: int) -> AsyncIterator[int]:
        """Yield a greedy output of exactly ``output_len`` tokens."""
        params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
        async for size in self.sampled(prompt, params):
            yield size

    async def sampled(self, prompt: list[int], params: SamplingParams) -> AsyncIterator[int]:
        """Yield the size of each piece of an output with these sampling parameters."""
        request_id = str(next(self._ids))
        self._busy_loop.add(
            "bench", EngineCoreRequest(request_id=request_id, prompt_token_ids=prompt, sampling_params=params)
        )
        done = False
        while not done:
            size, done = await self._pieces[request_id].get()
            if size:
                yield size
        del self._pieces[request_id]


class SessionClient:
    """The session part of a frontend: one bidirectional stream to an engine process."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._one_writer = asyncio.Lock()
        self._pieces: dict[str, asyncio.Queue[tuple[int, bool]]] = defaultdict(asyncio.Queue)
        self._ids = itertools.count()

    async def __aenter__(self) -> "SessionClient":
        self._channel = make_channel(self._address)
        self._call = service_pb2_grpc.EngineCoreServiceStub(self._channel).Session()
        await self._call.write(pb.SessionRequest(hello=pb.Hello(protocol_revision=1, frontend_id="bench")))
        await self._call.read()
        self._reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reader.cancel()
        await self._channel.close()

    async def _read(self) -> None:
        while isinstance(message := await self._call.read(), pb.SessionResponse):
            for output in message.outputs.outputs:
                self._pieces[output.request_id].put_nowait((len(output.new_token_ids), bool(output.finish_reason)))

    async def stream(self, prompt: list[int], output_len: int) -> AsyncIterator[int]:
        """Yield a greedy output of exactly ``output_len`` tokens."""
        request_id = str(next(self._ids))
        params = WireSamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
        request = pb.EngineCoreRequest(request_id=request_id, prompt_token_ids=prompt, sampling_params=params)
        async with self._one_writer:
            await self._call.write(pb.SessionRequest(add=request))
        done = False
        while not done:
            size, done = await self._pieces[request_id].get()
            if size:
                yield size
        del self._pieces[request_id]
