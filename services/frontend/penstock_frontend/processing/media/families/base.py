"""Media items, and the interface between the code of each model type and the other code of the frontend."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
from PIL.Image import Image

from penstock_common.types.media import EmbedRun, Modality, TensorData
from penstock_frontend.call_types import MediaPart

# The classes below are the results of media processing.


class ProcessedItem(msgspec.Struct, frozen=True, kw_only=True):
    """Media item in the form that the model accepts.

    Attributes:
        modality: Modality of the item.
        data: Output of the model's processor in transformers for this item alone, under the processor's names. The
            first dimension, if any, is 1. Pixels are uint8, and neither rescaled nor normalized.
        num_embeds: Number of embeddings that the model's encoder computes for the item.
        layout: Other numbers on which the item's tokens in a prompt depend, such as rows and columns of tiles.
    """

    modality: Modality
    data: dict[str, TensorData]
    num_embeds: int
    layout: tuple[int, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(len(tensor.data) for tensor in self.data.values())


class Replacement(msgspec.Struct, frozen=True):
    """Tokens that replace an item's placeholder in a prompt.

    Attributes:
        token_ids: Token ids that stand for the item.
        embed_runs: Ranges of positions in ``token_ids`` that embeddings replace. Empty means all positions.
        before: Text before the item. It is tokenized together with the adjacent text of the prompt.
        after: Text after the item. It is tokenized together with the adjacent text of the prompt.
        data: Encoder input that replaces the item's data. Empty means that the item's data are the input.
        variant: Name of the encoder input, if the input depends on other media in the prompt.
    """

    token_ids: list[int]
    embed_runs: tuple[EmbedRun, ...] = ()
    before: str = ""
    after: str = ""
    data: dict[str, TensorData] = {}
    variant: str = ""

    @property
    def span(self) -> int:
        """Number of tokens from the first embedding to the last embedding, including both."""
        if not self.embed_runs:
            return len(self.token_ids)
        return self.embed_runs[-1].start + self.embed_runs[-1].count - self.embed_runs[0].start

    @property
    def num_embeds(self) -> int:
        """Number of embeddings in the replacement."""
        return sum(run.count for run in self.embed_runs) if self.embed_runs else len(self.token_ids)


Encode = Callable[[str], list[int]]
"""Function that tokenizes a text. It recognizes special tokens in the text, but adds none around the text."""


class FamilyProcessor(Protocol):
    """Code of a family that runs in a media worker. It converts decoded media to the model's inputs.

    A processor may import transformers, numpy and Pillow, but never torch. Each worker creates its processor from the
    checkpoint's directory.
    """

    def image(self, image: Image, kwargs: Mapping[str, Any]) -> ProcessedItem:
        """Process an RGB image. The EXIF rotation was already applied.

        Raises ValueError for ``kwargs`` that the processor does not accept.
        """

    def audio(self, samples: npt.NDArray[np.float32], kwargs: Mapping[str, Any]) -> ProcessedItem:
        """Process mono samples at ``Family.sampling_rate``."""

    def video(self, frames: Sequence[Image], timestamps: Sequence[float], kwargs: Mapping[str, Any]) -> ProcessedItem:
        """Process RGB frames of equal size. ``timestamps`` are the times of the frames in seconds."""


class Family(Protocol):
    """Code of a family that runs in the frontend. Implementations are pure Python, and need little time."""

    modalities: frozenset[Modality]
    identity: bytes
    """Bytes that identify the processor's class and configuration. Embeddings depend on these, and on an item's bytes
    and arguments.
    """
    sampling_rate: int
    """Sampling rate of audio in Hz, or 0 if the family accepts no audio."""
    media_tokens: tuple[str, ...]
    """Tokens that are used only for media. If a client's text contains the same characters, they are plain text."""

    def placeholder(self, modality: Modality) -> str:
        """Return the text that the model's chat template writes for one item."""

    def replacements(self, items: Sequence[ProcessedItem]) -> list[Replacement]:
        """Return the replacement of each item's placeholder in a prompt, in order."""

    def described(self, modality: Modality, data: Mapping[str, TensorData]) -> ProcessedItem:
        """Return the item for tensors that a client has preprocessed.

        Raises ValueError with the tensor's name for a tensor that the processor would not produce. Raises ValueError if
        the tensors do not define an item of this modality.
        """

    def max_tokens(self, modality: Modality) -> int:
        """Return the number of prompt positions that the largest item has."""

    def make_processor(self) -> Callable[[], FamilyProcessor]:
        """Return a picklable function that creates the processor in a media worker."""


# The other packages of the frontend use the classes below.


class PreparedMedia(NamedTuple):
    """A processed item, and its identifier of 64 hexadecimal digits.

    The identifier depends on the cache salt, and on all data that determine the item's embeddings.
    """

    item: ProcessedItem
    identifier: str


class MediaPreparer(Protocol):
    """Fetches, checks, identifies and processes media. While the store has an item, the item is not processed again."""

    family: Family

    async def prepare(
        self, parts: Sequence[MediaPart], *, cache_salt: str, deadline: float | None, tenant: str = ""
    ) -> list[PreparedMedia]:
        """Prepare media, in the order of ``parts``.

        ``deadline`` is in seconds since the Unix epoch. ``tenant`` is the tenant of the request.

        Raises:
            InvalidArgument: With reason MEDIA_UNREADABLE, MEDIA_TOO_LARGE or MEDIA_TOO_MANY. With reason
                MEDIA_FETCH_FAILED if a retry would fail again. The message has the field, the value and the limit.
            PermissionDenied: With reason MEDIA_NOT_ALLOWED.
            FailedPrecondition: With reason MEDIA_FETCH_FAILED, if a later attempt may succeed.
            Unavailable: No media worker can start, or the frontend is shutting down.
            ResourceExhausted: A queue is full.
            DeadlineExceeded: The deadline has passed.
        """


# The functions below check the processor arguments of requests. They accept only known names. A value must not be
# larger than the checkpoint's value.


def check_names(kwargs: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Raise ValueError for an argument that is not in ``known``."""
    for name in kwargs:
        if name not in known:
            takes = (
                f"the model's processor accepts {', '.join(known)}"
                if known
                else "the model's processor accepts no arguments"
            )
            raise ValueError(f"processor_kwargs.{name} is set; {takes}")


def whole_number(kwargs: Mapping[str, Any], name: str, *, least: int = 1, most: int | None = None) -> int | None:
    """Return an integer argument after a check of its bounds, or None if the argument is not set. Raises ValueError."""
    value = kwargs.get(name)
    if value is None:
        return None
    return checked(value, f"processor_kwargs.{name}", least=least, most=most)


def checked(value: Any, field: str, *, least: int = 1, most: int | None = None) -> int:
    """Return ``value`` if it is an integer within the bounds. Otherwise raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{field} is {_shown(value)}; it must be a whole number")
    if value < least or (most is not None and value > most):
        bounds = f"from {least} to {most}" if most is not None else f"at least {least}"
        raise ValueError(f"{field} is {value}; it must be {bounds}")
    return value


def flag(kwargs: Mapping[str, Any], name: str) -> bool | None:
    """Return a boolean argument, or None if the argument is not set. Raises ValueError."""
    value = kwargs.get(name)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"processor_kwargs.{name} is {_shown(value)}; it must be true or false")
    return value


def size(kwargs: Mapping[str, Any], largest: Mapping[str, int], name: str = "size") -> dict[str, int] | None:
    """Return a size argument as an object of integers, or None if the argument is not set.

    Only the names in ``largest`` are accepted. The values in ``largest`` are the limits. Raises ValueError.
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
