"""Package for Kotlin: coroutine stubs and builders, based on the package for Java.

Kotlin has a separate package, because Java programs do not need Kotlin's standard library and coroutines.
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
