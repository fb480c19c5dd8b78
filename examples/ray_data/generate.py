"""Answer the prompts in a column with Ray Data and the frontends of a Penstock cluster."""

import argparse
import asyncio
from typing import Any

import httpx
import ray


class Answer:
    """Ray actor that adds the columns ``text`` and ``error`` to batches with a column ``prompt``."""

    def __init__(self, servers: list[str], concurrency: int, max_tokens: int) -> None:
        self._servers = servers
        self._gate = asyncio.Semaphore(concurrency)
        self._max_tokens = max_tokens
        self._client = httpx.AsyncClient(timeout=None)

    async def __call__(self, batch: dict[str, Any]) -> Any:
        """Send the prompts of all rows of a batch concurrently, and return the batch with the answers."""
        answers = await asyncio.gather(*(self._ask(number, str(each)) for number, each in enumerate(batch["prompt"])))
        batch["text"] = [text for text, _ in answers]
        batch["error"] = [error for _, error in answers]
        yield batch

    async def _ask(self, number: int, prompt: str) -> tuple[str, str]:
        url = f"{self._servers[number % len(self._servers)]}/v1/chat/completions"
        body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": self._max_tokens}
        async with self._gate:
            try:
                answer = await self._client.post(url, json=body)
            except httpx.TransportError as e:
                return "", f"{url}: {e}"
        if answer.status_code != 200:
            return "", answer.text
        return answer.json()["choices"][0]["message"]["content"], ""


def main() -> None:
    """Create prompts, get answers for all of them, and show some."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", action="append", required=True, metavar="URL")
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=16)
    arguments = parser.parse_args()
    rows = ray.data.from_items([{"prompt": f"What is {number} + {number}?"} for number in range(arguments.rows)])
    done = rows.map_batches(
        Answer,
        fn_constructor_args=(arguments.server, arguments.concurrency, arguments.max_tokens),
        compute=ray.data.ActorPoolStrategy(size=arguments.actors),
        batch_size=256,
    ).materialize()  # without materialize(), Ray would compute only the rows that are shown
    for row in done.take(5):
        print(row)
    failed = done.filter(lambda row: bool(row["error"])).count()
    print(f"{done.count()} rows, {failed} failed")


if __name__ == "__main__":
    main()
