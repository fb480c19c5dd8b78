"""How far a batch is: a bar where standard error is a terminal, else a line now and then."""

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from penstock_local.terminal.console import say

_REFRESH_SECONDS = 0.25
_LINE_SECONDS = 30.0


class BatchProgress:
    """``with BatchProgress(total, done)``: ``done`` of the lines were there before, and are counted on."""

    def __init__(self, total: int, done: int) -> None:
        self.num_failed = 0
        self.prompt_tokens = self.output_tokens = 0
        self._total = total
        self._before = self.done = done
        self._began = self._told = time.monotonic()
        console = Console(stderr=True, highlight=False)
        self._bar = _bar(console) if console.is_terminal else None
        self._task = self._bar.add_task("", total=total, completed=done, speed=0.0, failed="") if self._bar else None

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None and self._bar.live.is_started:
            self._tell()
            self._bar.stop()

    def stop(self, why: str) -> None:
        """Show no more, and say why."""
        if self._bar is not None:
            self._tell()
            self._bar.stop()
        say(why)

    def add(self, *, ok: bool, tokens: tuple[int, int] = (0, 0)) -> None:
        """One more line is done. ``tokens``: of its prompt and of its output."""
        self.done += 1
        self.num_failed += not ok
        self.prompt_tokens += tokens[0]
        self.output_tokens += tokens[1]
        self.tick()

    def summary(self) -> str:
        """Tokens, seconds and tokens per second of the lines that were done in this run."""
        seconds = time.monotonic() - self._began
        rate = self.output_tokens / max(seconds, 1e-9)
        return (
            f"{self.done - self._before} lines in {seconds:.1f} s: {self.prompt_tokens} prompt tokens, "
            f"{self.output_tokens} output tokens, {rate:.1f} output tokens/s"
        )

    def tick(self) -> None:
        """Show it anew, if that is due."""
        if time.monotonic() - self._told >= (_REFRESH_SECONDS if self._bar else _LINE_SECONDS):
            self._tell()

    def _tell(self) -> None:
        self._told = time.monotonic()
        speed = (self.done - self._before) / max(self._told - self._began, 1e-9)
        if self._bar is not None and self._task is not None:
            failed = f"[red]{self.num_failed} failed" if self.num_failed else ""
            self._bar.update(self._task, completed=self.done, speed=speed, failed=failed, refresh=True)
            return
        left = (self._total - self.done) / speed if speed else 0.0
        failed = f", {self.num_failed} failed" if self.num_failed else ""
        say(f"{self.done} of {self._total} lines{failed}, {speed:.1f} lines/s, {left:.0f} s left")


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("penstock"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TextColumn("[bold cyan]{task.fields[speed]:,.1f} lines/s"),
        TextColumn("{task.fields[failed]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        auto_refresh=False,
    )
