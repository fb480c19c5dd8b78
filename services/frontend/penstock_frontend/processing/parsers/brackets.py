"""The brackets of JSON that is being written."""


class Brackets:
    """Follows one value from its first bracket to the one that ends it. Brackets in strings do not count."""

    def __init__(self) -> None:
        self._depth = 0
        self._quoted = False
        self._escaped = False

    def close(self, char: str) -> bool:
        """Take the next character. True for the one that ends the value, or for a closing bracket where none is open."""
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
            return self._depth <= 0
        return False
