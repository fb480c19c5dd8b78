"""Implementation of ``penstock bench``, from its options to its exit code."""

import asyncio
import contextlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from penstock_client import AsyncClient, Model
from penstock_common.errors import ConfigError, RequestFailed, nearest
from penstock_local.bench import plot
from penstock_local.bench.dataset import Dataset, make_dataset
from penstock_local.bench.html_report import Run, html_report
from penstock_local.bench.load import UNFINISHED, Load
from penstock_local.bench.options import BenchOptions
from penstock_local.bench.report import (
    Record,
    Report,
    as_json,
    check_answers,
    latency_table,
    make_report,
    summary_table,
)
from penstock_local.console import fail, say
from penstock_local.rpc.client import (
    ServerUnreachableError,
    check_chosen,
    client_of,
    describe_failure,
    make_client,
    pools,
    unreachable,
)

EXIT_FAILED, EXIT_INTERRUPTED = 1, 130
_REFRESH_SECONDS = 0.25
_SHOWN_FAILURES = 5


async def bench(options: BenchOptions) -> int:
    """Run the load and report the results. Returns the exit code. Raises ConfigError before any request is sent.

    Results go to standard output. The progress bar and messages go to standard error.
    """
    plot.check(options.plot, flag="--plot")
    plot.check(options.report, flag="--report")
    _check_writable(options.plot, flag="--plot")
    _check_writable(options.report, flag="--report")
    if options.json != "-":
        _check_writable(options.json, flag="--json")
    try:
        model, dataset = await _prepare(options)
        async with contextlib.AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(make_client(options.address)) for _ in range(options.channels)]
            load = Load(options, clients, dataset.prompts)
            run = _describe(options, model, dataset)
            say(f"{run.model} at {options.address}, {run.engines}: {options.load}; {run.about}")
            await load.warm_up()
            interrupted = await _run(load, options)
    except ServerUnreachableError as e:
        fail(unreachable(e))
        return EXIT_FAILED
    except RequestFailed as e:
        fail(f"{describe_failure(e)}\nNothing was measured.")
        return EXIT_FAILED
    answers = check_answers(load.records)
    report = make_report(load.records, seconds=load.seconds, cpu_seconds=load.cpu_seconds, json_answers=answers)
    _show(report, load.records, run)
    if load.stopped and not interrupted:
        fail(f"{load.stopped}: sending stopped after {len(load.records)} requests")
    if interrupted:
        return EXIT_INTERRUPTED
    return EXIT_FAILED if report.failures else 0


async def _prepare(options: BenchOptions) -> tuple[Model, Dataset]:
    """Return the model to measure and the dataset. Raises ConfigError, and the server's errors."""
    async with client_of(options.address) as client:
        model = await _model(options, client)

        async def count_tokens(text: str) -> int:
            return len(await client.tokenize(text, model=options.model))

        return model, await make_dataset(options, model, count_tokens)


async def _model(options: BenchOptions, client: AsyncClient) -> Model:
    """Return the model to measure. Raises ConfigError if the server does not have this model, and the server's errors."""
    models = {model.name: model for model in await client.models()}
    if not models:
        raise ConfigError(f"{options.address} serves no model")
    for flag, named in (("--model", options.model), ("--lora", options.lora)):
        if named and named not in models:
            raise ConfigError(
                f"{flag} {named}: {options.address} serves only {', '.join(models)}{nearest(named, models)}"
            )
    if not (options.lora or options.model):
        check_chosen(models.values(), options.address)
    name = options.lora or options.model or next(iter(models))
    if pools(models[name]):
        serves = ", ".join(models[name].capabilities)
        raise ConfigError(
            f"{name} at {options.address} does not generate text, which the benchmark measures; the model supports only {serves}"
        )
    return models[name]


