"""Waiting for an ``LLM``'s results, with a bar."""

import concurrent.futures
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

T = TypeVar("T")

_REFRESH_SECONDS = 0.2


def wait_for(
    future: "Future[T]", *, total: int, done: Callable[[], int], tokens: Callable[[], int], progress: bool
) -> T:
    """The result. ``done`` of ``total`` inputs have theirs; ``tokens`` counts new tokens, from wherever it begins.

    Raises what the work raises. An exception that comes here first, KeyboardInterrupt, ends the work.
    """
    console = Console(stderr=True, highlight=False)
    try:
        if not progress or total == 0 or not console.is_terminal:
            return future.result()
        _show(future, console, total=total, done=done, tokens=tokens)
        return future.result()
    finally:
        future.cancel()


def _show(
    future: "Future[T]", console: Console, *, total: int, done: Callable[[], int], tokens: Callable[[], int]
) -> None:
    """Draw the bar until the future is done."""
    bar = Progress(
        TextColumn("penstock"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TextColumn("[bold cyan]{task.fields[speed]:,.0f} tokens/s"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        auto_refresh=False,
    )
    began, before = time.perf_counter(), tokens()
    with bar:
        task = bar.add_task("", total=total, speed=0.0)
        finished = False
        while not finished:
            finished = bool(concurrent.futures.wait([future], timeout=_REFRESH_SECONDS).done)
            seconds = max(time.perf_counter() - began, 1e-9)
            bar.update(task, completed=done(), speed=(tokens() - before) / seconds, refresh=True)
