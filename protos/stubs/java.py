"""Package for Java: a jar with messages, stubs and the service config, in a folder laid out as a Maven repository."""

import shutil
import subprocess
import tempfile
from pathlib import Path

from source import Source

NEEDS = ("mvn", "javac")
TEMPLATE = Path(__file__).parent / "java"


def build(source: Source, out: Path) -> Path:
    """Write ``io.penstock:penstock-protos`` into the repository ``out/java``, and return that folder."""
    repository = out / "java"
    shutil.rmtree(repository, ignore_errors=True)
    deploy(TEMPLATE, source, repository)
    return repository


def deploy(template: Path, source: Source, repository: Path) -> None:
    """Build the Maven project ``template`` from ``source`` and deploy the artifacts to ``repository``.

    Raises RuntimeError with Maven's output if Maven fails.
    """
    with tempfile.TemporaryDirectory() as temporary:
        project = Path(temporary)
        shutil.copytree(template, project, dirs_exist_ok=True)
        shutil.copy(source.descriptors, project / "descriptors.binpb")
        resources = project / "src/main/resources/io/penstock"
        resources.mkdir(parents=True)
        shutil.copy(source.service_config, resources / "service_config.json")
        flags = [
            f"-Drevision={source.version}",
            f"-Dprotobuf.compiler.includes={','.join(source.files)}",
            f"-DaltDeploymentRepository=penstock::{repository.absolute().as_uri()}",
        ]
        command = ["mvn", "--batch-mode", "--quiet", "--no-transfer-progress", "deploy", *flags]
        run = subprocess.run(command, cwd=project, capture_output=True, text=True)
        if run.returncode:
            raise RuntimeError(f"mvn failed with exit status {run.returncode}:\n{run.stdout}{run.stderr}")
