"""Setup of Triton's interpreter, which runs the kernels on a CPU for tiny runs."""

import functools
from importlib.metadata import version
from typing import Any

from tests.device.phases import Settings


def prepare(settings: Settings) -> None:
    """Patch Triton before 3.7 for numpy 2.4 or later, where arrays of one element cannot be used as indices."""
    if settings.cpu and version("triton").startswith(("3.5.", "3.6.")):
        _adapt()


@functools.cache
def _adapt() -> None:
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_with_index(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        # Triton restores the original attribute, which it saved at the first change, after the kernel.
        tensor.__index__ = lambda self: int(self.handle.data.squeeze())

    interpreter._patch_lang_tensor = patch_with_index
