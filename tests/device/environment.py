"""Environment of a run. Unpacks a pack, and puts this project's folders first on the Python path."""

import os
import sys
import time
import tomllib
from pathlib import Path
from typing import NoReturn

from tests.device.packing import ROOT, unpack

WORK = ROOT / "build" / "gpu-run"
"""Folder for unpacked packs and compiled kernels, which later runs reuse."""


def run_prepared(pack: Path, *, installed: bool, interpreted: bool) -> NoReturn:
    """Run this program again with the packages of ``pack``, or those of this Python if ``installed``.

    Args:
        pack: Folder of the pack.
        installed: Whether to leave the path and Triton's cache unchanged.
        interpreted: Whether Triton interprets its kernels, for a CPU.
    """
    began = time.monotonic()
    variables = dict(os.environ)
    # Make torch check for devices without initializing CUDA, because this process forks others.
    variables["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    variables.setdefault("HF_HUB_OFFLINE", "1")
    variables.setdefault("TOKENIZERS_PARALLELISM", "false")
    variables.setdefault("GRPC_VERBOSITY", "ERROR")
    if interpreted:
        variables["TRITON_INTERPRET"] = "1"
    if not installed:
        site = WORK / "site"
        unpack(pack, site)
        describe_services(site)
        folders = [site, *sorted((ROOT / "services").iterdir()), ROOT]
        variables["PYTHONPATH"] = os.pathsep.join(map(str, folders))
        variables.setdefault("TRITON_CACHE_DIR", str(WORK / "triton"))
    command = [sys.executable, "-W", "ignore", str(ROOT / "tests/device/bare.py"), *sys.argv[1:]]
    os.execve(sys.executable, [*command, "--prepared", "--began", str(began)], variables)


def describe_services(site: Path) -> None:
    """Write the metadata of this project's services, which run from their folders, as an installation would."""
    for project in sorted((ROOT / "services").glob("*/pyproject.toml")):
        described = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
        name, version = described["name"], described["version"]
        folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir(parents=True, exist_ok=True)
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (folder / "METADATA").write_text(text, encoding="utf-8")
