"""Buildah, as root and without a daemon. Builds and tags images, and writes archives that containerd imports."""

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ENVIRONMENT = {"BUILDAH_ISOLATION": "chroot"}
"""Environment of builds. The builds use chroot, because a container runtime would need cgroups and a network."""
FROM_THE_MACHINE = ("/etc/pip.conf", "/etc/ssl/certs")
"""Files for access to a package index. Builds see these files, but images do not contain them."""


def why_not() -> str:
    """Return the reason why this machine cannot build images; empty if it can."""
    if os.geteuid() != 0:
        return "building images needs root"
    if shutil.which("buildah") is None:
        return "building images needs the package buildah"
    return ""


def run(*arguments: str, cwd: Path | None = None, quiet: bool = False) -> str:
    """Run ``buildah ARGUMENTS`` and return its output. Raises CalledProcessError on failure; errors are printed unless
    ``quiet``.
    """
    done = subprocess.run(
        ["buildah", *arguments],
        cwd=cwd,
        env=os.environ | ENVIRONMENT,
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL if quiet else None,
        text=True,
    )
    return done.stdout.strip()


def inspect(name: str) -> dict[str, Any] | None:
    """Return the data of an image: its id in ``FromImageID``, and its settings in ``OCIv1``. Returns None if the image
    does not exist.
    """
    try:
        found: dict[str, Any] = json.loads(run("inspect", "--type", "image", name, quiet=True))
    except subprocess.CalledProcessError:
        return None
    return found


def build(
    name: str,
    context: Path,
    *,
    file: Path,
    target: str = "",
    arguments: Mapping[str, str] | None = None,
    labels: Mapping[str, str] | None = None,
    contexts: Mapping[str, str] | None = None,
) -> None:
    """Build ``context`` into the image ``name``. Reuses unchanged layers of earlier builds.

    The machine's files for access to a package index are mounted, and ``PIP_INDEX_URL`` is passed to the build.

    Args:
        target: Stage to build. None means the last stage.
        contexts: Images that replace stages from which the build copies.
    """
    command = ["build", "--layers", "--file", str(file), "--tag", name]
    for path in FROM_THE_MACHINE:
        if Path(path).exists():
            command += ["--volume", f"{path}:{path}:ro"]
    given = dict(arguments or {})
    if index := os.environ.get("PIP_INDEX_URL"):
        given["PIP_INDEX_URL"] = index
    for key, value in given.items():
        command += ["--build-arg", f"{key}={value}"]
    for key, value in (labels or {}).items():
        command += ["--label", f"{key}={value}"]
    for stage, image in (contexts or {}).items():
        command += ["--build-context", f"{stage}=container-image://{image}"]
    if target:
        command += ["--target", target]
    subprocess.run(["buildah", *command, str(context)], env=os.environ | ENVIRONMENT, check=True)


def archive(name: str, file: Path) -> bool:
    """Write the image into ``file``, under its name. Returns False if the file already has this image."""
    found = inspect(name)
    if found is None:
        raise LookupError(f"there is no image {name}")
    stamp = file.with_suffix(".id")
    if file.exists() and stamp.exists() and stamp.read_text() == found["FromImageID"]:
        return False
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_suffix(".new")
    new.unlink(missing_ok=True)
    run("push", "--quiet", name, f"docker-archive:{new}:{name}")
    new.replace(file)
    stamp.write_text(found["FromImageID"])
    return True


def commit(parts: Sequence[Sequence[str]], name: str, labels: Mapping[str, str], *, start: str = "scratch") -> None:
    """Build an image without a Dockerfile.

    Args:
        parts: Commands of buildah. ``{}`` in a command is replaced by the container.
    """
    container = run("from", start)
    try:
        for part in parts:
            run(*(word.replace("{}", container) for word in part))
        for key, value in labels.items():
            run("config", "--label", f"{key}={value}", container)
        run("commit", "--quiet", container, name)
    finally:
        run("rm", container)
