"""A user's terminal, which runs the commands of pages and chart notes as printed."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

from tests.cluster.release import Release
from tests.cluster.system.programs import built


class Terminal:
    """Runs commands with access to kubectl, helm, grpcurl, penstock and the cluster.

    Usage: ``with Terminal(release) as terminal``.
    """

    def __init__(self, release: Release) -> None:
        kubectl = Path(release.cluster.control_plane.kubectl[0])
        programs = [release.helm_program, kubectl, Path(built("grpcurl", "grpcurl")), Path(sys.executable)]
        self._environment = {
            **os.environ,
            "PATH": ":".join([*(str(program.parent) for program in programs), os.environ["PATH"]]),
            "KUBECONFIG": str(release.cluster.control_plane.admin),
        }
        self._beside = contextlib.ExitStack()

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        self._beside.close()

    def forward(self, command: str) -> None:
        """Run a ``kubectl port-forward`` in the background until the terminal closes."""
        forwarding = subprocess.Popen(command.split(), env=self._environment, stdout=subprocess.PIPE, text=True)
        self._beside.enter_context(forwarding)
        self._beside.callback(forwarding.terminate)
        assert forwarding.stdout is not None
        assert forwarding.stdout.readline().startswith("Forwarding from")

    def type(self, command: str, *, status: int = 0) -> str:
        """Return the command's output, or its standard error if it should fail. Raises AssertionError for another exit
        status.
        """
        done = subprocess.run(
            ["bash", "-c", command], env=self._environment, check=False, capture_output=True, text=True
        )
        assert done.returncode == status, f"{command}: exit status {done.returncode}: {done.stderr}"
        return done.stderr if status else done.stdout
