"""Why a model cannot be served. Importable without torch."""

from penstock_common.errors import PenstockError


class ModelLoadError(PenstockError):
    """A checkpoint cannot be loaded or its architecture cannot be served. The message says what to do."""
