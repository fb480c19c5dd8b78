"""Package for Go: the module ``penstock.io/protos``, in a folder laid out as a module proxy."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from source import PROTOS, Source

NEEDS = ("go",)
MODULE = "penstock.io/protos"
PLUGINS = {
    "protoc-gen-go": "google.golang.org/protobuf/cmd/protoc-gen-go@v1.36.11",
    "protoc-gen-go-grpc": "google.golang.org/grpc/cmd/protoc-gen-go-grpc@v1.6.2",
}
TEMPLATE = Path(__file__).parent / "go"
SAME_TIME = (1980, 1, 1, 0, 0, 0)
"""Modification time of every file in the zip, so that equal contracts give equal bytes."""


def build(source: Source, out: Path) -> Path:
    """Write the module into the proxy folder ``out/go``, for GOPROXY, and return that folder.

    Raises ValueError if the version is not valid for this module path, and CalledProcessError if protoc or a plugin
    fails.
    """
    if not re.fullmatch(r"[01]\.\d+\.\d+", source.version):
        raise ValueError(
            f"version is {source.version}; a version of {MODULE} must be MAJOR.MINOR.PATCH, with MAJOR 0 or 1"
        )
    proxy = out / "go"
    shutil.rmtree(proxy, ignore_errors=True)
    with tempfile.TemporaryDirectory() as temporary:
        module = Path(temporary)
        shutil.copytree(TEMPLATE, module, dirs_exist_ok=True)
        shutil.copy(PROTOS.parent / "LICENSE", module)
        shutil.copy(source.service_config, module)
        generate(source, plugins(out / "tools" / "go"), module)
        publish(module, f"v{source.version}", proxy / MODULE / "@v")
    return proxy


def plugins(folder: Path) -> Path:
    """Install protoc's plugins if needed, and return their folder. Its name has the pinned versions."""
    pinned = folder / "-".join(path.rpartition("@")[2] for path in PLUGINS.values())
    for name, path in PLUGINS.items():
        if not (pinned / name).exists():
            subprocess.run(["go", "install", path], env={**os.environ, "GOBIN": str(pinned.absolute())}, check=True)
    return pinned


def generate(source: Source, tools: Path, module: Path) -> None:
    """Generate the Go packages of all files into the module's folder."""
    command = [sys.executable, "-m", "grpc_tools.protoc", f"--descriptor_set_in={source.descriptors}"]
    for kind in ("go", "go-grpc"):
        command += [f"--plugin={tools}/protoc-gen-{kind}", f"--{kind}_out={module}", f"--{kind}_opt=module={MODULE}"]
    subprocess.run([*command, *source.files], check=True)


def publish(module: Path, version: str, versions: Path) -> None:
    """Write the files that a module proxy serves for one version: version list, info, go.mod and zip."""
    versions.mkdir(parents=True)
    (versions / "list").write_text(f"{version}\n")
    (versions / f"{version}.info").write_text(json.dumps({"Version": version}))
    shutil.copy(module / "go.mod", versions / f"{version}.mod")
    with zipfile.ZipFile(versions / f"{version}.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(path for path in module.rglob("*") if path.is_file()):
            entry = zipfile.ZipInfo(f"{MODULE}@{version}/{path.relative_to(module).as_posix()}", SAME_TIME)
            archive.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED)
