"""Errors for models that cannot be served, or not by one of the implementations. Importable without torch."""

from penstock_common.errors import PenstockError


class ModelLoadError(PenstockError):
    """Reports a checkpoint that cannot be loaded or whose architecture is not supported. The message tells what to do."""


class UnsuitableError(Exception):
    """Reports that an implementation does not support a model. The message gives the reason."""
