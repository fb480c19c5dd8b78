"""A batch's input: read once to know its lines, and again to do them."""

import codecs
import hashlib
import itertools
from array import array
from collections.abc import Iterator

from penstock_common.errors import ConfigError, quoted
from penstock_local.batch.files import open_input
from penstock_local.batch.lines import custom_id_of

_DIGEST = 8


class InputFile:
    """8 bytes are kept of a line, a digest of its ``custom_id``: enough to know it again, and to know which are there twice.

    ``total``: its lines that are not blank. Raises ConfigError for a file that cannot be read, that has no lines, or two with the
    same ``custom_id``.
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
        self._check_names()

    def is_line(self, number: int, custom_id: str) -> bool:
        """Whether line ``number``, from 1 on, has this ``custom_id``."""
        return 1 <= number <= len(self._digests) and self._digests[number - 1] == _digest(custom_id)

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield each line that is not blank, behind its number."""
        yield from ((number, line) for number, line in enumerate(self._read(), start=1) if line.strip())

    def _check_names(self) -> None:
        several = {a for a, b in itertools.pairwise(sorted(self._digests)) if a == b} - {_digest("")}
        if not several:
            return
        first: dict[str, int] = {}
        for number, line in self.lines():
            if number > len(self._digests) or self._digests[number - 1] not in several:
                continue
            name = custom_id_of(line)
            if (earlier := first.setdefault(name, number)) != number:
                raise ConfigError(
                    f"{self.path}: line {number} has the custom_id {quoted(name)}, which line {earlier} has; answers are known "
                    "by it, so give each line its own"
                )

    def _read(self) -> Iterator[bytes]:
        """The lines, without a byte-order mark."""
        with open_input(self.path) as file:
            for number, line in enumerate(file):
                yield line if number else line.removeprefix(codecs.BOM_UTF8)


def _digest(custom_id: str) -> int:
    return int.from_bytes(
        hashlib.blake2b(custom_id.encode(errors="surrogatepass"), digest_size=_DIGEST).digest(), "little"
    )
