"""Greedy streams with known answers, and the arrival times of their pieces."""

import asyncio
import itertools
import time
from collections.abc import Collection, Sequence
from types import TracebackType
from typing import Any

from penstock.common.v1.sampling_pb2 import SamplingParams
from penstock.inference.v1 import messages_pb2 as pb
from tests.fakes.patience import PATIENCE
from tests.fakes.processes import Service
from tests.fakes.systems.cluster import Cluster
from tests.fakes.systems.scored import NUM_LIKELIEST, Scored

Known = Sequence[int] | Scored
"""Expected parts of an answer: its tokens, or tokens and all log-probabilities."""


def greedy(prompt: Sequence[int], count: int, rank: int | None = None) -> pb.GenerateRequest:
    """Return a request for ``count`` tokens without text. ``rank``: index of the engine that must serve it.

    For text, a frontend holds back up to eight tokens that do not form complete characters. A random model produces
    many such tokens, so pieces of a text stream could arrive up to eight steps apart.
    """
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=prompt),
        sampling_params=SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False),
    )
    if rank is not None:
        request.routing.data_parallel_rank = rank
    return request


def asks_for(known: Known, prompt: Sequence[int], rank: int | None = None) -> pb.GenerateRequest:
    """Return a request whose answer is ``known``."""
    if not isinstance(known, Scored):
        return greedy(prompt, len(known), rank)
    request = greedy(prompt, len(known.token_ids), rank)
    request.sampling_params.logprobs = request.sampling_params.prompt_logprobs = NUM_LIKELIEST
    return request


class Stream:
    """Stream that is read in the background. ``times``: arrival times of its pieces, by ``time.monotonic``."""

    def __init__(self, call: Any, expected: Known, engine: Service | None = None) -> None:
        """Start to read. ``engine``: engine on which the stream begins, if known."""
        self.engine = engine
        self.times: list[float] = []
        self._answer = Scored()
        self._expected = expected
        self._call = call
        self._begun = asyncio.Event()
        self._reading = asyncio.create_task(self._read())

    async def begun(self) -> None:
        """Wait for the first token of the stream."""
        await self._begun.wait()

    async def is_right(self) -> bool:
        """Wait for the end of the stream. Returns whether the answer is the expected one. Raises the stream's error."""
        await asyncio.wait_for(self._reading, PATIENCE)
        if not isinstance(self._expected, Scored):
            return self._answer.token_ids == list(self._expected)
        if difference := self._answer.difference(self._expected):
            print(f"another answer: {difference}")
        return not difference

    def longest_gap(self, since: float) -> float:
        """Return the longest time in seconds between two pieces, with the second after ``since``; 0 if there is no such
        pair.
        """
        pairs = itertools.pairwise(self.times)
        return max((later - earlier for earlier, later in pairs if later > since), default=0.0)

    async def _read(self) -> None:
        try:
            while isinstance(piece := await self._call.read(), pb.GenerateResponse):
                self._answer.take(piece)
                self.times.append(time.monotonic())
                self._begun.set()
        finally:
            self._begun.set()


class Streams:
    """Rounds of ``count`` streams on the engines of ``order`` in turn. If ``order`` is empty, the frontend chooses
    engines.
    """

    def __init__(
        self,
        cluster: Cluster,
        prompts: Sequence[Sequence[int]],
        expected: Sequence[Known],
        order: Sequence[tuple[Service, int]] = (),
        count: int = 32,
    ) -> None:
        """Create the streams. ``expected``: answer of each prompt. ``order``: engines with the index that requests use
        for them.
        """
        self._cluster, self._prompts, self._expected = cluster, prompts, expected
        self._placed = [order[i % len(order)] if order else None for i in range(count)]
        self._streams: list[Stream] = []

    def placed_on(self, engine: Service) -> int:
        """Return the number of streams of a round that begin on this engine."""
        return sum(place is not None and place[0] is engine for place in self._placed)

    async def begin(self) -> "Streams":
        """Start a round, and wait until each of its streams has its first token."""
        self._streams = []
        for i, place in enumerate(self._placed):
            expected = self._expected[i % len(self._expected)]
            request = asks_for(expected, self._prompts[i % len(self._prompts)], place and place[1])
            self._streams.append(Stream(self._cluster.stub.Generate(request), expected, place and place[0]))
        await asyncio.gather(*(stream.begun() for stream in self._streams))
        return self

    async def end(self) -> int:
        """Wait for the end of the round. Returns the number of unexpected answers."""
        return (await asyncio.gather(*(stream.is_right() for stream in self._streams))).count(False)

    def longest_gap(self, since: float, *, but: Collection[Service] = ()) -> float:
        """Return the longest ``Stream.longest_gap`` of all streams that did not begin on an engine in ``but``."""
        return max(stream.longest_gap(since) for stream in self._streams if stream.engine not in but)


class Load:
    """Constant number of concurrent streams until the end of the block. All answers must be right."""

    def __init__(
        self, cluster: Cluster, prompts: Sequence[Sequence[int]], expected: Sequence[Known], count: int = 32
    ) -> None:
        self._cluster, self._prompts, self._expected, self._count = cluster, prompts, expected, count
        self._stopped = False
        self._current: dict[int, Stream] = {}
        self._over: list[Stream] = []

    @property
    def num_answers(self) -> int:
        """Number of streams that have ended."""
        return len(self._over)

    async def __aenter__(self) -> "Load":
        self._tasks = [asyncio.create_task(self._go_on(number)) for number in range(self._count)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped = True
        await asyncio.wait_for(asyncio.gather(*self._tasks), PATIENCE)

    async def answered(self, count: int) -> None:
        """Wait for ``count`` more answers."""
        wanted = self.num_answers + count
        async with asyncio.timeout(PATIENCE):
            while self.num_answers < wanted:
                for task in self._tasks:
                    if task.done():
                        task.result()
                await asyncio.sleep(0.05)

    def longest_gap(self, since: float) -> float:
        """Return the longest ``Stream.longest_gap`` of all streams."""
        return max(stream.longest_gap(since) for stream in [*self._over, *self._current.values()])

    async def _go_on(self, number: int) -> None:
        which = number % len(self._prompts)
        prompt, expected = self._prompts[which], self._expected[which]
        while not self._stopped:
            stream = self._current[number] = Stream(self._cluster.stub.Generate(asks_for(expected, prompt)), expected)
            assert await stream.is_right()
            self._over.append(self._current.pop(number))
