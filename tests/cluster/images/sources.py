"""Source files of the images: the working tree, or the tree of a commit."""

import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from charts import image_tag

ROOT = Path(__file__).resolve().parents[3]
ENGINE = "services/enginecore/penstock_enginecore"
ORACLE = ("tests/fakes/engines/fake_executor.py", "tests/fakes/engines/oracle_service")
"""Files of the oracle engine outside the engine's code."""
_FIRST_ORACLE = "354825eeb79fc9af1a43066cc448d8a31b830508"
"""First commit with the oracle engine. Earlier releases get the files of this commit."""
DEMO_MODEL = "examples/demo_model/penstock-tiny"


def chart_version() -> str:
    """Return the chart's appVersion, which is the tag of its images."""
    return image_tag.chart_version(ROOT)


def revision(commit: str = "HEAD") -> str:
    """Return the full id of a commit. Raises CalledProcessError if it does not exist."""
    return _git("rev-parse", "--verify", f"{commit}^{{commit}}").strip()


@contextmanager
def tree(commit: str) -> Iterator[Path]:
    """Return a directory with the files of a commit, or the working tree if ``commit`` is empty."""
    if not commit:
        yield ROOT
        return
    with tempfile.TemporaryDirectory(prefix="penstock-sources-") as directory:
        archive = Path(directory) / "tree.tar"
        _git("archive", f"--output={archive}", commit)
        with tarfile.open(archive) as files:
            files.extractall(Path(directory) / "tree", filter="data")
        yield Path(directory) / "tree"


@contextmanager
def oracle_context(sources: Path) -> Iterator[Path]:
    """Return a directory for building the oracle engine: the engine of ``sources``, and a matching fake executor."""
    with tempfile.TemporaryDirectory(prefix="penstock-oracle-") as directory, _with_oracle(sources) as oracle:
        context = Path(directory)
        _copy(sources / ENGINE, context / "code" / "penstock_enginecore")
        for path in ORACLE:
            _copy(oracle / path, context / "code" / path)
        _copy(sources / DEMO_MODEL, context / "demo-model")
        _copy(sources / "constraints.txt", context / "constraints.txt")
        yield context


@contextmanager
def _with_oracle(sources: Path) -> Iterator[Path]:
    if all((sources / path).exists() for path in ORACLE):
        yield sources
    else:
        with tree(_FIRST_ORACLE) as first:
            yield first


def _copy(source: Path, target: Path) -> None:
    """Copy the tree with file times, which identify layers. Leaves out generated files of interpreter and compiler."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "kernels_*.so"))
    else:
        shutil.copy2(source, target)


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
