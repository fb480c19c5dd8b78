"""A JSON object followed to its end while it is being written."""

from penstock_frontend.processing.parsers.brackets import Brackets
from penstock_frontend.processing.parsers.call_scanner import Scanned


class ObjectScanner:
    """Hands an object on as it stands, strings with brackets in them included. What begins with no bracket is none."""

    started = True

    def __init__(self) -> None:
        self._brackets = Brackets()

    def push(self, text: str) -> Scanned:
        """Take characters up to the object's end."""
        for index, char in enumerate(text):
            if self._brackets.close(char):
                return Scanned(index + 1, arguments=text[: index + 1], ended=True)
        return Scanned(len(text), arguments=text)
