"""Media items, and the interface between a model family's media and the rest of the frontend."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
from PIL.Image import Image

from penstock_common.types.media import EmbedRun, Modality, TensorData
from penstock_frontend.call_types import MediaPart

# Results of media processing.


class ProcessedItem(msgspec.Struct, frozen=True, kw_only=True):
    """Media item in the form that the model accepts.

    Attributes:
        modality: Modality of the item.
        data: Output of the model's transformers processor for only this item, under the processor's names. The leading
            dimension, if any, is 1. Pixels are uint8, neither rescaled nor normalized.
        num_embeds: Number of embeddings that the model's encoder computes for the item.
        layout: Other numbers that the family needs to place the item in a prompt, such as rows and columns of tiles.
    """

    modality: Modality
    data: dict[str, TensorData]
    num_embeds: int
    layout: tuple[int, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Size of the data in bytes."""
        return sum(len(tensor.data) for tensor in self.data.values())


class Replacement(msgspec.Struct, frozen=True):
    """Tokens that replace an item's placeholder in a prompt.

    Attributes:
        token_ids: Token ids of the item.
        embed_runs: Positions in ``token_ids`` that embeddings replace; empty for all.
        before: Text before the item, tokenized together with the adjacent text of the prompt.
        after: Text after the item, tokenized in the same way.
        data: Encoder input that replaces the item's data; empty to use the item's data.
        variant: Name of that input, if it is not always the same for the item.
    """

    token_ids: list[int]
    embed_runs: tuple[EmbedRun, ...] = ()
    before: str = ""
    after: str = ""
    data: dict[str, TensorData] = {}
    variant: str = ""

    @property
    def span(self) -> int:
        """Number of tokens from the first embedding to the last."""
        if not self.embed_runs:
            return len(self.token_ids)
        return self.embed_runs[-1].start + self.embed_runs[-1].count - self.embed_runs[0].start

    @property
    def num_embeds(self) -> int:
        """Number of embeddings in the replacement."""
        return sum(run.count for run in self.embed_runs) if self.embed_runs else len(self.token_ids)


Encode = Callable[[str], list[int]]
"""Function that tokenizes a text. Special tokens are recognized, but none are added."""


class FamilyProcessor(Protocol):
    """Part of a family that runs in a media worker and converts decoded media to the model's inputs.

    A processor may import transformers, numpy and Pillow, but never torch. Each worker creates a processor from a
    checkpoint's directory.
    """

    def image(self, image: Image, kwargs: Mapping[str, Any]) -> ProcessedItem:
        """Process an RGB image with EXIF rotation applied.

        Raises ValueError for ``kwargs`` that the processor does not accept.
        """

    def audio(self, samples: npt.NDArray[np.float32], kwargs: Mapping[str, Any]) -> ProcessedItem:
        """Process mono samples at ``Family.sampling_rate``."""

    def video(self, frames: Sequence[Image], timestamps: Sequence[float], kwargs: Mapping[str, Any]) -> ProcessedItem:
        """Process RGB frames of equal size, with their times in seconds."""


class Family(Protocol):
    """Part of a family that runs in the frontend. Implementations are pure Python and cheap."""

    modalities: frozenset[Modality]
    identity: bytes
    """Everything that embeddings depend on besides an item's bytes and arguments: processor class and configuration."""
    sampling_rate: int
    """Sampling rate of audio in Hz; 0 if the family accepts no audio."""
    media_tokens: tuple[str, ...]
    """Tokens that are used only for media. The same characters in a client's text are plain text."""

    def placeholder(self, modality: Modality) -> str:
        """Return the text that the model's chat template writes for one item."""

    def replacements(self, items: Sequence[ProcessedItem]) -> list[Replacement]:
        """Return the replacement of each item's placeholder in a prompt, in order."""

    def described(self, modality: Modality, data: Mapping[str, TensorData]) -> ProcessedItem:
        """Return the item of tensors that a client has processed.

        Raises ValueError, naming the tensor, if the processor would not produce it, or if the tensors do not define an
        item of this modality.
        """

    def max_tokens(self, modality: Modality) -> int:
        """Return the number of prompt positions of the largest item."""

    def make_processor(self) -> Callable[[], FamilyProcessor]:
        """Return a picklable function that creates the processor in a media worker."""


