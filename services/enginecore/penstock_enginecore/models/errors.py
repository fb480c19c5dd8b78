"""Errors for models that cannot be served, or that one implementation does not support. Importable without torch."""

from penstock_common.errors import PenstockError


class ModelLoadError(PenstockError):
    """Error raised if a checkpoint cannot be loaded or its architecture is not supported. The message gives the fix."""


class UnsuitableError(Exception):
    """Error raised if an implementation does not support a model. The message gives the reason."""
