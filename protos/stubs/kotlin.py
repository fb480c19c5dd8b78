"""The package for Kotlin: coroutine stubs and builders, beside the package for Java that they stand on.

It is one of its own because programs in Java have no use for Kotlin's standard library and coroutines.
"""

import shutil
from pathlib import Path

import java
from source import Source

NEEDS = java.NEEDS
TEMPLATE = Path(__file__).parent / "kotlin"


def build(source: Source, out: Path) -> Path:
    """Write both packages into the repository ``out/kotlin``, and return that folder."""
    repository = out / "kotlin"
    shutil.rmtree(repository, ignore_errors=True)
    java.deploy(java.TEMPLATE, source, repository)
    java.deploy(TEMPLATE, source, repository)
    return repository
