"""Why a model cannot be served, or not by one of the ways to compute it. Importable without torch."""

from penstock_common.errors import PenstockError


class ModelLoadError(PenstockError):
    """A checkpoint cannot be loaded or its architecture cannot be served. The message says what to do."""


class UnsuitableError(Exception):
    """A candidate does not compute this model; the message says why."""
