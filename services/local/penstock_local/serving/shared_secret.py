"""The secret by which the engines of one command recognize each other at their internal ports."""

import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SECRET_BYTES = 32


@contextmanager
def secret_file(wanted: bool) -> Iterator[str]:
    """Write a new secret into a file that only this user can read, and remove it at the end.

    Yields the file's path, or an empty string unless ``wanted``.
    """
    if not wanted:
        yield ""
        return
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        path = Path(folder) / "secret"
        path.touch(mode=0o600)
        path.write_text(secrets.token_hex(_SECRET_BYTES) + "\n", encoding="ascii")
        yield str(path)
