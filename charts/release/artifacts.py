"""Builds the files of a release: wheels, the package of the chart, the contracts, and their checksums.

``python -m charts.release.artifacts FOLDER`` builds the files of the repository's current version.
"""

import hashlib
import importlib.resources
import os
import shutil
import subprocess
import sys
from pathlib import Path

from charts import lint
from charts.release.versions import ReleaseError, current_version

DISTRIBUTIONS = (
    "protos",
    *(f"services/{name}" for name in ("client", "common", "frontend", "enginecore", "coordinator", "local")),
)
SUMS = "SHA256SUMS"


def build(root: Path, version: str, out: Path) -> list[Path]:
    """Build all files of a version into the folder ``out``, which is emptied, and return them.

    Raises ReleaseError with the output of a tool that fails.
    """
    shutil.rmtree(out, ignore_errors=True)
    (out / "wheels").mkdir(parents=True)
    (out / "chart").mkdir()
    (out / "contracts").mkdir()
    for distribution in DISTRIBUTIONS:
        _build_wheel(root / distribution, out / "wheels")
    try:
        lint.helm("package", str(root / "charts/penstock"), "--destination", str(out / "chart"))
    except lint.ChartError as e:
        raise ReleaseError(f"the chart cannot be packaged: {e}") from None
    write_contracts(root / "protos", out / "contracts" / f"v{version}.binpb")
    files = sorted(path for path in out.rglob("*") if path.is_file())
    _check_versions(files, version)
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(out)}\n" for path in files]
    (out / SUMS).write_text("".join(sums), encoding="utf-8")
    return [*files, out / SUMS]


def write_contracts(protos: Path, out: Path) -> None:
    """Compile the contracts to a descriptor set without comments. Raises ReleaseError if protoc refuses them."""
    files = sorted(str(path.relative_to(protos)) for path in (protos / "penstock").rglob("*.proto"))
    well_known = importlib.resources.files("grpc_tools") / "_proto"
    flags = [f"-I{protos}", f"-I{well_known}", "--include_imports", f"--descriptor_set_out={out}"]
    _run([sys.executable, "-m", "grpc_tools.protoc", *flags, *files], cwd=protos)


def _build_wheel(project: Path, out: Path) -> None:
    # A released engine has the kernels for CPUs: without a compiler the build fails.
    env = {"PENSTOCK_REQUIRE_KERNELS": "1", **os.environ}
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
    ]
    _run([*pip, "--wheel-dir", str(out), str(project)], cwd=project, env=env)


def _check_versions(files: list[Path], version: str) -> None:
    wrong = [path.name for path in files if version not in path.name]
    if wrong:
        raise ReleaseError(f"{', '.join(wrong)}: the name does not have version {version}")


def _run(command: list[str], cwd: Path, env: dict[str, str] | None = None) -> None:
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)  # noqa: S603 - our own words
    if done.returncode:
        raise ReleaseError(
            f"{' '.join(command[:4])} in {cwd.name} failed: {(done.stdout + done.stderr).strip()[-2000:]}"
        )


def main() -> int:
    """Build the files and print their names. Return the exit code."""
    root = Path(__file__).resolve().parents[2]
    try:
        files = build(root, current_version(root), Path(sys.argv[1]).resolve())
    except ReleaseError as e:
        sys.stderr.write(f"release files: {e}\n")
        return 1
    sys.stdout.writelines(f"{path}\n" for path in files)
    return 0


if __name__ == "__main__":
    sys.exit(main())
