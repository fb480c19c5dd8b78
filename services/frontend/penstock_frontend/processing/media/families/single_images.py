"""Base of the families that take images and videos, and the prompt texts of items with several pieces."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from PIL.Image import Image

from penstock_common.types.media import EMBEDS, EmbedRun, Modality, TensorData
from penstock_frontend.processing.media.families import tensors
from penstock_frontend.processing.media.families.base import FamilyProcessor, ProcessedItem, Replacement
from penstock_frontend.processing.media.families.checkpoint import Checkpoint
from penstock_frontend.processing.media.families.tensors import MediaProcessor, PilImages

# What stands in a prompt for an item of several pieces, with texts between.


def grown(token_ids: Sequence[int], token_id: int, count: int, *, before: str = "", after: str = "") -> Replacement:
    """The token ids with ``count`` of ``token_id`` in place of each one, all of which are replaced by rows."""
    grown_ids: list[int] = []
    runs: list[EmbedRun] = []
    for each in token_ids:
        if each == token_id:
            runs.append(EmbedRun(len(grown_ids), count))
            grown_ids += [token_id] * count
        else:
            grown_ids.append(each)
    return Replacement(grown_ids, tuple(runs), before=before, after=after)


class Images(Protocol):
    """What a family knows of images in both halves; it can be pickled."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of the tensors."""

    @property
    def max_rows(self) -> int:
        """Of the largest image."""

    def item(self, data: Mapping[str, TensorData]) -> ProcessedItem:
        """Of a processed image. Raises ValueError for tensors that the processor would not give."""

    def arguments(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """What the image processor is called with: what a request says, and what the checkpoint says. Raises ValueError."""


class Videos(Protocol):
    """What a family knows of videos in both halves; it can be pickled."""

    @property
    def max_rows(self) -> int:
        """Of the largest video."""

    def video(self, frames: Sequence[Image], timestamps: Sequence[float], kwargs: Mapping[str, Any]) -> ProcessedItem:
        """Of frames of one size, and when they are seen. Raises ValueError."""

    def item(self, data: Mapping[str, TensorData]) -> ProcessedItem:
        """Of a processed video. Raises ValueError for tensors that the processor would not give."""


class ImageProcessor(MediaProcessor):
    """The image processor of transformers, and what the family says of what it gives. ``videos``: None where it takes none."""

    def __init__(self, folder: Path, images: Images, videos: Videos | None) -> None:
        self.processor = PilImages(folder)
        self._images = images
        self._videos = videos

    def image(self, image: Image, kwargs: Mapping[str, Any]) -> ProcessedItem:
        """One image, with the arguments that the family takes."""
        return checked(self._images, self.processor([image], **self._images.arguments(kwargs)))

    def video(self, frames: Sequence[Image], timestamps: Sequence[float], kwargs: Mapping[str, Any]) -> ProcessedItem:
        """One video, with the arguments that the family takes."""
        if self._videos is None:
            return super().video(frames, timestamps, kwargs)
        return self._videos.video(frames, timestamps, kwargs)


class ImageFamily:
    """One token for each row, unless a family says more. ``token`` and ``video_token``: the placeholders; ``videos``: of a family
    that takes some.
    """

    sampling_rate = 0
    processor: type[ImageProcessor] = ImageProcessor

    def __init__(
        self,
        checkpoint: Checkpoint,
        token: str,
        images: Images,
        *,
        media_tokens: tuple[str, ...] = (),
        least_embeds: int = 0,
        videos: Videos | None = None,
        video_token: str = "",
    ) -> None:
        """``media_tokens``: beside the placeholders. ``least_embeds``: embeddings that may take the place of an image at least; 0
        where they may not, because they do not say what the image looks like in a prompt.
        """
        self.modalities: frozenset[Modality] = frozenset({"image"} if videos is None else {"image", "video"})
        self.identity = checkpoint.identity
        self._tokens: dict[Modality, str] = (
            {"image": token} if videos is None else {"image": token, "video": video_token}
        )
        self.media_tokens = tuple(dict.fromkeys((token, *media_tokens, *self._tokens.values())))
        self._token_ids = {modality: checkpoint.token_id(each) for modality, each in self._tokens.items()}
        self.token_id = self._token_ids["image"]
        self.encode = checkpoint.encode
        self._folder = checkpoint.folder
        self._images = images
        self._videos = videos
        self._least_embeds = least_embeds

    def placeholder(self, modality: Modality) -> str:
        """The token of a row, or of all; that of images for what the family does not take."""
        return self._tokens.get(modality, self._tokens["image"])

    def replacements(self, items: Sequence[ProcessedItem]) -> list[Replacement]:
        """Each by itself."""
        return [self.replacement(item) for item in items]

    def replacement(self, item: ProcessedItem) -> Replacement:
        """Tokens, each of them a row."""
        return Replacement([self._token_ids[item.modality]] * item.num_embeds)

    def described(self, modality: Modality, data: Mapping[str, TensorData]) -> ProcessedItem:
        """Of the tensors that the processors give, or of embeddings where these say all that a prompt needs."""
        if modality == "video" and self._videos is not None:
            return self._videos.item(data)
        if EMBEDS in data:
            return self._embedded(data)
        tensors.check_names(data, self._images.names)
        return checked(self._images, data)

    def _embedded(self, data: Mapping[str, TensorData]) -> ProcessedItem:
        if not self._least_embeds:
            raise ValueError(f"{EMBEDS} does not say how the image is laid out in a prompt of this model")
        rows = tensors.num_embeds(data, least=self._least_embeds, most=self._images.max_rows)
        return ProcessedItem(modality="image", data=dict(data), num_embeds=rows)

    def max_tokens(self, modality: Modality) -> int:
        """Of the largest item, as many as it has rows. What begins and ends it are tokens as any other."""
        if modality == "video" and self._videos is not None:
            return self._videos.max_rows
        return self._images.max_rows

    def make_processor(self) -> Callable[[], FamilyProcessor]:
        """An ``ImageProcessor``."""
        return partial(self.processor, self._folder, self._images, self._videos)


def checked(images: Images, data: Mapping[str, TensorData]) -> ProcessedItem:
    """The item of ``data``. Raises ValueError for one that is larger than any that the model is prepared for."""
    item = images.item(data)
    if item.num_embeds > images.max_rows:
        raise ValueError(
            f"it comes to {item.num_embeds} embeddings; an image has at most {images.max_rows} in this model"
        )
    return item
