"""Runs a service whose state machines write traces: ``python -m tests.modelcheck.recorded FOLDER SERVICE FLAGS``.

An engine's driver and a coordinator's pools create recorded machines instead of the original ones.
"""

import importlib
import runpy
import sys
from pathlib import Path

from tests.modelcheck.recorder import Recorder

SEAMS = {
    "penstock_enginecore": ("penstock_enginecore.data_parallel.core.driver", "Rank"),
    "penstock_coordinator": ("penstock_coordinator.groups", "GroupMachine"),
}
"""Module in which each service creates its machine, and the name of the class there."""


def main() -> None:
    folder, service = sys.argv[1:3]
    module, machine = SEAMS[service]
    sys.argv = [service, *sys.argv[3:]]
    with Recorder(Path(folder)) as recorder:
        setattr(importlib.import_module(module), machine, recorder.maker(machine))
        runpy.run_module(service, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
