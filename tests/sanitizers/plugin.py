"""A plugin of pytest: the kernels, and what processes share memory by, come from the folder that ``PENSTOCK_SANITIZED`` names;
emulated kernels from one in it.
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
