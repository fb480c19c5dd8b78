"""One call of an ``LLM``: many inputs, what becomes of their failures, and of results when the call is interrupted."""

import contextlib
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Generic, Literal, TypeVar

import msgspec

from penstock_common.errors import InvalidArgument, RequestFailed
from penstock_common.types.outputs import RequestError
from penstock_local.llm.inputs import Inputs
from penstock_local.llm.outputs import Record
from penstock_local.llm.progress import Bar, Shown
from penstock_local.llm.runtime import Runtime
from penstock_local.llm.window import Window

T = TypeVar("T")
P = TypeVar("P")
R = TypeVar("R", bound=Record)

Errors = Literal["raise", "return"]
"""What a call does with an input that fails: it raises that and ends the others, or returns a record with ``error`` in its
place.
"""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, with the results there were: ``results`` has None where there was none yet."""

    def __init__(self, results: list[Any]) -> None:
        super().__init__(f"interrupted; {sum(each is not None for each in results)} inputs have their result")
        self.results = results


class Job(Generic[T, P, R]):
    """What is done with each input. ``name``: what the inputs are called, for errors. ``check``: all that can be said of it
    without computing. ``run``: what it comes to; ``failed``: the record of a failure.
    """

    def __init__(
        self,
        name: str,
        check: Callable[[T], Coroutine[Any, Any, P]],
        run: Callable[[P], Coroutine[Any, Any, R]],
        failed: type[R],
    ) -> None:
        self._name = name
        self._check = check
        self._run = run
        self.failed = failed

    async def check(self, index: int, value: T) -> P:
        """The input, checked. Raises RequestFailed with its name."""
        with self._naming(index):
            return await self._check(value)

    async def run(self, index: int, checked: P) -> R:
        """The result of a checked input. Raises RequestFailed with its name."""
        with self._naming(index):
            return await self._run(checked)

    async def whole(self, index: int, value: T) -> R:
        """Check, and run."""
        return await self.run(index, await self.check(index, value))

    @contextlib.contextmanager
    def _naming(self, index: int) -> Iterator[None]:
        """Failures inside get the name of the input."""
        try:
            yield
        except RequestFailed as e:
            name = f"{self._name}[{index}]"
            if e.message.startswith(name):
                raise
            named = msgspec.structs.replace(RequestError.from_exception(e), message=f"{name}: {e.message}")
            raise named.to_exception() from e


class Batch(Generic[T, P, R]):
    """One call: ``all`` or ``each`` of its results."""

    def __init__(self, runtime: Runtime, job: Job[T, P, R], *, errors: Errors, shown: Shown) -> None:
        """Raises InvalidArgument for other ``errors`` than there are."""
        if errors not in ("raise", "return"):
            raise InvalidArgument(f"errors is {errors!r}; it must be 'raise' or 'return'", field="errors")
        self._runtime = runtime
        self._job = job
        self._raises = errors == "raise"
        self._shown = shown

    def all(self, inputs: Inputs[T]) -> list[R]:
        """The results in the order of the inputs. With ``errors="raise"`` all are checked before the first runs."""
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
        """Each input's index and result, as they end or in their order. An input is checked when its turn comes."""
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
    """The inputs up to the first that is wrong, which ``wrong`` gets."""
    for each in inputs:
        if isinstance(each, RequestFailed):
            wrong.append(each)
            return
        yield each
