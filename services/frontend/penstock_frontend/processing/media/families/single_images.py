"""Base classes of families with images and videos, and replacements for media items that consist of several pieces."""

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

# The function below makes the replacement for a media item that has several pieces with text between them.


def grown(token_ids: Sequence[int], token_id: int, count: int, *, before: str = "", after: str = "") -> Replacement:
    """Return a replacement in which each ``token_id`` is repeated ``count`` times.

    The model uses embeddings instead of all these tokens.
    """
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
    """Image format of a family of model types. Both the frontend and the media workers use the format, so it can be
    pickled.
    """

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the input tensors for an image."""

    @property
    def max_rows(self) -> int:
        """Maximum number of embeddings of an image."""

    def item(self, data: Mapping[str, TensorData]) -> ProcessedItem:
        """Return the media item for the tensors of a processed image.

        Raises ValueError for tensors that the processor would not produce.
        """

    def arguments(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments for the image processor, from the arguments of a request and the values of the
        checkpoint.

        Raises ValueError if an argument is not valid.
        """


class Videos(Protocol):
    """Video format of a family of model types. Both the frontend and the media workers use the format, so it can be
    pickled.
    """

    @property
    def max_rows(self) -> int:
        """Maximum number of embeddings of a video."""

    def video(self, frames: Sequence[Image], timestamps: Sequence[float], kwargs: Mapping[str, Any]) -> ProcessedItem:
        """Process the frames of a video, which have one size, with their times. Raises ValueError if an argument is not
        valid.
        """

    def item(self, data: Mapping[str, TensorData]) -> ProcessedItem:
        """Return the media item for the tensors of a processed video.

        Raises ValueError for tensors that the processor would not produce.
        """


class ImageProcessor(MediaProcessor):
    """Processor that calls the image processor of transformers. ``videos`` is None if the family accepts no videos."""

    def __init__(self, folder: Path, images: Images, videos: Videos | None) -> None:
        self.processor = PilImages(folder)
        self._images = images
        self._videos = videos

    def image(self, image: Image, kwargs: Mapping[str, Any]) -> ProcessedItem:
        """Process one image, with the arguments that the family accepts."""
        return checked(self._images, self.processor([image], **self._images.arguments(kwargs)))

    def video(self, frames: Sequence[Image], timestamps: Sequence[float], kwargs: Mapping[str, Any]) -> ProcessedItem:
        """Process one video, with the arguments that the family accepts."""
        if self._videos is None:
            return super().video(frames, timestamps, kwargs)
        return self._videos.video(frames, timestamps, kwargs)


class ImageFamily:
    """Base class of families with images. By default, a prompt has one token for each embedding.

    ``token`` and ``video_token`` are the placeholders. ``videos`` is None if the family accepts no videos.
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
        """Create the family for one checkpoint.

        ``media_tokens`` are the tokens for media other than the placeholders. ``least_embeds`` is the minimum number of
        embeddings that a client may send instead of an image. 0 means that clients may not send embeddings, because
        embeddings do not define the image's layout in a prompt.
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
        """Return the placeholder token for this modality.

        If the family does not support the modality, return the image token.
        """
        return self._tokens.get(modality, self._tokens["image"])

    def replacements(self, items: Sequence[ProcessedItem]) -> list[Replacement]:
        """Return the replacement of each media item in the prompt."""
        return [self.replacement(item) for item in items]

    def replacement(self, item: ProcessedItem) -> Replacement:
        """Return the replacement of a media item, with one token for each embedding."""
        return Replacement([self._token_ids[item.modality]] * item.num_embeds)

    def described(self, modality: Modality, data: Mapping[str, TensorData]) -> ProcessedItem:
        """Return the media item for tensors of a processor, or for embeddings.

        Embeddings are accepted only if the prompt needs no other data.
        """
        if modality == "video" and self._videos is not None:
            return self._videos.item(data)
        if EMBEDS in data:
            return self._embedded(data)
        tensors.check_names(data, self._images.names)
        return checked(self._images, data)

    def _embedded(self, data: Mapping[str, TensorData]) -> ProcessedItem:
        if not self._least_embeds:
            raise ValueError(f"{EMBEDS} does not define the image's layout, which this model's prompts need")
        rows = tensors.num_embeds(data, least=self._least_embeds, most=self._images.max_rows)
        return ProcessedItem(modality="image", data=dict(data), num_embeds=rows)

    def max_tokens(self, modality: Modality) -> int:
        """Return the number of embeddings of the largest possible media item. Begin and end tokens are not counted."""
        if modality == "video" and self._videos is not None:
            return self._videos.max_rows
        return self._images.max_rows

    def make_processor(self) -> Callable[[], FamilyProcessor]:
        """Return a function that creates an ``ImageProcessor``."""
        return partial(self.processor, self._folder, self._images, self._videos)


def checked(images: Images, data: Mapping[str, TensorData]) -> ProcessedItem:
    """Return the media item for the tensors ``data``. Raises ValueError if the item is larger than the model allows."""
    item = images.item(data)
    if item.num_embeds > images.max_rows:
        raise ValueError(
            f"the image has {item.num_embeds} embeddings; this model's limit for an image is {images.max_rows} embeddings"
        )
    return item