def _describe(options: BenchOptions, model: Model, dataset: Dataset) -> Run:
    return Run(
        options=options,
        model=model.name,
        engines="1 engine" if model.num_engines == 1 else f"{model.num_engines} engines",
        about=dataset.about,
        began=datetime.now(UTC),
        version=importlib.metadata.version("penstock"),
    )


async def _run(load: Load, options: BenchOptions) -> bool:
    """Run the load under a progress bar. Returns whether Ctrl-C ended the load. The records stay in ``load``."""
    with _progress() as progress:
        task = progress.add_task("", total=options.limit or options.duration, ended="", speed="", running="", failed="")
        running = asyncio.create_task(load.run())
        try:
            while not running.done():
                await asyncio.wait([running], timeout=_REFRESH_SECONDS)
                _update(progress, task, load, options)
        except asyncio.CancelledError:
            # Ctrl-C ends the running requests, and then the command writes the report. A second Ctrl-C would cancel the
            # task again and end the program.
            current = asyncio.current_task()
            if current is not None:
                current.uncancel()
            running.cancel()
            await asyncio.wait([running])
            return True
        await running
    return False


def _progress() -> Progress:
    """Return a progress bar, which is shown if standard error is a terminal, and disappears at the end."""
    console = Console(stderr=True, highlight=False)
    return Progress(
        SpinnerColumn(),
        BarColumn(bar_width=30),
        TextColumn("{task.fields[ended]}"),
        TextColumn("[bold cyan]{task.fields[speed]}"),
        TextColumn("{task.fields[running]}"),
        TextColumn("[red]{task.fields[failed]}"),
        TimeElapsedColumn(),
        console=console,
        auto_refresh=False,
        transient=True,
        disable=not console.is_terminal,
    )


def _update(progress: Progress, task: TaskID, load: Load, options: BenchOptions) -> None:
    seconds = load.elapsed()
    progress.update(
        task,
        completed=load.num_ended if options.limit else min(seconds, options.duration or seconds),
        ended=f"{load.num_ended}/{options.limit}" if options.limit else f"{load.num_ended} requests",
        speed=f"{load.recent_tokens_per_s():,.0f} tokens/s",
        running=f"{load.num_running} running",
        failed=f"{load.num_failed} failed" if load.num_failed else "",
        refresh=True,
    )


def _show(report: Report, records: Sequence[Record], run: Run) -> None:
    """Write all results: tables, messages and files."""
    options = run.options
    to_stdout = options.json == "-"
    console = Console(highlight=False, stderr=to_stdout)
    console.print(summary_table(report), "", latency_table(report), sep="\n")
    for code, count in report.failures.items():
        if code == UNFINISHED:
            say(f"{count} requests were still running and were cancelled")
            continue
        messages = dict.fromkeys(record.message for record in records if record.code == code)
        for message in list(messages)[:_SHOWN_FAILURES]:
            fail(f"{count} requests ended as {code}: {message}" if len(messages) == 1 else f"{code}: {message}")
    problems = [record.problem for record in records if record.problem]
    if problems:
        say(f"{len(problems)} answers do not match their JSON schema; the first: {problems[0]}")
    if report.client_is_busy:
        say(f"this client used {report.cpu_share:.0%} of a core and may limit the results; run several clients at once")
    if options.json:
        text = json.dumps(as_json(options, report, records), indent=1) + "\n"
        sys.stdout.write(text) if to_stdout else Path(options.json).write_text(text, encoding="utf-8")
    if options.plot:
        plot.draw(options.plot, records, report, title=options.load)
        say(f"wrote the plot to {options.plot}")
    if options.report:
        Path(options.report).write_text(html_report(run, report, records), encoding="utf-8")
        say(f"wrote the report to {options.report}")


def _check_writable(name: str, *, flag: str) -> None:
    """Check before the load runs that the file can be written. Raises ConfigError if the file cannot be written."""
    file = Path(name)
    if name and (file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK)):
        raise ConfigError(f"{flag}: cannot write {name!r}")
