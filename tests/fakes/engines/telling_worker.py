"""Worker process with a model whose forward pass shows the adapter of each row (``telling_adapters``)."""

import sys

import pytest

from penstock_enginecore.executor.multiproc.worker_process import main
from tests.fakes.engines.telling_adapters import make_reader, tell_adapters

MODULE = "tests.fakes.engines.telling_worker"

if __name__ == "__main__":
    tell_adapters(pytest.MonkeyPatch())
    main(int(sys.argv[1]), make_reader)
