"""Errors that a worker sends to the engine. The engine raises each error again with its original type."""

import traceback
from typing import Literal

import msgspec

from penstock_common.errors import ConfigError, PenstockError, RequestFailed
from penstock_common.types.outputs import RequestError
from penstock_enginecore.models.errors import ModelLoadError


class WorkerError(PenstockError):
    """Error raised in the engine if a worker has raised an error of a class that is not one of Penstock's own."""


class WorkersGone(PenstockError):  # noqa: N818 - it says what happened
    """Error raised if a worker has exited, hangs, or has computed other results than the other workers. The workers of
    the engine then compute no more steps.
    """


class Failure(msgspec.Struct, frozen=True, tag="failure"):
    """Description of an error that a worker has raised.

    Attributes:
        kind: Kind of error, which determines the class of the error in the engine.
        name: Name of the error's class in the worker.
        message: The error's message.
        request: Description of the error if it is a RequestFailed, otherwise None.
        trace: Traceback of the error in the worker.
    """

    kind: Literal["config", "load", "request", "other"]
    name: str
    message: str
    request: RequestError | None = None
    trace: str = ""

    @staticmethod
    def of(error: BaseException) -> "Failure":
        """Return the description of ``error``."""
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
        """Return the error to raise in the engine. ``worker`` is the worker's name for the message, or empty if there
        is only one worker.
        """
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
