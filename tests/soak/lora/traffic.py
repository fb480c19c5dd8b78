"""Requests with random adapter names, and checks that each answer came from the adapter that its name meant."""

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from penstock.common.v1.sampling_pb2 import SamplingParams
from penstock.inference.v1 import messages_pb2 as pb
from penstock_common.errors import RequestFailed
from penstock_common.rpc.status import from_rpc_error
from tests.soak.lora.contents import BASE, Answers, begins_alike
from tests.soak.lora.names import Names

BASE_SHARE, CANCELLED, DEADLINE = 0.15, 0.15, 0.05
"""Fractions of requests: with the base model, cancelled by the client, and with a deadline."""
PATIENCE = 0.15
"""Maximum seconds until a client cancels."""
MAX_EXAMPLES = 20
REST = 0.05
"""Seconds that a stream waits after a refusal."""


@dataclass
class Asked:
    """A request and its result. Times are monotonic. ``first`` is the time of the first token, or 0 without tokens."""

    name: str
    prompt: int
    max_tokens: int
    began: float = field(default_factory=time.monotonic)
    first: float = 0.0
    ended: float = 0.0
    tokens: list[int] = field(default_factory=list)
    finished: bool = False
    error: RequestFailed | None = None
    gave_up: bool = False


class Traffic:
    """Sends requests on ``streams`` concurrent streams while its ``async with`` block runs.

    Attributes:
        counts: Number of requests by outcome; errors are counted by reason.
        problems: Violations, as text.
    """

    def __init__(
        self,
        stub: Any,
        names: Names,
        pool: Sequence[str],
        answers: Answers,
        *,
        streams: int,
        max_tokens: int,
        seed: int,
    ) -> None:
        """Prepare the traffic.

        Args:
            pool: Names that requests use, including names that have no meaning at the moment.
        """
        self._stub = stub
        self._names = names
        self._pool = pool
        self._answers = answers
        self._askable = answers.askable
        self._streams = streams
        self._max_tokens = max_tokens
        self._rng = random.Random(seed)
        self._over = False
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []

    async def __aenter__(self) -> "Traffic":
        self._tasks = [asyncio.create_task(self._stream()) for _ in range(self._streams)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._over = True
        await asyncio.gather(*self._tasks)

    async def _stream(self) -> None:
        while not self._over:
            name = "" if self._rng.random() < BASE_SHARE else self._rng.choice(self._pool)
            prompt = self._rng.choice(self._askable)
            asked = Asked(name, prompt, self._rng.randint(1, self._max_tokens))
            share = self._rng.random()
            if share < CANCELLED:
                await self._cancelled(asked)
            else:
                await self._send(asked, self._rng.uniform(0.01, PATIENCE) if share < CANCELLED + DEADLINE else None)
            self._judge(asked)
            if asked.error is not None:
                await asyncio.sleep(REST)

    async def _cancelled(self, asked: Asked) -> None:
        task = asyncio.create_task(self._send(asked, None))
        await asyncio.wait([task], timeout=self._rng.uniform(0, PATIENCE))
        if task.cancel():
            asked.gave_up = True
            with contextlib.suppress(asyncio.CancelledError):
                await task
        asked.ended = time.monotonic()

    async def _send(self, asked: Asked, seconds: float | None) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=asked.max_tokens, ignore_eos=True)
        prompt = pb.TokenIds(ids=self._answers.prompts[asked.prompt])
        field_name = "model" if self._rng.random() < 0.5 else "lora"
        request = pb.GenerateRequest(token_ids=prompt, sampling_params=params, **{field_name: asked.name})
        call = self._stub.Generate(request, timeout=seconds)
        try:
            async for response in call:
                asked.first = asked.first or time.monotonic()
                asked.tokens += response.token_ids
                asked.finished = asked.finished or bool(response.finish_reason)
        except grpc.aio.AioRpcError as e:
            asked.error = from_rpc_error(e)
            asked.gave_up = seconds is not None and e.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        finally:
            call.cancel()
        asked.ended = time.monotonic()

    def _judge(self, asked: Asked) -> None:
        self.counts["requests"] += 1
        if asked.gave_up:
            self.counts["aborted"] += 1
        elif asked.error is not None:
            self._judge_error(asked, asked.error)
        elif len(asked.tokens) != asked.max_tokens or not asked.finished:
            self._wrong(asked, f"it ended after {len(asked.tokens)} of {asked.max_tokens} tokens")
        else:
            self.counts["completed"] += 1
        if asked.tokens:
            self._judge_tokens(asked)

    def _judge_tokens(self, asked: Asked) -> None:
        """Check that the tokens match an adapter that the name could mean between the start and the first token."""
        may = {BASE} if not asked.name else self._names.possible(asked.name, asked.began, asked.first) - {None}
        if any(
            begins_alike(self._answers.of(number, asked.prompt), asked.tokens) for number in may if number is not None
        ):
            self.counts["answers that tell who they are"] += len(asked.tokens) >= self._answers.needed
            self.counts["answers while a name changed"] += len(may) > 1
            return
        who = self._answers.who(asked.prompt, asked.tokens)
        self._wrong(
            asked, f"the answer {asked.tokens[:6]} is of {who or 'nobody'}; the name meant {sorted(may, key=str)}"
        )

    def _judge_error(self, asked: Asked, error: RequestFailed) -> None:
        self.counts[f"{error.code} {error.reason}"] += 1
        allowed = {
            "NOT_FOUND": None in self._names.possible(asked.name, asked.began, asked.ended),
            "FAILED_PRECONDITION": error.reason == "LORA_CHANGED"
            and self._names.exchanged(asked.name, asked.began, asked.ended),
            "RESOURCE_EXHAUSTED": error.reason == "LORA_CACHE_FULL",
        }
        if not (asked.name and not asked.tokens and allowed.get(error.code)):
            self._wrong(asked, f"{error.code} {error.reason}: {error.message}")

    def _wrong(self, asked: Asked, what: str) -> None:
        self.counts["wrong"] += 1
        if len(self.problems) < MAX_EXAMPLES:
            self.problems.append(f"{asked.name or 'the model'}, prompt {asked.prompt}, at {asked.began:.2f}: {what}")
