"""Calls as a JSON list: ``[{"name": ..., "arguments": ...}, ...]``."""

from penstock_frontend.processing.parsers.call_reader import CallReader, State


class CallListReader(CallReader):
    """Reads the list behind a mark. A list that ends early, or that nothing closes, has the calls that it has."""

    def _list(self) -> State | None:
        """Before the bracket that opens the list."""
        self._drop_blanks()
        if not self._text:
            return self._wait()
        if self._text[0] != "[":
            return self._broken()
        self._drop(1)
        return self._item

    def _item(self) -> State | None:
        """Before a call."""
        self._drop_blanks()
        if not self._text:
            return self._wait()
        return self._call_object() if self._text[0] == "{" else self._broken()

    def _after_scan(self) -> State | None:
        """Behind a call of the list: a comma and the next one, or the list's end."""
        self._drop_blanks()
        if not self._text:
            return self._behind if self._ended else None
        if self._text[0] == ",":
            self._drop(1)
            return self._item
        if self._text[0] == "]":
            self._drop(1)
        return self._behind
