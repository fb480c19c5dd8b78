"""Runs an engine: ``python -m penstock_enginecore --config engine.yaml``. With ``worker`` as the first argument, the
program runs a node (the workers on one host) of an engine whose node 0 is on another host.
"""

import os
import sys
from functools import partial

from penstock_common.config.loader import from_command_line
from penstock_common.config_file import ConfigFile
from penstock_common.errors import ConfigError, RequestFailed
from penstock_common.memory import use_few_arenas
from penstock_common.security.shared_secret import SharedSecret
from penstock_enginecore.app import run
from penstock_enginecore.config import DataParallelConfig, EngineCoreConfig
from penstock_enginecore.core.steps_in_flight import EngineDeadError
from penstock_enginecore.data_parallel.core.group_channels import Meets
from penstock_enginecore.executor.factory import make_executor
from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.structured_output.factory import make_grammar_backend
from penstock_enginecore.structured_output.grammar_processes import Children
from penstock_enginecore.worker.failures import WorkersGone

WORKER = "worker"
"""First command-line argument of a process that runs workers for an engine on another host."""
_NODE = "Runs workers of an engine on another host. Attaches to executor.nodes.leader, and exits with the engine."


def main() -> int:
    """Run the program and return its exit code: 0 after a requested stop, 2 for an invalid configuration, 1 if loading
    or a step failed.
    """
    try:
        if sys.argv[1:2] == [WORKER]:
            _be_a_node()
        else:
            _be_an_engine()
    except ConfigError as e:
        print(f"penstock-enginecore: {e}", file=sys.stderr)
        return 2
    except (ModelLoadError, EngineDeadError, WorkersGone, RequestFailed) as e:
        print(f"penstock-enginecore: {e}", file=sys.stderr)
        return 1
    return 0


def _be_an_engine() -> None:
    source = from_command_line(EngineCoreConfig, prog="penstock-enginecore", description=__doc__ or "")
    config_file = ConfigFile(source)
    if index := config_file.running.executor.nodes.index:
        raise ConfigError(
            f"executor.nodes.index is {index}, but the engine is node 0; run `python -m penstock_enginecore "
            "worker` for other nodes"
        )
    children = Children(config_file.running.structured_output)
    use_few_arenas()
    children.start_early()  # Start the child processes early: they import their modules while this process continues.
    run(config_file, make_executor, partial(make_grammar_backend, children=children), _make_meets)


def _make_meets(config: DataParallelConfig, rank: str, secret: SharedSecret | None) -> Meets:
    """Create the object that connects the ranks of the data-parallel group. This function imports torch only when it is
    called, so that the port opens before the import.
    """
    from penstock_enginecore.parallel.group_collectives import SocketLinks

    return SocketLinks(config, rank, secret)


def _be_a_node() -> None:
    source = from_command_line(
        EngineCoreConfig, prog=f"penstock-enginecore {WORKER}", description=_NODE, argv=sys.argv[2:]
    )
    config = source.load()
    use_few_arenas()
    # Import torch only here, after the flags are checked.
    from penstock_enginecore.executor.multiproc import nodes

    nodes.run(config)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # All threads and processes of the engine have stopped. Skip the interpreter's teardown, in which native libraries
    # would only report irrelevant errors.
    os._exit(code)
