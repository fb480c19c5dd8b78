"""Package for Python: the wheel ``penstock-protos``."""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from source import PROTOS, Source

NEEDS = ("python3",)


def build(source: Source, out: Path) -> Path:
    """Build ``out/python/penstock_protos-VERSION-py3-none-any.whl`` and return its path."""
    folder = out / "python"
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        project = Path(directory)
        shutil.copy(PROTOS / "hatch_build.py", project)
        shutil.copy(source.service_config, project / "service_config.json")
        shutil.copy(source.descriptors, project / "descriptors.binpb")
        metadata = (PROTOS / "pyproject.toml").read_text()
        (project / "pyproject.toml").write_text(
            re.sub(r'^version = ".*"$', f'version = "{source.version}"', metadata, flags=re.MULTILINE)
        )
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "-q", "--no-deps"]
        subprocess.run([*command, "--no-build-isolation", "-w", str(folder), directory], check=True)
    return next(folder.glob(f"penstock_protos-{source.version}-*.whl"))
