"""Calls of an ``LLM`` with many inputs: progress, failures, and partial results after Ctrl-C."""

import contextlib
import time
from collections.abc import Callable, Coroutine, Iterator
from types import TracebackType
from typing import Any, Generic, Literal, Self, TypeVar, cast

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from penstock_common.errors import InvalidArgument, RequestFailed
from penstock_common.types.outputs import RequestError
from penstock_local.llm.bounded_submission import Window
from penstock_local.llm.inputs import Inputs
from penstock_local.llm.outputs import Record
from penstock_local.llm.runtime import Runtime

_REFRESH_SECONDS = 0.2

Shown = bool | Callable[..., Any]
"""Whether to show a progress bar, or a function that makes one, such as ``tqdm.tqdm``.

The function is called with ``total`` and ``desc``. Its result needs the methods ``update`` and ``close``.
"""


class Bar:
    """Progress bar on standard error, used in a ``with`` block. Shown only on a terminal.

    ``tokens`` returns the number of new tokens so far. ``total`` is None if the number of inputs is unknown.
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
        """Count one more finished input."""
        self._done += 1
        if self._given is not None:
            self._given.update(1)
        self.tick()

    def tick(self) -> None:
        """Redraw the bar if the refresh interval has passed."""
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


T = TypeVar("T")
P = TypeVar("P")
R = TypeVar("R", bound=Record)

Errors = Literal["raise", "return"]
"""Behavior of a call if an input fails: raise the error and cancel other inputs, or return a record with ``error``."""


class Interrupted(KeyboardInterrupt):
    """KeyboardInterrupt with the results so far. ``results`` has None for each input without a result."""

    def __init__(self, results: list[Any]) -> None:
        super().__init__(f"interrupted; {sum(each is not None for each in results)} inputs have a result")
        self.results = results


class Job(Generic[T, P, R]):
    """Operation of a call, applied to each input.

    ``run`` computes the result of an input, and ``failed`` is the record type of a failure. ``check`` validates an
    input without computing; if it is None, ``run`` validates. ``name`` is the name of the inputs in errors.
    """

    def __init__(
        self,
        name: str,
        run: Callable[[P], Coroutine[Any, Any, R]],
        failed: type[R],
        check: Callable[[T], Coroutine[Any, Any, P]] | None = None,
    ) -> None:
        self._name = name
        self._check = check
        self._run = run
        self.failed = failed

    async def check(self, index: int, value: T) -> P:
        """Validate an input. Raises RequestFailed that begins with the input's name."""
        with self._naming(index):
            return await self._check(value) if self._check is not None else cast(P, value)

    async def run(self, index: int, checked: P) -> R:
        """Compute the result of a validated input. Raises RequestFailed that begins with the input's name."""
        with self._naming(index):
            return await self._run(checked)

    async def whole(self, index: int, value: T) -> R:
        """Validate an input and compute its result."""
        return await self.run(index, await self.check(index, value))

    @contextlib.contextmanager
    def _naming(self, index: int) -> Iterator[None]:
        """Add the input's name to errors that are raised in the ``with`` block."""
        try:
            yield
        except RequestFailed as e:
            name = f"{self._name}[{index}]"
            if e.message.startswith(name):
                raise
            named = msgspec.structs.replace(RequestError.from_exception(e), message=f"{name}: {e.message}")
            raise named.to_exception() from e


class Batch(Generic[T, P, R]):
    """One call of an ``LLM``. Use ``all`` or ``each`` to get its results."""

    def __init__(self, runtime: Runtime, job: Job[T, P, R], *, errors: Errors, shown: Shown) -> None:
        """Create the call. Raises InvalidArgument for an unknown value of ``errors``."""
        if errors not in ("raise", "return"):
            raise InvalidArgument(f"errors is {errors!r}; it must be 'raise' or 'return'", field="errors")
        self._runtime = runtime
        self._job = job
        self._raises = errors == "raise"
        self._shown = shown

    def all(self, inputs: Inputs[T]) -> list[R]:
        """Return the results in the order of the inputs.

        With ``errors="raise"``, all inputs are checked before the first runs.
        """
        if not self._raises:
            return self._listed(self._results(inputs, self._window(self._job.whole)))
        wrong: list[RequestFailed] = []
        given = list(_until_failure(inputs.each, wrong))
        if wrong:
            raise wrong[0]
        checked = [self._unless_failed(each) for _, each in self._window(self._job.check).in_order(iter(given))]
        del given
        window = self._window(self._job.run)
        return self._listed(self._results(Inputs(iter(checked), len(checked)), window))

    def each(self, inputs: Inputs[T], *, in_order: bool) -> Iterator[tuple[int, R]]:
        """Yield the index and result of each input, in the order in which inputs end or in input order.

        Each input is checked immediately before it runs.
        """
        return self._results(inputs, self._window(self._job.whole), in_order=in_order)

    def _window(self, one: Callable[[int, Any], Coroutine[Any, Any, Any]]) -> Window[Any, Any]:
        return Window(self._runtime.submit, one, at_once=self._runtime.at_once)

    def _results(
        self, inputs: Inputs[Any], window: Window[Any, R], *, in_order: bool = False
    ) -> Iterator[tuple[int, R]]:
        engine = self._runtime.engine
        with Bar(self._shown, inputs.total, lambda: engine.num_tokens) as bar:
            window.tick = bar.tick
            results = window.in_order(inputs.each) if in_order else window.results(inputs.each)
            with contextlib.closing(results):
                for index, result in results:
                    bar.advance()
                    yield index, self._unless_failed(result)

    def _listed(self, results: Iterator[tuple[int, R]]) -> list[R]:
        listed: list[Any] = []
        try:
            for index, result in results:
                listed.extend([None] * (index + 1 - len(listed)))
                listed[index] = result
        except KeyboardInterrupt:
            raise Interrupted(listed) from None
        return listed

    def _unless_failed(self, result: Any) -> Any:
        if not isinstance(result, RequestFailed):
            return result
        if self._raises:
            raise result
        return self._job.failed(error=RequestError.from_exception(result))


def _until_failure(inputs: Iterator[T | RequestFailed], wrong: list[RequestFailed]) -> Iterator[T]:
    """Yield the inputs before the first invalid input. Append the error of the invalid input to ``wrong``."""
    for each in inputs:
        if isinstance(each, RequestFailed):
            wrong.append(each)
            return
        yield each
