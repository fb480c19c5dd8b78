"""A plugin of pytest: the kernels come from the folder that ``PENSTOCK_SANITIZED`` names."""

import os
from pathlib import Path

from penstock_enginecore.native import library

library._DIRECTORY = Path(os.environ["PENSTOCK_SANITIZED"])
