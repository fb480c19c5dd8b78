"""Entry point of ``python -m penstock_coordinator --config FILE``."""

import asyncio
import sys

from penstock_common.config.loader import from_command_line
from penstock_common.config_file import ConfigFile
from penstock_common.errors import ConfigError
from penstock_common.memory import give_back_large_blocks, use_few_arenas
from penstock_common.observability.logging import configure
from penstock_common.process import name_process
from penstock_coordinator.app import serve
from penstock_coordinator.config import CoordinatorConfig


def main() -> int:
    """Run the coordinator. Return the exit code: 0 after a clean stop, 2 if the configuration is not valid."""
    try:
        source = from_command_line(
            CoordinatorConfig,
            prog="penstock-coordinator",
            description="Penstock's coordinator, which tracks the engines of a cluster and their load.",
        )
        config_file = ConfigFile(source)
        configure(config_file.running.log, service="coordinator")
        name_process("coordinator")
        use_few_arenas()
        give_back_large_blocks()
        asyncio.run(serve(config_file))
    except ConfigError as e:
        print(f"penstock-coordinator: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
