"""Start of the frontend by ``python -m penstock_frontend --config frontend.yaml``."""

import asyncio
import contextlib
import sys
from collections.abc import Sequence

from penstock_common.config.loader import from_command_line
from penstock_common.config_file import ConfigFile
from penstock_common.errors import ConfigError
from penstock_common.memory import give_back_large_blocks, use_few_arenas
from penstock_common.observability.logging import configure
from penstock_common.process import name_process
from penstock_common.rpc.loop import GrpcEventLoop
from penstock_frontend.app.app import run
from penstock_frontend.config import FrontendConfig


def main(argv: Sequence[str] | None = None) -> int:
    """Run the frontend until it receives a stop signal. Return the exit code. The exit code is 2 if the configuration
    is not valid.
    """
    try:
        source = from_command_line(
            FrontendConfig, prog="penstock_frontend", description="The public APIs of Penstock.", argv=argv
        )
        config_file = ConfigFile(source)
        config = config_file.running
        configure(config.log, service="frontend")
        name_process("frontend", config.frontend_id)
        use_few_arenas()
        give_back_large_blocks()
        # KeyboardInterrupt can occur only during startup, because a signal handler is installed later.
        with contextlib.suppress(KeyboardInterrupt), asyncio.Runner(loop_factory=GrpcEventLoop) as runner:
            runner.run(run(config_file))
    except ConfigError as e:
        sys.stderr.write(f"penstock_frontend: {e}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
