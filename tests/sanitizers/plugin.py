"""A pytest plugin that loads the kernels and the shared memory library from the folder ``PENSTOCK_SANITIZED``.

Emulated kernels are in a subfolder.
"""

import os
from pathlib import Path

from penstock_enginecore.executor.multiproc import futex_counter as words
from penstock_enginecore.native import library
from penstock_enginecore.parallel import collectives
from tests.emulation import build

DIRECTORY = Path(os.environ["PENSTOCK_SANITIZED"])
library._DIRECTORY = DIRECTORY
words._LIBRARY = collectives._LIBRARY = DIRECTORY / words._LIBRARY.name
build.emulated = lambda isa: DIRECTORY / "emulated"
