"""Small media files."""

import struct
import zlib
from io import BytesIO

import numpy as np
import soundfile
from PIL import Image


def image_file(
    kind: str = "PNG", size: tuple[int, int] = (8, 6), seed: int = 0, mode: str = "RGB", **options: object
) -> bytes:
    """Return an image file with random pixels."""
    channels = {"RGB": 3, "RGBA": 4, "L": 1, "CMYK": 4}[mode]
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], channels), np.uint8)
    return saved(Image.fromarray(pixels[..., 0] if channels == 1 else pixels, mode), kind, **options)


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    """Return an image as the content of a file."""
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def sound_file(
    kind: str = "WAV", seconds: float = 0.1, rate: int = 16_000, channels: int = 1, subtype: str | None = None
) -> bytes:
    """Return a sound file with a tone of 440 Hz, the same in all channels."""
    time = np.arange(int(seconds * rate)) / rate
    tone = (0.5 * np.sin(2 * np.pi * 440 * time)).astype(np.float32)
    file = BytesIO()
    soundfile.write(file, np.repeat(tone[:, None], channels, axis=1), rate, format=kind, subtype=subtype)
    return file.getvalue()


_CONTAINERS = {"MP4": ("mp4", "aac"), "ALAC": ("mp4", "alac"), "WEBM": ("webm", "libopus"), "AAC": ("adts", "aac")}


def container_file(kind: str = "MP4", seconds: float = 0.1, rate: int = 48_000, channels: int = 1) -> bytes:
    """Return a file that PyAV encodes, with a tone of 440 Hz, the same in all channels."""
    import av

    file = BytesIO()
    form, codec = _CONTAINERS[kind]
    layout = {1: "mono", 2: "stereo"}[channels]
    tone = 0.5 * np.sin(2 * np.pi * 440 * np.arange(int(seconds * rate)) / rate)
    with av.open(file, "w", format=form) as container:
        stream = container.add_stream(codec, rate=rate, layout=layout)
        frame = av.AudioFrame.from_ndarray(np.tile(tone.astype(np.float32), (channels, 1)), "fltp", layout)
        frame.sample_rate, frame.pts = rate, 0
        resampler = av.AudioResampler(stream.format, layout, rate, stream.frame_size)
        for piece in (*resampler.resample(frame), *resampler.resample(None), None):
            container.mux(stream.encode(piece))
    return file.getvalue()


def silent_film(kind: str = "mp4") -> bytes:
    """Return a video file without sound."""
    import av

    file = BytesIO()
    with av.open(file, "w", format=kind) as container:
        stream = container.add_stream("mpeg4" if kind == "mp4" else "libvpx", rate=25)
        stream.width = stream.height = 32
        stream.pix_fmt = "yuv420p"
        frame = av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8))
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return file.getvalue()


def png_bomb(width: int, height: int) -> bytes:
    """Return a PNG file of this many black pixels. The file has a thousandth of the size of the pixels."""
    squeezed = zlib.compressobj(9)
    row = b"\0" * (1 + width * 3)
    data = b"".join(squeezed.compress(row) for _ in range(height)) + squeezed.flush()
    return png(width, height, data)


def png(
    width: int, height: int, data: bytes, *, depth: int = 8, colour_type: int = 2, transparent: tuple[int, ...] = ()
) -> bytes:
    """Return a PNG file whose header has this size, regardless of its data. ``transparent`` is the color of transparent
    samples.
    """
    head = struct.pack(">IIBBBBB", width, height, depth, colour_type, 0, 0, 0)
    colour = _chunk(b"tRNS", struct.pack(f">{len(transparent)}H", *transparent)) if transparent else b""
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", head) + colour + _chunk(b"IDAT", data) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
