"""Implementation of ``penstock demo``: two engines and a frontend on this machine, shown through the public gRPC API."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from penstock_client import AsyncClient, Model, Output, SamplingParams
from penstock_common.errors import PenstockError
from penstock_local.commands.generate import describe_end
from penstock_local.console import JoinedLog
from penstock_local.rpc.admin import AdminClient
from penstock_local.serving.machine_resources import LOOPBACK, free_ports
from penstock_local.serving.serve import serve_while
from penstock_local.serving.serve_options import ServeOptions
from penstock_local.serving.supervisor import EXIT_INTERRUPTED

ENGINES = 2
KV_CACHE_BYTES = 128 * 1024 * 1024
_LOADS_EVERY_SECONDS = 0.05
_LOADS_TIMEOUT = 30.0


def chat(question: str, *, system: str = "") -> str:
    """Return a prompt in the demo model's chat format, like its chat template."""
    return (f"<|system|>{system}<|end|>" if system else "") + f"<|user|>{question}<|end|><|assistant|>"


SINGLE_PROMPTS = (
    "Once upon a time, there was a little fox",
    chat("Tell me a short story about a rabbit named Ruby."),
    chat("What is 12 + 30?"),
    chat("Tom has 7 apples and finds 5 more. How many apples does Tom have now?"),
    chat("Write a JSON record for this person: Nora is 31 years old and lives in Oslo."),
)
STORY = (
    "Once upon a time, there was a rabbit named Ruby. She lived near a quiet lake. Every morning, Ruby liked to sing songs. "
    'One day, Ruby found a red kite on the road. It was very old. "Who lost this kite?" she asked. A hedgehog named Omar '
    'said, "It is mine! I looked for it all day." Ruby gave it back, and Omar gave her some honey. '
    "From that day on, they were best friends. The end."
)
STORY_QUESTIONS = ("Where did Ruby live?", "Who was Omar?", "Who was Ruby?", "What did Ruby love to do?")
SEEDED_PROMPT = chat("Tell me a story about a lion.")
STOPPED_PROMPT, STOP = chat("Count from 1 to 12."), "8"
CONCURRENT_PROMPTS = (
    chat("What is the capital of France?"),
    chat("What is 45 - 17?"),
    chat("Spell elephant."),
    chat("List three fruits."),
    chat("Write a JSON list of three animals."),
    chat("What is the opposite of hot?"),
    chat("Tell me a story about a bear."),
    "Once upon a time, in a small village,",
)


class DemoFailedError(PenstockError):
    """Error if an output differs from what the demo has announced."""


class Result(msgspec.Struct, frozen=True):
    """A complete output: its text, its last message, and the seconds from request to end."""

    text: str
    last: Output
    seconds: float

    @property
    def summary(self) -> str:
        """One line about how the output ended."""
        return describe_end([self.last], seconds=self.seconds)


async def demo(model: str) -> int:
    """Run the demo with the model in a directory. Raises DemoFailedError if an output differs from the announcement.

    Returns the exit code: 0 if everything was shown and the services stopped cleanly.
    """
    grpc_port, http_port, admin_port = free_ports(3)
    options = ServeOptions(
        model=model,
        engines=ENGINES,
        grpc_port=grpc_port,
        http_port=http_port,
        admin_port=admin_port,
        kv_cache_memory=KV_CACHE_BYTES,
    )

    finished = False

    async def work(client: AsyncClient, models: Sequence[Model], log: JoinedLog) -> None:
        nonlocal finished
        (served,) = models
        log.muted = True  # show only answers; if a service fails, its last log lines are shown anyway
        try:
            async with AdminClient(f"{LOOPBACK}:{admin_port}") as admin:
                await Demo(client, admin, Console(highlight=False)).show(served, options.client_address)
        finally:
            log.muted = False
        finished = True

    exit_code = await serve_while(options, work)
    return exit_code if finished else EXIT_INTERRUPTED