# Interface for the rest of the frontend.


class PreparedMedia(NamedTuple):
    """An item with its identifier: 64 hexadecimal digits for the cache salt and everything that its embeddings depend
    on.
    """

    item: ProcessedItem
    identifier: str


class MediaPreparer(Protocol):
    """Fetches, checks, identifies and processes media. Each item is processed once while the store has it."""

    family: Family

    async def prepare(
        self, parts: Sequence[MediaPart], *, cache_salt: str, deadline: float | None, tenant: str = ""
    ) -> list[PreparedMedia]:
        """Prepare media, in the order of ``parts``.

        ``deadline`` is in seconds since the Unix epoch. ``tenant`` owns the media.

        Raises:
            InvalidArgument: With reason MEDIA_UNREADABLE, MEDIA_TOO_LARGE, MEDIA_TOO_MANY, or MEDIA_FETCH_FAILED if a retry is
                useless. The message has the field, the value and the limit.
            PermissionDenied: With reason MEDIA_NOT_ALLOWED.
            FailedPrecondition: With reason MEDIA_FETCH_FAILED, if a later attempt may succeed.
            Unavailable: There is no media worker, or the frontend is shutting down.
            ResourceExhausted: A queue is full.
            DeadlineExceeded: The deadline has passed.
        """


# Processor arguments of requests. Only known names are accepted, and values cannot exceed those of the checkpoint.


def check_names(kwargs: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Raise ValueError for an argument that is not in ``known``."""
    for name in kwargs:
        if name not in known:
            takes = f"it takes {', '.join(known)}" if known else "it takes none"
            raise ValueError(f"processor_kwargs.{name} is set; {takes}")


def whole_number(kwargs: Mapping[str, Any], name: str, *, least: int = 1, most: int | None = None) -> int | None:
    """Return an integer argument within its bounds, or None if it is not set. Raises ValueError."""
    value = kwargs.get(name)
    if value is None:
        return None
    return checked(value, f"processor_kwargs.{name}", least=least, most=most)


def checked(value: Any, field: str, *, least: int = 1, most: int | None = None) -> int:
    """Return ``value``, which must be an integer within bounds. Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{field} is {_shown(value)}; it must be a whole number")
    if value < least or (most is not None and value > most):
        bounds = f"from {least} to {most}" if most is not None else f"at least {least}"
        raise ValueError(f"{field} is {value}; it must be {bounds}")
    return value


def flag(kwargs: Mapping[str, Any], name: str) -> bool | None:
    """Return a boolean argument, or None if it is not set. Raises ValueError."""
    value = kwargs.get(name)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"processor_kwargs.{name} is {_shown(value)}; it must be true or false")
    return value


def size(kwargs: Mapping[str, Any], largest: Mapping[str, int], name: str = "size") -> dict[str, int] | None:
    """Return a size argument as an object of integers, or None if it is not set.

    Only the names in ``largest`` are accepted, with its values as limits. Raises ValueError.
    """
    value = kwargs.get(name)
    if value is None:
        return None
    field = f"processor_kwargs.{name}"
    if not isinstance(value, Mapping) or not value:
        raise ValueError(f"{field} is {_shown(value)}; it must be an object with {' and '.join(largest)}")
    for key, number in value.items():
        if key not in largest:
            raise ValueError(f"{field}.{str(key)[:64]} is set; it has {' and '.join(largest)}")
        checked(number, f"{field}.{key}", most=largest[key])
    return dict(value)


def _shown(value: Any) -> str:
    return repr(value)[:64]
