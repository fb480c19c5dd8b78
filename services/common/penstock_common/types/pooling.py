"""Requests that produce vectors rather than tokens."""

import enum

import msgspec

from penstock_common.types.octets import Octets


class PoolingTask(enum.IntEnum):
    """What is computed from the hidden states. Values equal ``penstock.common.v1.PoolingTask``."""

    EMBED = 1
    CLASSIFY = 2
    SCORE = 3
    TOKEN_EMBED = 4
    TOKEN_CLASSIFY = 5


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Field for field ``penstock.common.v1.PoolingParams``. ``dimensions`` None keeps all, ``normalize`` None does as the
    model's config says.
    """

    task: PoolingTask
    dimensions: int | None = None
    normalize: bool | None = None
    use_activation: bool = True


class Vectors(msgspec.Struct, frozen=True):
    """Result of a pooling request: float32, row-major, little-endian. ``shape`` ``(n,)``, or ``(tokens, n)`` for token tasks."""

    shape: tuple[int, ...]
    data: Octets
