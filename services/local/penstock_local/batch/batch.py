"""Implementation of ``penstock batch``, which answers every line of a file exactly once, even if the command is run
again.
"""

import contextlib
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Self

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from penstock_common.errors import ConfigError, RequestFailed
from penstock_local.batch import files as records
from penstock_local.batch.backend import Backend, Servers
from penstock_local.batch.files import (
    BatchRecord,
    BatchRequest,
    BatchResponse,
    InputFile,
    OutputFile,
    custom_id_of,
    request_of,
)
from penstock_local.batch.options import BatchOptions
from penstock_local.console import say
from penstock_local.llm.bounded_submission import Window

_REFRESH_SECONDS = 0.25
_LINE_SECONDS = 30.0


class BatchProgress:
    """Progress display of a batch, used in a ``with`` block. ``done`` lines were finished by earlier runs."""

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
        """Stop the progress display, and print ``why``, the reason why the batch stops."""
        if self._bar is not None:
            self._tell()
            self._bar.stop()
        say(why)

    def add(self, *, ok: bool, tokens: tuple[int, int] = (0, 0)) -> None:
        """Count one finished line. ``tokens``: number of prompt tokens and number of output tokens of the line."""
        self.done += 1
        self.num_failed += not ok
        self.prompt_tokens += tokens[0]
        self.output_tokens += tokens[1]
        self.tick()

    def summary(self) -> str:
        """Return a text with lines, seconds, tokens and tokens per second of this run."""
        seconds = time.monotonic() - self._began
        rate = self.output_tokens / max(seconds, 1e-9)
        return (
            f"{self.done - self._before} lines in {seconds:.1f} s: {self.prompt_tokens} prompt tokens, "
            f"{self.output_tokens} output tokens, {rate:.1f} output tokens/s"
        )

    def tick(self) -> None:
        """Refresh the display if the refresh interval has passed."""
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


def batch(options: BatchOptions) -> int:
    """Run the batch. Returns the exit code: 1 if a line failed.

    Raises ConfigError, and Unavailable if servers no longer answer.
    """
    source = InputFile(options.input)
    with (
        OutputFile(options.output, overwrite=options.overwrite) as output,
        OutputFile(options.error_file, overwrite=options.overwrite or options.retry_errors) as errors,
    ):
        done, num_before = _done(source, output, errors)
        num_failed = sum(1 for _ in errors.lines())
        if num_before < source.total:
            if num_before:
                say(f"{num_before} of {source.total} lines are already done")
            num_failed += _run(options, source, done, num_before, output, errors)
        else:
            say("nothing to do: an earlier run has done every line; --overwrite runs them again")
        output.finish()
        if num_failed:
            errors.finish()
        else:
            errors.remove_if_empty()
    _report(options, source.total, num_failed)
    return int(num_failed > 0)


def _run(
    options: BatchOptions, source: InputFile, done: bytearray, num_done: int, output: OutputFile, errors: OutputFile
) -> int:
    """Answer the remaining lines. Returns the number of failed lines."""
    backend = make_backend(options)
    requests = _Requests(source, done, backend)
    window = Window(backend.submit, requests.answer, at_once=options.concurrency or backend.at_once)
    with contextlib.ExitStack() as stack:
        stack.callback(backend.close)
        progress = stack.enter_context(BatchProgress(source.total, num_done))
        window.tick = progress.tick
        results = window.results(requests.each()) if options.unordered else window.in_order(requests.each())
        stack.enter_context(contextlib.closing(results))
        try:
            for _, record in results:
                if isinstance(record, RequestFailed):
                    raise record
                (output if record.ok else errors).add(records.encoded(record))
                progress.add(ok=record.ok, tokens=records.tokens_of(record))
        except (KeyboardInterrupt, RequestFailed):
            progress.stop(f"{progress.done} of {source.total} lines are done; run the same command again to continue")
            raise
        progress.stop(progress.summary())
        return progress.num_failed


class _Requests:
    """Requests of the lines that are not done yet. An invalid line yields an error record instead of a request."""

    def __init__(self, source: InputFile, done: bytearray, backend: Backend) -> None:
        self._source = source
        self._done = done
        self._backend = backend
        self._urls = list(backend.urls)

    def each(self) -> Iterator[BatchRequest | BatchRecord]:
        """Yield the remaining requests, or the error record of an invalid line."""
        for number, line in self._source.lines():
            if number < len(self._done) and self._done[number]:
                continue
            try:
                yield request_of(line, number, self._urls)
            except RequestFailed as e:
                yield records.failed(number, custom_id_of(line), e)

    async def answer(self, _: int, request: BatchRequest | BatchRecord) -> BatchRecord:
        """Return the record of one request. Raises Unavailable if there is no answer."""
        if isinstance(request, BatchRecord):
            return request
        answer = await self._backend.post(request.url, request.body)
        try:
            body = msgspec.json.decode(answer.body, type=msgspec.Raw)
        except msgspec.DecodeError:
            body = msgspec.Raw(msgspec.json.encode(answer.body.decode(errors="replace")))
        return records.answered(
            request.number, request.custom_id, BatchResponse(answer.status, answer.request_id, body)
        )


def _done(source: InputFile, *files: OutputFile) -> tuple[bytearray, int]:
    """Read from the output files which lines are done. Returns a flag per line number, and the number of done lines.

    Raises ConfigError if an output file does not belong to this input file.
    """
    done, count = bytearray(), 0
    for file in files:
        for line in file.lines():
            try:
                number, custom_id = records.done_line(line)
            except ValueError as e:
                raise ConfigError(
                    f"{file.path} has a line that is not a record of a batch: {e}; use --overwrite to replace the file"
                ) from None
            if not source.is_line(number, custom_id):
                raise ConfigError(
                    f"{file.path} has an answer to {custom_id!r} for line {number}, but this line of {source.path} has "
                    "another custom_id; use --overwrite to replace the file"
                )
            done.extend(bytes(max(0, number + 1 - len(done))))
            count += not done[number]
            done[number] = 1
    return done, count


def make_backend(options: BatchOptions) -> Backend:
    """Create the backend of the options. Raises ConfigError and ModelLoadError."""
    if options.server:
        return Servers(options.server)
    say(f"loading {options.model}")
    from penstock_local.batch.engine import LocalEngine  # Imports torch.

    return LocalEngine(options.model, options.engine_options, options.lora)


def _report(options: BatchOptions, total: int, num_failed: int) -> None:
    if num_failed == 0:
        say(f"{total} lines done: {options.output}")
        return
    say(f"{total - num_failed} of {total} lines done: {options.output}; {num_failed} failed: {options.error_file}")
