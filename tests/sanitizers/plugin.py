"""A plugin of pytest: the kernels come from the folder that ``PENSTOCK_SANITIZED`` names, emulated ones from one in it."""

import os
from pathlib import Path

from penstock_enginecore.native import library
from tests.emulation import build

DIRECTORY = Path(os.environ["PENSTOCK_SANITIZED"])
library._DIRECTORY = DIRECTORY
build.emulated = lambda isa: DIRECTORY / "emulated"
