"""Sends the load: a closed loop of so many streams, or requests at random times."""

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
"""Reason with which a server refuses everything from now on."""
_WINDOW = 8
"""Samples over which the current speed is measured."""


class Load:
    """One run, whose requests go to the clients in turn. The counters are for the progress bar."""

    def __init__(self, options: BenchOptions, clients: Sequence[AsyncClient], prompts: Iterator[Prompt]) -> None:
        self.records: list[Record] = []
        """Every request that was sent, in order."""
        self.num_tokens = 0
        self.num_ended = 0
        self.num_failed = 0
        self.began = 0.0
        self.stopped = ""
        """Why sending ended early: the server shuts down, or cannot be reached; empty otherwise."""
        self.seconds = 0.0
        """How long the run took."""
        self.cpu_seconds = 0.0
        """Processor time of this client during the run."""
        self._options = options
        self._clients = itertools.cycle(clients)
        self._prompts = prompts
        self._samples: deque[tuple[float, int]] = deque([(0.0, 0)], maxlen=_WINDOW)

    @property
    def num_running(self) -> int:
        """Requests that were sent and have not ended."""
        return len(self.records) - self.num_ended

    def elapsed(self) -> float:
        """Seconds since the load began."""
        return time.perf_counter() - self.began if self.began else 0.0

    def recent_tokens_per_s(self) -> float:
        """Over the last ``_WINDOW`` calls of this method, which a display makes at even times."""
        self._samples.append((self.elapsed(), self.num_tokens))
        (then, before), (now, count) = self._samples[0], self._samples[-1]
        return (count - before) / (now - then) if now > then else 0.0

    async def warm_up(self) -> None:
        """Send the warm-up requests, as many at once as the load will. Raises what the first failing one failed with."""
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
        """Send everything and wait for it. Cancelled, it ends what still runs as ``UNFINISHED``."""
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
        """Send one request after the other."""
        while self._may_send():
            await self._request(next(self._prompts))

    async def _open_loop(self, rate: float, tasks: set[asyncio.Task[None]]) -> None:
        """Send at random times that do not depend on how fast the answers come; a late request does not delay those after it."""
        rng = random.Random(self._options.bench_seed + 1)  # the prompts' own draws stay what they are
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
        """Send one request and record how it ended."""
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
            self.stopped = "the server cannot be reached any more"
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
        # The messages as they are: to make Outputs of them would slow what is measured.
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
