"""Errors for models that cannot be served, or that one implementation does not support. Importable without torch."""

from penstock_common.errors import PenstockError


class ModelLoadError(PenstockError):
    """Error raised if a checkpoint cannot be loaded or its architecture is not supported. The message gives the fix."""


def refused_model(name: str, reason: str) -> ModelLoadError:
    """Return the error for a model class ``name`` that is refused for ``reason``. The message says which page lists the
    supported models.
    """
    return ModelLoadError(f"{name} is not supported: {reason}; docs/reference/models.md lists the tested models")


class UnsuitableError(Exception):
    """Error raised if an implementation does not support a model. The message gives the reason."""
