"""Runs an image with runc: the entry point on a read-only root file system, as the image's user, without capabilities."""

import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.cluster.images import buildah
from tests.fakes.patience import PATIENCE


def why_not() -> str:
    """Return the reason why this machine cannot run images; empty if it can."""
    return buildah.why_not() or ("" if shutil.which("runc") else "running images needs the package runc")


class Image:
    """An image in buildah's store. While the image is open, its files are mounted."""

    def __init__(self, name: str) -> None:
        self.name = name
        found = buildah.inspect(name)
        assert found is not None, name
        self.config: dict[str, Any] = found["OCIv1"]["config"]
        self._container = ""
        self.root = Path()

    def __enter__(self) -> "Image":
        self._container = buildah.run("from", "--pull-never", self.name)
        self.root = Path(buildah.run("mount", self._container))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        buildah.run("rm", self._container)

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that the image sets."""
        return dict(entry.split("=", 1) for entry in self.config.get("Env", []))

    @property
    def programs(self) -> set[str]:
        """Names of the programs on the image's PATH."""
        folders = [self.root / path.lstrip("/") for path in self.environment["PATH"].split(":")]
        return {path.name for folder in folders if folder.is_dir() for path in folder.iterdir()}

    @property
    def distributions(self) -> set[str]:
        """Names of the Python packages that the service can import, normalized."""
        found = self.root.glob("opt/penstock/venv/lib/python3.*/site-packages/*.dist-info")
        return {normalized(path.name.split("-")[0]) for path in found}

    def run(self, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a command instead of the entry point, and wait until the command ends."""
        with Running(self, command, environment, entrypoint=False) as running:
            code = running.wait()
            return subprocess.CompletedProcess(command, code, stdout=running.log())

    def start(self, *arguments: str, **environment: str) -> "Running":
        """Start the entry point with these arguments. The container is stopped at the end of the block."""
        return Running(self, arguments, environment, entrypoint=True)


class Running:
    """A container in the network of this process.

    As in the chart, the container can write only to /tmp and /dev/shm.
    """

    def __init__(
        self, image: Image, arguments: Sequence[str], environment: dict[str, str], *, entrypoint: bool
    ) -> None:
        self._image = image
        self._command = [*(image.config["Entrypoint"] if entrypoint else []), *arguments]
        self._environment = image.environment | {"HOME": "/tmp"} | environment
        self._id = f"penstock-{uuid.uuid4().hex[:8]}"
        self._folder = tempfile.TemporaryDirectory(prefix="penstock-container-")
        self._bundle = Path(self._folder.name)

    def __enter__(self) -> "Running":
        (self._bundle / "config.json").write_text(json.dumps(self._spec()))
        with (self._bundle / "log").open("wb") as log:
            self._process = subprocess.Popen(
                ["runc", "--root", str(self._bundle / "state"), "run", "--bundle", str(self._bundle), self._id],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self._runc("kill", self._id, "KILL")
            self._process.wait(PATIENCE)
        self._folder.cleanup()

    def log(self) -> str:
        """Return all output of the container."""
        return (self._bundle / "log").read_text(errors="backslashreplace")

    def wait(self) -> int:
        """Wait for the end of the container and return its exit code."""
        return self._process.wait(PATIENCE)

    def stop(self) -> int:
        """Stop the container with SIGTERM, as Kubernetes does. Returns the exit code."""
        self._runc("kill", self._id, signal.SIGTERM.name)
        return self.wait()

    def _runc(self, *arguments: str) -> None:
        command = ["runc", "--root", str(self._bundle / "state"), *arguments]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, f"{done.stderr}\n{self.log()}"

    def _spec(self) -> dict[str, Any]:
        user, group = map(int, self._image.config["User"].split(":"))
        return {
            "ociVersion": "1.0.2",
            "process": {
                "user": {"uid": user, "gid": group},
                "args": self._command,
                "env": [f"{name}={value}" for name, value in self._environment.items()],
                "cwd": "/",
                "capabilities": {},
                "noNewPrivileges": True,
            },
            "root": {"path": str(self._image.root), "readonly": True},
            "mounts": [
                {"destination": "/proc", "type": "proc", "source": "proc"},
                {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755"]},
                _writable("/dev/shm"),
                _writable("/tmp"),
                {"destination": "/etc/hosts", "type": "bind", "source": "/etc/hosts", "options": ["bind", "ro"]},
            ],
            "linux": {
                "cgroupsPath": f"/penstock-images/{os.getpid()}-{self._id}",
                "namespaces": [{"type": kind} for kind in ("pid", "mount", "ipc", "uts")],
                "maskedPaths": ["/proc/kcore"],
            },
        }


def _writable(path: str) -> dict[str, Any]:
    return {"destination": path, "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "nodev", "mode=1777"]}


def normalized(name: str) -> str:
    """Return the name in the form in which package indexes compare names."""
    return re.sub(r"[-_.]+", "-", name).lower()
