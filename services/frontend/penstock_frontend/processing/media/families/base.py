"""Types of media items, and the interface between the code of each model type and the other code of the frontend."""

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
    """Media item in the form of the model's inputs.

    Attributes:
        modality: Modality of the item.
        data: Output of the model's processor in transformers for this item alone, under the processor's names. The
            first dimension, if any, is 1. Pixels are uint8, and neither rescaled nor normalized.
        num_embeds: Number of embeddings that the model's encoder computes for the item.
        layout: Further numbers on which the item's tokens in a prompt depend, such as the number of rows and columns of
            tiles.
    """

    modality: Modality
    data: dict[str, TensorData]
    num_embeds: int
    layout: tuple[int, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Total size of the item's tensors in bytes."""
        return sum(len(tensor.data) for tensor in self.data.values())


class Replacement(msgspec.Struct, frozen=True):
    """Tokens that replace the placeholder of a media item in a prompt.

    Attributes:
        token_ids: Token ids that stand for the item.
        embed_runs: Ranges of positions in ``token_ids`` at which the model uses embeddings instead of tokens. Empty
            means all positions.
        before: Text that is inserted before the item, and is tokenized together with the adjacent text of the prompt.
        after: Text that is inserted after the item, and is tokenized together with the adjacent text of the prompt.
        data: Encoder input that is used instead of the item's data. Empty means that the item's data are the encoder
            input.
        variant: Name of the encoder input, if this input depends on the other media items in the prompt.
    """

    token_ids: list[int]
    embed_runs: tuple[EmbedRun, ...] = ()
    before: str = ""
    after: str = ""
    data: dict[str, TensorData] = {}
    variant: str = ""

    @property
    def span(self) -> int:
        """Number of tokens from the first embedding to the last embedding, both included."""
        if not self.embed_runs:
            return len(self.token_ids)
        return self.embed_runs[-1].start + self.embed_runs[-1].count - self.embed_runs[0].start

    @property
    def num_embeds(self) -> int:
        """Number of embeddings in this replacement."""
        return sum(run.count for run in self.embed_runs) if self.embed_runs else len(self.token_ids)


Encode = Callable[[str], list[int]]
"""Function that tokenizes a text. Special tokens in the text are recognized, but no special tokens are added around the
text.
"""


class FamilyProcessor(Protocol):
    """Code of a family of model types that runs in a media worker. The processor converts decoded media to the model's
    inputs.

    A processor may import transformers, numpy and Pillow, but never torch. Each worker creates its own processor from
    the directory of the checkpoint.
    """

    def image(self, image: Image, kwargs: Mapping[str, Any]) -> ProcessedItem:
        """Process an RGB image, to which the EXIF rotation was already applied.

        Raises ValueError for ``kwargs`` that the processor does not accept.
        """

    def audio(self, samples: npt.NDArray[np.float32], kwargs: Mapping[str, Any]) -> ProcessedItem:
        """Process mono audio samples, whose rate is ``Family.sampling_rate``."""

    def video(self, frames: Sequence[Image], timestamps: Sequence[float], kwargs: Mapping[str, Any]) -> ProcessedItem:
        """Process the RGB frames of a video, which have the same size. ``timestamps`` are the times of the frames in
        seconds.
        """


class Family(Protocol):
    """Code of a family of model types that runs in the frontend. Implementations are pure Python, and their methods are
    fast.
    """

    modalities: frozenset[Modality]
    identity: bytes
    """Bytes that identify the class and the configuration of the processor. The embeddings of an item depend on these,
    and on the item's bytes and arguments.
    """
    sampling_rate: int
    """Sampling rate in Hz at which the model expects audio. 0 if the family accepts no audio."""
    media_tokens: tuple[str, ...]
    """Texts of the tokens that are used only for media. If the text of a client contains these characters, they are
    plain text.
    """

    def placeholder(self, modality: Modality) -> str:
        """Return the text that the model's chat template writes for one media item."""

    def replacements(self, items: Sequence[ProcessedItem]) -> list[Replacement]:
        """Return the replacement of each media item's placeholder in a prompt, in the order of the items."""

    def described(self, modality: Modality, data: Mapping[str, TensorData]) -> ProcessedItem:
        """Return the media item for tensors that a client has preprocessed.

        Raises ValueError with the tensor's name for a tensor that the processor would not produce. Raises ValueError if
        the tensors do not define an item of this modality.
        """

    def max_tokens(self, modality: Modality) -> int:
        """Return the number of prompt positions of the largest possible media item."""

    def make_processor(self) -> Callable[[], FamilyProcessor]:
        """Return a picklable function that creates the processor in a media worker."""


# The other packages of the frontend use the classes below.


class PreparedMedia(NamedTuple):
    """A processed media item, and its identifier, which has 64 hexadecimal digits.

    The identifier depends on the cache salt, and on all data that determine the item's embeddings.
    """

    item: ProcessedItem
    identifier: str


class MediaPreparer(Protocol):
    """Fetches, checks, identifies and processes media. An item that is in the store is not processed again."""

    family: Family

    async def prepare(
        self, parts: Sequence[MediaPart], *, cache_salt: str, deadline: float | None, tenant: str = ""
    ) -> list[PreparedMedia]:
        """Return the prepared media, in the order of ``parts``.

        ``deadline`` is in seconds since the Unix epoch. ``tenant`` is the tenant of the request.

        Raises:
            InvalidArgument: With the reason MEDIA_UNREADABLE, MEDIA_TOO_LARGE or MEDIA_TOO_MANY. Also with the reason
                MEDIA_FETCH_FAILED, if a retry would fail again. The message has the field, the value and the limit.
            PermissionDenied: With reason MEDIA_NOT_ALLOWED.
            FailedPrecondition: With reason MEDIA_FETCH_FAILED, if a later attempt may succeed.
            Unavailable: No media worker can start, or the frontend is shutting down.
            ResourceExhausted: A queue is full.
            DeadlineExceeded: The deadline has passed.
        """


# The functions below check the processor arguments of requests. Only known names are accepted, and a value must not be
# larger than the value in the checkpoint.


def check_names(kwargs: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Raise ValueError if a processor argument is not in ``known``."""
    for name in kwargs:
        if name not in known:
            takes = (
                f"the model's processor accepts {', '.join(known)}"
                if known
                else "the model's processor accepts no arguments"
            )
            raise ValueError(f"processor_kwargs.{name} is set; {takes}")


def whole_number(kwargs: Mapping[str, Any], name: str, *, least: int = 1, most: int | None = None) -> int | None:
    """Return the value of an integer argument within its bounds. Return None if the argument is not set. Raises
    ValueError.
    """
    value = kwargs.get(name)
    if value is None:
        return None
    return checked(value, f"processor_kwargs.{name}", least=least, most=most)


def checked(value: Any, field: str, *, least: int = 1, most: int | None = None) -> int:
    """Return ``value`` if it is an integer within the bounds. Otherwise raise ValueError."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{field} is {_shown(value)}; it must be a whole number")
    if value < least or (most is not None and value > most):
        bounds = f"from {least} to {most}" if most is not None else f"at least {least}"
        raise ValueError(f"{field} is {value}; it must be {bounds}")
    return value


def flag(kwargs: Mapping[str, Any], name: str) -> bool | None:
    """Return the value of a boolean argument. Return None if the argument is not set. Raises ValueError if the value is
    not a boolean.
    """
    value = kwargs.get(name)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"processor_kwargs.{name} is {_shown(value)}; it must be true or false")
    return value


def size(kwargs: Mapping[str, Any], largest: Mapping[str, int], name: str = "size") -> dict[str, int] | None:
    """Return the value of a size argument, which is an object of integers. Return None if the argument is not set.

    Only the names in ``largest`` are accepted. The values in ``largest`` are the limits. Raises ValueError if the value
    is not such an object.
    """
    value = kwargs.get(name)
    if value is None:
        return None
    field = f"processor_kwargs.{name}"
    if not isinstance(value, Mapping) or not value:
        raise ValueError(f"{field} is {_shown(value)}; it must be an object with {' and '.join(largest)}")
    for key, number in value.items():
        if key not in largest:
            raise ValueError(f"{field}.{str(key)[:64]} is not known; the object may have {' and '.join(largest)}")
        checked(number, f"{field}.{key}", most=largest[key])
    return dict(value)


def _shown(value: Any) -> str:
    return repr(value)[:64]
