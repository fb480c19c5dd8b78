"""How far an ``LLM``'s call is, as a bar."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

_REFRESH_SECONDS = 0.2

Shown = bool | Callable[..., Any]
"""Whether there is a bar; or what makes one, as ``tqdm.tqdm``: called with ``total`` and ``desc``, it has ``update`` and
``close``.
"""


class Bar:
    """``with Bar(...) as bar``: a bar on standard error, where that is a terminal. ``tokens`` counts new tokens, from wherever it
    begins. ``total`` None: nobody knows.
    """

    def __init__(self, shown: Shown, total: int | None, tokens: Callable[[], int]) -> None:
        self._tokens = tokens
        self._done = 0
        self._began, self._before, self._drawn = time.perf_counter(), tokens(), 0.0
        self._given: Any = shown(total=total, desc="penstock") if callable(shown) else None
        self._bar: Progress | None = None
        console = Console(stderr=True, highlight=False)
        if shown is True and total != 0 and console.is_terminal:
            self._bar = _made(console)
            self._task = self._bar.add_task("", total=total, speed=0.0)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._given is not None:
            self._given.close()
        if self._bar is not None:
            self._draw()
            self._bar.stop()

    def advance(self) -> None:
        """One more is done."""
        self._done += 1
        if self._given is not None:
            self._given.update(1)
        self.tick()

    def tick(self) -> None:
        """Draw it anew, if it was not drawn just now."""
        if self._bar is not None and time.perf_counter() - self._drawn >= _REFRESH_SECONDS:
            self._draw()

    def _draw(self) -> None:
        if self._bar is None:
            return
        self._drawn = time.perf_counter()
        seconds = max(self._drawn - self._began, 1e-9)
        speed = (self._tokens() - self._before) / seconds
        self._bar.update(self._task, completed=self._done, speed=speed, refresh=True)


def _made(console: Console) -> Progress:
    return Progress(
        TextColumn("penstock"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TextColumn("[bold cyan]{task.fields[speed]:,.0f} tokens/s"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        auto_refresh=False,
    )
