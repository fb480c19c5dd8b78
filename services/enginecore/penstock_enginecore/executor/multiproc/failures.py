"""Errors on their way from a worker to the engine, where they are raised again as what they were."""

import traceback
from typing import Literal

import msgspec

from penstock_common.errors import ConfigError, PenstockError, RequestFailed, request_failed
from penstock_enginecore.models.errors import ModelLoadError


class WorkerError(PenstockError):
    """What a worker raised that is none of Penstock's own errors."""


class WorkersGone(PenstockError):  # noqa: N818 - it says what happened
    """A worker has ended, hangs, or computes something else than the others. None of them computes any more."""


class Failure(msgspec.Struct, frozen=True, tag="failure"):
    """An error of class ``name``. ``code``, ``field``, ``reason``: those of a RequestFailed. ``trace``: where it was raised."""

    kind: Literal["config", "load", "request", "other"]
    name: str
    message: str
    code: str = ""
    field: str = ""
    reason: str = ""
    trace: str = ""

    @staticmethod
    def of(error: BaseException) -> "Failure":
        """What can be told of an error."""
        name, message, trace = type(error).__name__, str(error), "".join(traceback.format_exception(error))
        if isinstance(error, RequestFailed):
            return Failure("request", name, message, error.code, error.field, error.reason, trace)
        kinds: list[tuple[type[BaseException], Literal["config", "load"]]] = [
            (ConfigError, "config"),
            (ModelLoadError, "load"),
        ]
        kind = next((kind for type_, kind in kinds if isinstance(error, type_)), None)
        return Failure(kind or "other", name, message, trace=trace)

    def error(self, worker: str) -> PenstockError:
        """The error, to be raised in the engine. ``worker``: which one raised it; empty: there is no other."""
        text = f"{worker}: {self.message}" if worker else self.message
        error: PenstockError
        if self.kind == "request":
            error = request_failed(self.code, text, field=self.field, reason=self.reason)
        elif self.kind == "config":
            error = ConfigError(text)
        elif self.kind == "load":
            error = ModelLoadError(text)
        else:
            error = WorkerError(f"{worker}: {self.name}: {self.message}" if worker else f"{self.name}: {self.message}")
        error.add_note(f"raised in the worker:\n{self.trace}")
        return error
