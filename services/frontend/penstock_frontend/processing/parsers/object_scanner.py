"""A JSON object followed to its end while it is being written."""

from penstock_frontend.processing.parsers.call_scanner import Scanned


class ObjectScanner:
    """Hands an object on as it stands, strings with brackets in them included. What begins with no bracket is none."""

    started = True

    def __init__(self) -> None:
        self._depth = 0
        self._quoted = False
        self._escaped = False

    def push(self, text: str) -> Scanned:
        """Take characters up to the object's end."""
        for index, char in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._quoted = char != '"'
                self._escaped = char == "\\"
            elif char == '"':
                self._quoted = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return Scanned(index + 1, arguments=text[: index + 1], ended=True)
        return Scanned(len(text), arguments=text)
