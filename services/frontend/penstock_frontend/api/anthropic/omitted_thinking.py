"""Thinking that a client does not want to show: it travels in the signature of its block, and comes back with the history.

The text is encoded, not encrypted. Clients treat signatures as opaque and send them back unchanged.
"""

import base64

_PREFIX = "penstock.thinking."


def sealed(thinking: str) -> str:
    """Return the signature of a block whose thinking is omitted."""
    return _PREFIX + base64.b64encode(thinking.encode()).decode()


def opened(signature: str) -> str:
    """Return the thinking in a signature; empty if another server made the signature."""
    if not signature.startswith(_PREFIX):
        return ""
    try:
        return base64.b64decode(signature.removeprefix(_PREFIX), validate=True).decode()
    except ValueError:  # not ours, or cut off
        return ""
