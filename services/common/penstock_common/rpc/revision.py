"""Revisions of the contract between a frontend and an engine. Both ends speak the lower of their two."""

OLDEST_REVISION = 1
"""Every output is a message, and so is every frame."""
COLUMNS_SINCE = 2
"""New tokens come in columns, under the numbers of their requests, and several frames may come in one message."""
ANNOUNCED_SINCE = 3
"""The first chunk of a tensor says how many bytes the tensor has."""
PROTOCOL_REVISION = 3
"""The newest."""
