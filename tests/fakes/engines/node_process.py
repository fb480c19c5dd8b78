"""Node of an engine as a process, with real workers or with workers that have no model."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from penstock_enginecore.config import EngineCoreConfig
from tests.fakes.patience import PATIENCE


class NodeProcess:
    """Process of ``python -m penstock_enginecore worker`` with ``config``. ``module`` replaces the module of its
    workers.
    """

    def __init__(self, config: EngineCoreConfig, directory: Path, module: str = "") -> None:
        file = directory / f"node-{config.executor.nodes.index}.yaml"
        file.write_bytes(msgspec.json.encode(config))  # JSON is also valid YAML
        self._log = file.with_suffix(".log")
        command = [__name__, str(file), module] if module else ["penstock_enginecore", "worker", "--config", str(file)]
        with self._log.open("wb") as output:
            self.popen = subprocess.Popen([sys.executable, "-m", *command], stdout=output, stderr=output)

    def log(self) -> str:
        """Return the output of the process so far."""
        return self._log.read_text(errors="backslashreplace")

    def workers(self) -> list[int]:
        """Return the ids of the node's worker processes."""
        found: list[int] = []
        for task in Path(f"/proc/{self.popen.pid}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
        return found

    def ended(self) -> int:
        """Wait until the process has ended, and return its exit status."""
        return self.popen.wait(PATIENCE)

    def kill(self) -> None:
        """Send SIGKILL to the node."""
        self.popen.kill()
        self.popen.wait()

    def terminate(self) -> None:
        """Send SIGTERM to the node, as Kubernetes does."""
        self.popen.send_signal(signal.SIGTERM)


@contextlib.contextmanager
def node_process(config: EngineCoreConfig, directory: Path, module: str = "") -> Iterator[NodeProcess]:
    """Start a node, and kill it at the end of the block."""
    node = NodeProcess(config, directory, module)
    try:
        yield node
    finally:
        node.kill()


def main(file: str, module: str) -> int:
    """Run a node whose workers run ``module``."""
    from penstock_common.errors import PenstockError
    from penstock_enginecore.executor.multiproc import nodes as node

    config = msgspec.json.decode(Path(file).read_bytes(), type=EngineCoreConfig)
    try:
        node.run(config, module)
    except PenstockError as e:
        print(e, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
