import struct

import numpy as np
import pytest

from penstock_frontend.processing.media.decode import decode_sound, with_size
from penstock_frontend.processing.media.worker_messages import Unreadable
from tests.unit.frontend.processing.media.test_decode import LIMITS

RATE = 16_000
SAMPLES = (np.sin(np.arange(1600) / 10) * 10_000).astype("<i2")
LIST = b"LIST" + struct.pack("<I", 4) + b"INFO"


def wav(riff: int | None, size: int | None, *, before: bytes = b"", sound: bytes = SAMPLES.tobytes()) -> bytes:
    """Return a WAV file of mono samples. ``riff`` and ``size`` are the header's sizes; None means the true ones."""
    form = b"fmt " + struct.pack("<IHHIIHH", 16, 1, 1, RATE, 2 * RATE, 2, 16)
    body = b"WAVE" + form + before + b"data" + struct.pack("<I", len(sound) if size is None else size) + sound
    return b"RIFF" + struct.pack("<I", len(body) if riff is None else riff) + body


@pytest.mark.parametrize("riff", [0, 36, 0xFFFF_FFFF, None])
@pytest.mark.parametrize("size", [0, 0xFFFF_FFFF])
@pytest.mark.parametrize("before", [b"", LIST])
def test_a_stream_is_read_to_its_end(riff: int | None, size: int, before: bytes) -> None:
    file = wav(riff, size, before=before)
    assert with_size(file) == wav(None, None, before=before)
    assert np.array_equal(decode_sound(file, RATE, LIMITS), SAMPLES / np.float32(32_768))


@pytest.mark.parametrize(
    "file",
    [wav(None, None), wav(None, 0, sound=b""), wav(None, 0, sound=LIST), wav(None, None)[:40], b"RIFF\0\0\0\0WAVE"],
)
def test_other_files_stay_as_they_are(file: bytes) -> None:
    assert with_size(file) is file


@pytest.mark.parametrize("sound", [b"", LIST])
def test_a_file_without_samples_is_refused(sound: bytes) -> None:
    with pytest.raises(Unreadable, match="has no samples"):
        decode_sound(wav(None, 0, sound=sound), RATE, LIMITS)
