"""Base image of the project's images in the test cluster: Debian with Debian's Python. The cluster cannot reach a
registry.

The image replaces ``python:3.11-slim-bookworm``. It has the same Debian release and the same minor version of Python,
and its Python is also called ``python``. ``DEBIAN_MIRROR`` replaces mmdebstrap's default mirror.
"""

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from tests.cluster.images import buildah

NAME = "localhost/penstock-base:3.11-bookworm"
SUITE = "bookworm"
PACKAGES = ("ca-certificates", "python3-venv")
RECIPE = "penstock.test/recipe"
APT_SETTINGS = (
    "Acquire::Check-Date",
    "Acquire::Check-Valid-Until",
    "Acquire::Retries",
    "Acquire::http::Proxy",
    "Acquire::https::Proxy",
)
"""Configuration of this machine's apt that is copied into the image's apt."""


def why_not() -> str:
    """Return the reason why this machine cannot build the base image; empty if it can."""
    return buildah.why_not() or ("" if shutil.which("mmdebstrap") else "the base image needs the package mmdebstrap")


def build() -> str:
    """Build the image unless it exists. Returns its name."""
    command = _command()
    recipe = hashlib.sha256(repr(command).encode()).hexdigest()
    found = buildah.inspect(NAME)
    if found and found["OCIv1"]["config"].get("Labels", {}).get(RECIPE) == recipe:
        return NAME
    with tempfile.TemporaryDirectory(prefix="penstock-base-") as directory:
        archive = Path(directory) / "base.tar"
        subprocess.run([*command, str(archive), *_mirror()], check=True)
        parts = [
            ("add", "--quiet", "{}", str(archive), "/"),
            ("run", "{}", "ln", "-s", "/usr/bin/python3", "/usr/local/bin/python"),
            ("config", "--cmd", "python", "{}"),
        ]
        buildah.commit(parts, NAME, {RECIPE: recipe})
    return NAME


def _command() -> list[str]:
    settings = [f'{key} "{value}";' for key in APT_SETTINGS if (value := _apt_setting(key))]
    return [
        "mmdebstrap",
        "--mode=root",
        "--variant=minbase",
        f"--include={','.join(PACKAGES)}",
        "--dpkgopt=force-unsafe-io",
        *(f"--aptopt={setting}" for setting in settings),
        SUITE,
    ]


def _mirror() -> list[str]:
    mirror = os.environ.get("DEBIAN_MIRROR", "")
    return [mirror] if mirror else []


def _apt_setting(key: str) -> str:
    """Return the machine's apt setting ``key``; empty if it is not set."""
    said = subprocess.run(["apt-config", "shell", "VALUE", key], check=True, capture_output=True, text=True).stdout
    return said.strip().removeprefix("VALUE=").strip("'")
