"""What a family of models says of media."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from PIL.Image import Image

from penstock_common.types.media import Modality, TensorData
from penstock_frontend.processing.media.item import ProcessedItem, Replacement

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
