"""InternVL: images as tiles of a canvas and a thumbnail. Aya Vision tiles images the same way."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from penstock_common.types.media import EmbedRun, Modality, TensorData
from penstock_frontend.processing.media.families import base as arguments
from penstock_frontend.processing.media.families import tensors
from penstock_frontend.processing.media.families.base import FamilyProcessor, ProcessedItem, Replacement
from penstock_frontend.processing.media.families.checkpoint import Checkpoint
from penstock_frontend.processing.media.families.frames import frame_videos
from penstock_frontend.processing.media.families.llava import image_size
from penstock_frontend.processing.media.families.single_images import ImageAndVideoProcessor, ImageFamily, grown

# Images as the tiles of a canvas and a thumbnail (InternVL, Aya Vision): what the image processor of GOT-OCR2 makes of them.


class Canvas(NamedTuple):
    """``tile``: height and width of a tile in pixels, which is ``rows_of_tile`` rows; tiles of a canvas are from ``min_tiles`` to
    ``max_tiles``.
    """

    tile: tuple[int, int]
    rows_of_tile: int
    min_tiles: int
    max_tiles: int
    names: tuple[str, ...] = ("pixel_values", "num_patches")

    @property
    def max_pictures(self) -> int:
        """Tiles, and the thumbnail beside several."""
        return self.max_tiles + 1 if self.max_tiles > 1 else 1

    @property
    def max_rows(self) -> int:
        """Of an image with most tiles."""
        return self.max_pictures * self.rows_of_tile

    def item(self, data: Mapping[str, TensorData]) -> ProcessedItem:
        """Of ``pixel_values`` ``[tiles, 3, height, width]``; ``num_patches`` is not the model's. ``layout``: how many tiles."""
        pixels = tensors.taken(data, "pixel_values", (None, 3, *self.tile))
        count = pixels.shape[0]
        if "num_patches" in data and tensors.numbers(data, "num_patches", (1,)) != [count]:
            raise ValueError(f"num_patches is not {count}, the tiles of pixel_values")
        if count < 1:
            raise ValueError("pixel_values has no tiles")
        return ProcessedItem(
            modality="image", data={"pixel_values": pixels}, num_embeds=count * self.rows_of_tile, layout=(count,)
        )

    def arguments(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """``crop_to_patches``, ``min_patches`` and ``max_patches``, the latter two up to the checkpoint's own most."""
        arguments.check_names(kwargs, ("crop_to_patches", "min_patches", "max_patches"))
        crops = arguments.flag(kwargs, "crop_to_patches")
        most = arguments.whole_number(kwargs, "max_patches", most=self.max_tiles) or self.max_tiles
        least = arguments.whole_number(kwargs, "min_patches", most=most) or min(self.min_tiles, most)
        return {"crop_to_patches": True if crops is None else crops, "min_patches": least, "max_patches": most}


def canvas(checkpoint: Checkpoint, rows_of_tile: int) -> Canvas:
    """Of the image processor's configuration, with the defaults of its class. Raises ConfigError."""
    settings = checkpoint.image_processor
    return Canvas(
        image_size(checkpoint),
        rows_of_tile,
        checkpoint.number("min_patches", settings, default=1),
        checkpoint.number("max_patches", settings, default=12),
    )


class InternVL(ImageFamily):
    """A begin, one token for each row, an end; a line of these for each frame."""

    modalities: frozenset[Modality] = frozenset({"image", "video"})

    def __init__(self, checkpoint: Checkpoint) -> None:
        rows = checkpoint.number("image_seq_length", checkpoint.processor, checkpoint.config, default=256)
        self._canvas = canvas(checkpoint, rows)
        self._videos = frame_videos(checkpoint, self._canvas.tile, rows)
        self._begin = checkpoint.token("start_image_token", "<img>")
        self._end = checkpoint.token("end_image_token", "</img>")
        self._token = checkpoint.token("context_image_token", "<IMG_CONTEXT>")
        self._video = checkpoint.token("video_token", "<video>")
        tokens = (self._begin, self._end, self._video)
        super().__init__(checkpoint, self._token, self._canvas, media_tokens=tokens, least_embeds=1)
        self._begin_id, self._end_id = checkpoint.token_id(self._begin), checkpoint.token_id(self._end)
        checkpoint.token_id(self._video)
        self._encode = checkpoint.encode

    def placeholder(self, modality: Modality) -> str:
        """Of images the token of a row."""
        return self._video if modality == "video" else super().placeholder(modality)

    def replacements(self, items: Sequence[ProcessedItem]) -> list[Replacement]:
        """As many image tokens as rows."""
        return [self._of_frames(*item.layout) if item.modality == "video" else self._of_image(item) for item in items]

    def _of_image(self, item: ProcessedItem) -> Replacement:
        token_ids = [self._begin_id, *[self.token_id] * item.num_embeds, self._end_id]
        return Replacement(token_ids, (EmbedRun(1, item.num_embeds),))

    def _of_frames(self, count: int) -> Replacement:
        frame = f"{self._begin}{self._token}{self._end}"
        text = f"{frame}" + "".join(f"\nFrame{index}: {frame}" for index in range(2, count + 1))
        return grown(self._encode(text), self.token_id, self._videos.rows_of_frame, before="Frame1: ")

    def described(self, modality: Modality, data: Mapping[str, TensorData]) -> ProcessedItem:
        """Of the tensors that the processors give."""
        return self._videos.item(data) if modality == "video" else super().described(modality, data)

    def max_tokens(self, modality: Modality) -> int:
        """Of an image with most tiles, or a video with most frames."""
        if modality == "image":
            return super().max_tokens(modality)
        largest = self._of_frames(self._videos.max_frames).embed_runs
        return largest[-1].start + largest[-1].count - largest[0].start

    def make_processor(self) -> Callable[[], FamilyProcessor]:
        """An ``ImageAndVideoProcessor``."""
        return partial(ImageAndVideoProcessor, self._folder, self._canvas, self._videos)
