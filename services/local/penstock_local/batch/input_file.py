"""A batch's input: read once to know its lines, and again to do them."""

import hashlib
import itertools
from array import array
from collections.abc import Iterator

from penstock_common.errors import ConfigError
from penstock_local.batch.files import open_input
from penstock_local.batch.lines import custom_id_of

_DIGEST = 8


class InputFile:
    """8 bytes are kept of a line, a digest of its ``custom_id``: enough to know it again, and to know which are there twice.

    ``total``: its lines that are not blank. Raises ConfigError for a file that cannot be read, or has none.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.total = 0
        self._digests = array("Q")
        for line in self._read():
            self.total += bool(line.strip())
            self._digests.append(_digest(custom_id_of(line)))
        if not self.total:
            raise ConfigError(f"{path} has no lines: there is nothing to do")
        self._several = {a for a, b in itertools.pairwise(sorted(self._digests)) if a == b} - {_digest("")}

    def is_line(self, number: int, custom_id: str) -> bool:
        """Whether line ``number``, from 1 on, has this ``custom_id``."""
        return 1 <= number <= len(self._digests) and self._digests[number - 1] == _digest(custom_id)

    def lines(self) -> Iterator[tuple[int, bytes, int]]:
        """Each line's number, the line, and the number of an earlier line with its ``custom_id``, or 0."""
        first: dict[str, int] = {}
        for number, line in enumerate(self._read(), start=1):
            if not line.strip():
                continue
            earlier = 0
            if number <= len(self._digests) and self._digests[number - 1] in self._several:
                earlier = first.setdefault(custom_id_of(line), number)
            yield number, line, 0 if earlier == number else earlier

    def _read(self) -> Iterator[bytes]:
        with open_input(self.path) as file:
            yield from file


def _digest(custom_id: str) -> int:
    return int.from_bytes(
        hashlib.blake2b(custom_id.encode(errors="surrogatepass"), digest_size=_DIGEST).digest(), "little"
    )
