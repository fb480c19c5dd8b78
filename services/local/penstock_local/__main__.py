"""``python -m penstock_local`` is the ``penstock`` command."""

import sys

from penstock_local.cli import main

sys.exit(main())
