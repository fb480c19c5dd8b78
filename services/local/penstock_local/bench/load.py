"""Load generator: a closed loop with a fixed number of streams, or requests at random times."""

import asyncio
import itertools
import random
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from penstock_client import AsyncClient, AsyncStream, SamplingParams, image
from penstock_client.requests import generate_request
from penstock_common.errors import PenstockError, RequestFailed
from penstock_local.bench.dataset import Prompt
from penstock_local.bench.options import BenchOptions
from penstock_local.bench.report import Record
from penstock_local.rpc.client import explained

UNREACHABLE = "UNREACHABLE"
UNFINISHED = "CANCELLED"
_SHUTTING_DOWN = "SHUTTING_DOWN"
"""Reason with which a server refuses all requests while it shuts down."""
_WINDOW = 8
"""Number of samples for the current speed."""


class Load:
    """One run of the load. The load uses the clients in turn. The progress bar reads the counters."""

    def __init__(self, options: BenchOptions, clients: Sequence[AsyncClient], prompts: Iterator[Prompt]) -> None:
        self.records: list[Record] = []
        """Every request that was sent, in order."""
        self.num_tokens = 0
        self.num_ended = 0
        self.num_failed = 0
        self.began = 0.0
        self.stopped = ""
        """Reason why sending ended early: the server shuts down or is unreachable; empty otherwise."""
        self.seconds = 0.0
        """Duration of the run, in seconds."""
        self.cpu_seconds = 0.0
        """Processor time of this client during the run, in seconds."""
        self._options = options
        self._clients = itertools.cycle(clients)
        self._prompts = prompts
        self._samples: deque[tuple[float, int]] = deque([(0.0, 0)], maxlen=_WINDOW)

    @property
    def num_running(self) -> int:
        """Number of requests that were sent and have not ended."""
        return len(self.records) - self.num_ended

    def elapsed(self) -> float:
        """Return the seconds since the load began."""
        return time.perf_counter() - self.began if self.began else 0.0

    def recent_tokens_per_s(self) -> float:
        """Return the speed over the last ``_WINDOW`` calls of this method. The display calls it at regular intervals."""
        self._samples.append((self.elapsed(), self.num_tokens))
        (then, before), (now, count) = self._samples[0], self._samples[-1]
        return (count - before) / (now - then) if now > then else 0.0

    async def warm_up(self) -> None:
        """Send the warm-up requests with the concurrency of the load. Raises the error of the first request that fails."""
        gate = asyncio.Semaphore(self._options.streams)

        async def one(prompt: Prompt) -> None:
            async with gate:
                await self._stream(prompt, Record(start=0.0))

        tasks = [asyncio.create_task(one(prompt)) for prompt in itertools.islice(self._prompts, self._options.warmup)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        self.num_tokens = 0

    async def run(self) -> None:
        """Send all requests and wait for them. If cancelled, record running requests as ``UNFINISHED``."""
        self.began, cpu = time.perf_counter(), time.process_time()
        tasks: set[asyncio.Task[None]] = set()
        try:
            if self._options.rate is None:
                tasks.update(asyncio.create_task(self._closed_loop()) for _ in range(self._options.streams))
            else:
                await self._open_loop(self._options.rate, tasks)
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.seconds = time.perf_counter() - self.began
            self.cpu_seconds = time.process_time() - cpu

    async def _closed_loop(self) -> None:
        """Send requests one after the other."""
        while self._may_send():
            await self._request(next(self._prompts))

    async def _open_loop(self, rate: float, tasks: set[asyncio.Task[None]]) -> None:
        """Send requests at random times, which do not depend on the speed of answers. A late request delays no other
        request.
        """
        rng = random.Random(
            self._options.bench_seed + 1
        )  # a separate generator, so that random times do not change the prompts
        due = 0.0
        for sent in itertools.count(1):
            due += rng.expovariate(rate)
            if self._options.duration is not None and due > self._options.duration:
                return
            await asyncio.sleep(max(due - self.elapsed(), 0.0))
            if self.stopped:
                return
            task = asyncio.create_task(self._request(next(self._prompts)))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            if sent == self._options.limit:
                return

    def _may_send(self) -> bool:
        duration, limit = self._options.duration, self._options.limit
        in_time = duration is None or self.elapsed() < duration
        return not self.stopped and in_time and (limit is None or len(self.records) < limit)

    async def _request(self, prompt: Prompt) -> None:
        """Send one request and record its result."""
        record = Record(start=self.elapsed(), schema=prompt.schema)
        self.records.append(record)
        try:
            await self._stream(prompt, record)
            record.code = "OK"
        except RequestFailed as e:
            record.code, record.message = e.code, e.message
            if e.reason == _SHUTTING_DOWN:
                self.stopped = "the server is shutting down"
        except PenstockError as e:
            record.code, record.message = UNREACHABLE, str(e)
            self.stopped = "the server is unreachable"
        except asyncio.CancelledError:
            record.code, record.message = UNFINISHED, "still running when the benchmark was ended"
            raise
        finally:
            record.end = self.elapsed()
            self.num_ended += 1
            self.num_failed += not record.ok

    async def _stream(self, prompt: Prompt, record: Record) -> None:
        sampling = {"temperature": 0.0, "ignore_eos": not self._options.may_end, **self._options.sampling}
        if prompt.schema:
            sampling["structured_output"] = {"json_schema": prompt.schema}
        options, began, clock = self._options, self.began, time.perf_counter
        request = generate_request(
            [*map(image, prompt.images), prompt.text] if prompt.images else prompt.text,
            SamplingParams(**sampling, max_tokens=prompt.max_tokens),
            None,
            {"model": options.model, "lora": options.lora},
        )
        client = next(self._clients)
        call = client.stub.Generate(request, timeout=options.timeout, metadata=client.metadata)
        # Do not convert messages to Outputs, because that would slow down the measurement.
        async with explained(options.address), AsyncStream(call, _message) as messages:
            async for message in messages:
                if num_tokens := len(message.token_ids):
                    record.times.append(clock() - began)
                    record.sizes.append(num_tokens)
                    self.num_tokens += num_tokens
                if prompt.schema:
                    record.text += message.text
                if message.finish_reason:
                    usage = message.usage
                    record.prompt_tokens, record.cached_tokens = usage.prompt_tokens, usage.cached_tokens
                    record.accepted_draft_tokens = usage.accepted_draft_tokens
                    record.rejected_draft_tokens = usage.rejected_draft_tokens


def _message(message: Any) -> Any:
    return message
