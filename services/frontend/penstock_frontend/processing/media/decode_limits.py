"""How much of a medium is decoded, and what is wrong with one that is not."""

import msgspec


class DecodeLimits(msgspec.Struct, frozen=True):
    """What is decoded at most, as ``MediaConfig`` has it."""

    max_pixels: int
    max_frames: int
    max_audio_seconds: float


class TooLarge(Exception):  # noqa: N818 - it says what is wrong with the medium
    """``what``: the value; ``setting`` and ``limit``: what it is above of."""

    def __init__(self, what: str, setting: str, limit: float) -> None:
        super().__init__(what)
        self.what, self.setting, self.limit = what, setting, limit


class Unreadable(Exception):  # noqa: N818 - it says what is wrong with the medium
    """It is in no format that is taken, or broken. The text has nothing of it."""
