"""Defines media items, and the interface between a model family's media and the rest of the frontend."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
from PIL.Image import Image

from penstock_common.types.media import EmbedRun, Modality, TensorData
from penstock_frontend.call_types import MediaPart

# What a media worker makes of a medium.


class ProcessedItem(msgspec.Struct, frozen=True, kw_only=True):
    """A medium as the model takes it.

    ``data``: what the model's processor in transformers gives for this item alone, under its names, with its leading dimension
    of 1 where it has one. Pixels are uint8: neither rescaled nor normalized. ``num_embeds``: rows that the model's tower makes of
    it. ``layout``: what else its family needs to know to put it into a prompt, as numbers (rows and columns of tiles, ...).
    """

    modality: Modality
    data: dict[str, TensorData]
    num_embeds: int
    layout: tuple[int, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Of its data."""
        return sum(len(tensor.data) for tensor in self.data.values())


class Replacement(msgspec.Struct, frozen=True):
    """What stands in a prompt for an item: ``token_ids``, of which those at ``embed_runs`` (empty: all) are replaced by rows.

    ``before`` and ``after``: texts that stand around it, tokenized together with the prompt's own text there. ``data``: what the
    tower gets in place of the item's data; empty: these. ``variant``: says what that is, where it is not always the same of the
    item.
    """

    token_ids: list[int]
    embed_runs: tuple[EmbedRun, ...] = ()
    before: str = ""
    after: str = ""
    data: dict[str, TensorData] = {}
    variant: str = ""

    @property
    def span(self) -> int:
        """Tokens from the first row to the last."""
        if not self.embed_runs:
            return len(self.token_ids)
        return self.embed_runs[-1].start + self.embed_runs[-1].count - self.embed_runs[0].start

    @property
    def num_embeds(self) -> int:
        """Rows that are put into it."""
        return sum(run.count for run in self.embed_runs) if self.embed_runs else len(self.token_ids)


Encode = Callable[[str], list[int]]
"""Token ids of a text, special tokens recognised, none put around it."""


class FamilyProcessor(Protocol):
    """The half that runs in a media worker: decoded media to the model's inputs. It may import transformers, numpy and Pillow,
    and never torch. Made once per worker, of a checkpoint's directory.
    """

    def image(self, image: Image, kwargs: Mapping[str, Any]) -> ProcessedItem:
        """Of an RGB image, turned as its EXIF says. Raises ValueError for ``kwargs`` that the processor does not take."""

    def audio(self, samples: npt.NDArray[np.float32], kwargs: Mapping[str, Any]) -> ProcessedItem:
        """Of mono samples at ``Family.sampling_rate``."""

    def video(self, frames: Sequence[Image], timestamps: Sequence[float], kwargs: Mapping[str, Any]) -> ProcessedItem:
        """Of RGB pictures of one size, and when they are seen in seconds."""


class Family(Protocol):
    """The half that runs in the frontend: pure Python, and cheap."""

    modalities: frozenset[Modality]
    identity: bytes
    """What rows depend on besides an item's bytes and arguments: processor class and configuration."""
    sampling_rate: int
    """Of sound, in Hz; 0 where none is taken."""
    media_tokens: tuple[str, ...]
    """Tokens that stand for media and for nothing else. The same characters in a client's text are text."""

    def placeholder(self, modality: Modality) -> str:
        """What stands in a text for an item, one for each: what the model's chat template writes for it."""

    def replacements(self, items: Sequence[ProcessedItem]) -> list[Replacement]:
        """What stands in the prompt for each item of a request, in order, in place of its placeholder."""

    def described(self, modality: Modality, data: Mapping[str, TensorData]) -> ProcessedItem:
        """An item that its client has processed. Raises ValueError, naming the tensor, for what the processor would not give, and
        for modalities and families that cannot be told from their tensors.
        """

    def max_tokens(self, modality: Modality) -> int:
        """Positions of the largest item."""

    def make_processor(self) -> Callable[[], FamilyProcessor]:
        """What makes the other half in a media worker; it can be pickled."""


# What the rest of a frontend asks of its media.


class PreparedMedia(NamedTuple):
    """An item, and the 64 hexadecimal digits that stand for all that its embeddings depend on and for the cache salt."""

    item: ProcessedItem
    identifier: str


class MediaPreparer(Protocol):
    """Fetches, checks, names and processes media, each once while the store holds it."""

    family: Family

    async def prepare(
        self, parts: Sequence[MediaPart], *, cache_salt: str, deadline: float | None, tenant: str = ""
    ) -> list[PreparedMedia]:
        """In the order of ``parts``. ``deadline`` in seconds since the Unix epoch. ``tenant``: whose they are.

        Raises InvalidArgument with reason MEDIA_UNREADABLE, MEDIA_TOO_LARGE or MEDIA_TOO_MANY, PermissionDenied with
        MEDIA_NOT_ALLOWED, Unavailable or, where another try brings nothing, InvalidArgument with MEDIA_FETCH_FAILED, each with
        the part's field, the value and the limit; ResourceExhausted while queues are full; DeadlineExceeded.
        """


# Arguments of processors that a request may give: known names alone, and none that asks for more than the checkpoint does.


def check_names(kwargs: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Raise ValueError for an argument that is not one of ``known``."""
    for name in kwargs:
        if name not in known:
            takes = f"those it takes are {', '.join(known)}" if known else "it takes none"
            raise ValueError(f"processor_kwargs.{name} is set; {takes}")


def whole_number(kwargs: Mapping[str, Any], name: str, *, least: int = 1, most: int | None = None) -> int | None:
    """An argument within its bounds; None where it is not set. Raises ValueError."""
    value = kwargs.get(name)
    if value is None:
        return None
    return checked(value, f"processor_kwargs.{name}", least=least, most=most)


def checked(value: Any, field: str, *, least: int = 1, most: int | None = None) -> int:
    """``value``, which must be a whole number within bounds. Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{field} is {_shown(value)}; it must be a whole number")
    if value < least or (most is not None and value > most):
        bounds = f"from {least} to {most}" if most is not None else f"at least {least}"
        raise ValueError(f"{field} is {value}; it must be {bounds}")
    return value


def flag(kwargs: Mapping[str, Any], name: str) -> bool | None:
    """A boolean argument; None where it is not set. Raises ValueError."""
    value = kwargs.get(name)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"processor_kwargs.{name} is {_shown(value)}; it must be true or false")
    return value


def size(kwargs: Mapping[str, Any], largest: Mapping[str, int], name: str = "size") -> dict[str, int] | None:
    """A size as an object of whole numbers, with none but the names of ``largest``, which bounds each; None where it is not set.
    Raises ValueError.
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
