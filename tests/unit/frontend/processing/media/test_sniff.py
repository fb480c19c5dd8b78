import pytest

from penstock_frontend.processing.media.sniff import image_format, is_of, sound_format
from tests.fakes.media_files import image_file, sound_file


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF"])
def test_a_picture_is_known_by_its_first_bytes(kind: str) -> None:
    data = image_file(kind)
    assert image_format(data) == kind
    assert sound_format(data) is None
    assert is_of("image", data)
    assert is_of("video", data)
    assert not is_of("audio", data)


@pytest.mark.parametrize("kind", ["WAV", "FLAC", "OGG", "MP3"])
def test_a_sound_is_known_by_its_first_bytes(kind: str) -> None:
    data = sound_file(kind)
    assert sound_format(data) == kind
    assert image_format(data) is None
    assert is_of("audio", data)


def test_an_mp3_file_may_begin_with_its_tags() -> None:
    assert sound_format(b"ID3\x04\x00\x00") == "MP3"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"\xff\xd8",
        b"RIFF\0\0\0\0AVI ",
        b"RIFF",
        b"II*\0",
        b"MM\0*",
        b"BM\0\0\0\0",
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"%PDF-1.7",
        b"\0\0\0\x1cftypavif",
        b"\0\0\0\x18ftypheic",
        b"\0\0\x01\0\x01\0",
        b"\x1aE\xdf\xa3",
        b"%!PS-Adobe",
        b"\0\0\0\x0cjP  ",
        b"\xff\xff\xff\xff",
        b"\xff\xe0\x00\x00",
        b"\xff\xfb\xf0\x00",
        b"\xff\xfb\x9c\x00",
        b" \xff\xd8\xff",
        b"GIF88a",
    ],
)
def test_other_formats_are_not_known(data: bytes) -> None:
    assert image_format(data) is None
    assert sound_format(data) is None
