"""``python -m tests.fakes.engines.oracle_service --config engine.yaml``: a drop-in for the enginecore's process,
without torch.

Settings, scheduler, sessions, health, metrics and drain are those of enginecore. Only the executor is an oracle.
Constraints are refused, because the grammar library imports torch. ``ORACLE_STEP_SECONDS`` and ``ORACLE_LOAD_SECONDS``
set its speed.
"""

import os
import sys

from penstock_common.config.loader import from_command_line
from penstock_common.config_file import ConfigFile
from penstock_common.errors import ConfigError
from penstock_common.memory import use_few_arenas
from penstock_enginecore.app import run
from penstock_enginecore.config import EngineCoreConfig
from penstock_enginecore.core.steps_in_flight import EngineDeadError
from penstock_enginecore.models.errors import ModelLoadError
from tests.fakes.engines.oracle_service.executor import PacedExecutor
from tests.fakes.engines.oracle_service.pace import pace_from


def main() -> int:
    """Run the service and return the exit status of enginecore: 0 after a requested stop, 2 for an invalid
    configuration, 1 after a fatal error.
    """
    try:
        config_file = ConfigFile(from_command_line(EngineCoreConfig, prog="oracle-engine", description=__doc__ or ""))
        pace = pace_from(os.environ)
        use_few_arenas()
        run(config_file, lambda config: PacedExecutor(config, pace))
    except ConfigError as e:
        print(f"oracle-engine: {e}", file=sys.stderr)
        return 2
    except (ModelLoadError, EngineDeadError) as e:
        print(f"oracle-engine: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
