"""Entry point of ``python -m penstock_local``, which is the ``penstock`` command."""

import sys

from penstock_local.cli import main

sys.exit(main())
