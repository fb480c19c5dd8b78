"""Answers to random requests that count as wrong."""

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from penstock.inference.v1 import messages_pb2 as pb
from tests.chaos.outcome import Outcome, Output
from tests.chaos.requests import Request
from tests.soak import traffic
from tests.soak.traffic import Traffic

FIRST, SECOND = (Request(kind, "Generate", pb.GenerateRequest(text=kind)) for kind in ("first", "second"))


def answer(*tokens: int, error: str = "") -> Outcome:
    return Outcome(outputs={0: Output(token_ids=list(tokens))}, error=error)


class Answers:
    """A client that returns ``outcome`` and records its requests."""

    def __init__(self, outcome: Callable[[Request], Outcome]) -> None:
        self._outcome = outcome
        self.asked: list[Request] = []

    async def send(self, request: Request, **_: Any) -> Outcome:
        await asyncio.sleep(0)
        self.asked.append(request)
        return self._outcome(request)


async def run(client: Any, requests: int = 30, **options: Any) -> Traffic:
    """Send requests until the given number was sent."""
    known = [(FIRST, answer(1, 2, 3))]
    async with Traffic(client, known, streams=2, rng=random.Random(0), **options) as sent:
        while len(client.asked) < requests:
            await asyncio.sleep(0)
    return sent


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic, "REFUSED", 0.0)


async def test_another_token_is_harm() -> None:
    counts = (await run(Answers(lambda _: answer(1, 2, 4)))).counts
    assert counts["harmed"] == counts["completed"] > 0


async def test_a_failure_is_harm_unless_it_is_excused() -> None:
    broken = Answers(lambda _: answer(1, 2, error="UNAVAILABLE"))
    counts = (await run(broken)).counts
    assert counts["harmed"] == counts["completed"] > 0
    counts = (await run(broken, 60, excuses=lambda outcome: outcome.error == "UNAVAILABLE")).counts
    assert (counts["harmed"], counts["completed"]) == (0, 0)
    assert counts["broken"] > 0


async def test_what_came_of_an_excused_request_is_compared() -> None:
    broken = Answers(lambda _: answer(1, 7, error="UNAVAILABLE"))
    counts = (await run(broken, excuses=lambda _: True)).counts
    assert counts["harmed"] == counts["broken"] > 0


async def test_clients_go_on_with_a_next_turn_under_the_same_salt() -> None:
    client = Answers(lambda request: answer(1, 2, 3) if request.message.text == "first" else answer(9))
    turns = {id(FIRST): (SECOND, answer(9))}
    sent = await run(client, 100, fresh=0.5, next_turn=lambda request: turns.get(id(request)))
    assert sent.counts["harmed"] == 0
    seconds = [request.message.cache_salt for request in client.asked if request.message.text == "second"]
    firsts = [request.message.cache_salt for request in client.asked if request.message.text == "first"]
    assert seconds
    assert set(seconds) <= set(firsts)
    assert len(set(firsts)) > 20
    assert any(seconds)