class Demo:
    """Parts of the demo, which are shown one after the other in one terminal."""

    def __init__(self, client: AsyncClient, admin: AdminClient, console: Console) -> None:
        self._client = client
        self._admin = admin
        self._console = console

    async def show(self, model: Model, address: str) -> None:
        """Show all parts."""
        self._console.print(
            f"{model.name} is up: {model.num_engines} engines at one gRPC address, {address}",
            style="bold green",
        )
        await self._streaming()
        await self._stop_string()
        await self._seeds()
        await self._prefix_caching()
        await self._concurrent()
        self._console.print()

    async def _streaming(self) -> None:
        self._title("One prompt after another, streamed token by token")
        for prompt in SINGLE_PROMPTS:
            await self._stream(prompt, max_tokens=80)

    async def _stop_string(self) -> None:
        self._title(f"A stop string: the output ends before {STOP!r}")
        result = await self._stream(STOPPED_PROMPT, stop=[STOP], max_tokens=60)
        if STOP in result.text:
            raise DemoFailedError(f"the stop string {STOP!r} is in the output {result.text!r}")

    async def _seeds(self) -> None:
        self._title("Sampling at temperature 1: the same seed gives the same text")
        texts = [
            (await self._stream(SEEDED_PROMPT, temperature=1.0, seed=seed, max_tokens=40)).text for seed in (7, 7, 8)
        ]
        if texts[0] != texts[1]:
            raise DemoFailedError(f"two requests with seed 7 gave different texts: {texts[0]!r} and {texts[1]!r}")
        self._note(
            f"seed 7 twice: the same text; seed 8: {'another' if texts[2] != texts[0] else 'the same by chance'}"
        )

    async def _prefix_caching(self) -> None:
        self._title("Prefix caching: one long text, several questions")
        table = Table("question", "answer", "prompt tokens", "of these cached", box=None, pad_edge=False)
        cached = []
        for question in STORY_QUESTIONS:
            result = await self._whole(chat(question, system=f"Use this story to answer: {STORY}"))
            usage = result.last.usage
            if usage is None:
                raise DemoFailedError("the last message of the output has no usage")
            cached.append(usage.cached_tokens)
            table.add_row(question, Text(result.text.strip()), str(usage.prompt_tokens), str(usage.cached_tokens))
        self._console.print(table)
        # The frontend may not know yet which engine has cached the story. But of three later questions on two engines,
        # at least one runs on an engine that has cached the story.
        if not any(cached[1:]):
            raise DemoFailedError(f"no later question found the story cached; cached tokens of each question: {cached}")
        self._note("an engine that has cached the story computes only the end of later questions")

    async def _concurrent(self) -> None:
        self._title(f"{len(CONCURRENT_PROMPTS)} concurrent requests on {ENGINES} engines")
        requests = _Requests()
        with Live(get_renderable=requests.render, console=self._console, refresh_per_second=20):
            loads = asyncio.create_task(self._watch_loads(requests))
            try:
                await asyncio.gather(*(self._follow(requests, index) for index in range(len(CONCURRENT_PROMPTS))))
            finally:
                loads.cancel()

    async def _follow(self, requests: "_Requests", index: int) -> None:
        async for piece in self._generate(CONCURRENT_PROMPTS[index], max_tokens=60):
            requests.texts[index] += piece.text
            requests.tokens[index] += len(piece.token_ids)

    async def _watch_loads(self, requests: "_Requests") -> None:
        while True:
            for engine in (await self._admin.cluster(deadline=_LOADS_TIMEOUT)).engines:
                load = engine.num_running_reqs + engine.num_waiting_reqs
                requests.peaks[engine.engine_id] = max(load, requests.peaks.get(engine.engine_id, 0))
            await asyncio.sleep(_LOADS_EVERY_SECONDS)

    async def _stream(self, prompt: str, **sampling: Any) -> Result:
        """Show a prompt and its continuation while it is generated. An answer begins on its own line."""
        self._console.print(Text(readable(prompt), style="cyan"), end="\n" if readable(prompt) != prompt else "")
        result = await self._whole(prompt, echo=True, **sampling)
        self._console.print()
        self._note(result.summary)
        return result

    async def _whole(self, prompt: str, *, echo: bool = False, **sampling: Any) -> Result:
        loop = asyncio.get_running_loop()
        started = loop.time()
        text, last = "", None
        async for last in self._generate(prompt, **sampling):
            text += last.text
            if echo:
                self._console.print(Text(last.text), end="", soft_wrap=True)
        if last is None or last.finish_reason in (None, "abort", "error"):
            raise DemoFailedError(f"the output for {readable(prompt)!r} did not end normally")
        return Result(text, last, loop.time() - started)

    def _generate(self, prompt: str, **sampling: Any) -> AsyncIterator[Output]:
        return self._client.stream(prompt, SamplingParams(**{"temperature": 0.0, "max_tokens": 80, **sampling}))

    def _title(self, text: str) -> None:
        self._console.print()
        self._console.rule(text, align="left", style="dim")

    def _note(self, text: str) -> None:
        self._console.print(Text(text, style="dim"))


def readable(prompt: str) -> str:
    """Return the question of a chat prompt, or a plain prompt unchanged."""
    return prompt.rpartition("<|user|>")[2].removesuffix("<|end|><|assistant|>")


class _Requests:
    """State of the concurrent requests: texts and token counts so far, and the maximum number of concurrent requests on
    each engine.
    """

    def __init__(self) -> None:
        self.texts = [""] * len(CONCURRENT_PROMPTS)
        self.tokens = [0] * len(CONCURRENT_PROMPTS)
        self.peaks: dict[str, int] = {}

    def render(self) -> Table:
        """Return the current table."""
        peaks = ", ".join(f"{count} on {engine}" for engine, count in self.peaks.items())
        table = Table("prompt", "output", box=None, pad_edge=False, caption_justify="left")
        table.caption = Text(f"most requests at once: {peaks}" if peaks else "", style="dim")
        table.add_column("tokens", justify="right")
        for prompt, text, count in zip(CONCURRENT_PROMPTS, self.texts, self.tokens, strict=True):
            table.add_row(Text(readable(prompt), style="cyan"), Text(text.strip()), str(count))
        return table
