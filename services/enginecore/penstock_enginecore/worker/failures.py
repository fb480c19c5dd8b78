"""Errors that travel from a worker to the engine, which raises them again with their original type."""

import traceback
from typing import Literal

import msgspec

from penstock_common.errors import ConfigError, PenstockError, RequestFailed
from penstock_common.types.outputs import RequestError
from penstock_enginecore.models.errors import ModelLoadError


class WorkerError(PenstockError):
    """A worker raised an error that is not one of Penstock's own."""


class WorkersGone(PenstockError):  # noqa: N818 - it says what happened
    """A worker has exited, hangs, or computed different results than the other workers. The engine's workers no longer
    compute.
    """


class Failure(msgspec.Struct, frozen=True, tag="failure"):
    """An error that a worker raised.

    Attributes:
        kind: Category of the error's class.
        name: The class of the error.
        message: The error's message.
        request: The request error, if the error is a RequestFailed.
        trace: The traceback.
    """

    kind: Literal["config", "load", "request", "other"]
    name: str
    message: str
    request: RequestError | None = None
    trace: str = ""

    @staticmethod
    def of(error: BaseException) -> "Failure":
        """Describe an error."""
        name, message, trace = type(error).__name__, str(error), "".join(traceback.format_exception(error))
        if isinstance(error, RequestFailed):
            return Failure("request", name, message, RequestError.from_exception(error), trace)
        kinds: list[tuple[type[BaseException], Literal["config", "load"]]] = [
            (ConfigError, "config"),
            (ModelLoadError, "load"),
        ]
        kind = next((kind for type_, kind in kinds if isinstance(error, type_)), None)
        return Failure(kind or "other", name, message, trace=trace)

    def error(self, worker: str) -> PenstockError:
        """Return the error to raise in the engine. ``worker`` names the worker, or is empty if there is only one."""
        text = f"{worker}: {self.message}" if worker else self.message
        error: PenstockError
        if self.request is not None:
            error = msgspec.structs.replace(self.request, message=text).to_exception()
        elif self.kind == "config":
            error = ConfigError(text)
        elif self.kind == "load":
            error = ModelLoadError(text)
        else:
            error = WorkerError(f"{worker}: {self.name}: {self.message}" if worker else f"{self.name}: {self.message}")
        error.add_note(f"raised in the worker:\n{self.trace}")
        return error
