"""How much there is to decode in a JSON text, found out before it is decoded.

The decoder holds the interpreter's lock from end to end, in whatever thread it runs: nothing but a bound on what it makes
bounds the time in which nobody else is served.
"""

import asyncio
from itertools import accumulate

from penstock_common.errors import InvalidArgument

_PIECE = 256 * 1024
"""Bytes that are looked at in one turn of the event loop."""
MAX_NESTING = 512
"""Levels of lists and objects. Whatever walks a value later has as much of the interpreter's stack left for itself."""
_STEP = [{"[": 1, "{": 1, "]": -1, "}": -1}.get(chr(byte), 0) for byte in range(256)]
_NO_BRACKETS = bytes(byte for byte in range(256) if not _STEP[byte])


async def check_json_size(text: bytes, *, max_values: int, max_objects: int) -> None:
    """Raise InvalidArgument for more values, or objects among them, than so many, or more than MAX_NESTING levels of them.

    Text that is no JSON is counted somehow.
    """
    if not _may_exceed(text, max_values, max_objects):
        return
    size = JsonSize()
    for begin in range(0, len(text), _PIECE):
        size.add(text[begin : begin + _PIECE])
        for count, what, limit in ((size.values, "values", max_values), (size.objects, "objects", max_objects)):
            if count > limit:
                raise InvalidArgument(
                    f"the body has more than {limit} JSON {what}; http.max_body_{what} is {limit}",
                    reason="BODY_TOO_COMPLEX",
                )
        if size.nesting > MAX_NESTING:
            raise InvalidArgument(
                f"the body's lists and objects nest more than {MAX_NESTING} deep", reason="BODY_TOO_COMPLEX"
            )
        await asyncio.sleep(0)


class JsonSize:
    """Counts the values and objects of a text that comes in pieces: what it has of commas and brackets outside strings.

    A value that is the only one of its object or list counts with that. ``nesting``: levels of both at the deepest place.
    """

    def __init__(self) -> None:
        self.values = 0
        self.objects = 0
        self.nesting = 0
        self._level = 0
        self._in_string = False
        self._rest = b""

    def add(self, piece: bytes) -> None:
        """Count a further piece."""
        text = self._rest + piece
        num_backslashes = len(text) - len(text.rstrip(b"\\"))
        self._rest = b"\\" if num_backslashes % 2 else b""
        text = text[: len(text) - len(self._rest)]
        parts = text.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[self._in_string :: 2])
        self._in_string ^= len(parts) % 2 == 0
        objects = outside.count(b"{")
        self.objects += objects
        self.values += outside.count(b",") + outside.count(b"[") + objects
        levels = [*accumulate(map(_STEP.__getitem__, outside.translate(None, _NO_BRACKETS)), initial=self._level)]
        self.nesting = max(self.nesting, max(levels))
        self._level = levels[-1]


def _may_exceed(text: bytes, max_values: int, max_objects: int) -> bool:
    """Whether there are too many commas and brackets even if none is in a string."""
    if len(text) <= min(max_values, max_objects, MAX_NESTING):
        return False
    objects, lists = text.count(b"{"), text.count(b"[")
    return objects > max_objects or objects + lists > MAX_NESTING or objects + lists + text.count(b",") > max_values
