"""Media family for tests of tokens only."""

from collections.abc import Callable, Mapping, Sequence

from penstock_common.types.media import Modality, TensorData
from penstock_frontend.processing.media.families.base import FamilyProcessor, ProcessedItem, Replacement


class TokenFamily:
    """Media family for images and sound, with the placeholders ``<image>`` and ``<audio>``."""

    modalities: frozenset[Modality] = frozenset({"image", "audio"})
    identity = b""
    sampling_rate = 16_000
    media_tokens: tuple[str, ...] = ("<image>", "<audio>")

    def placeholder(self, modality: Modality) -> str:
        """Return the token's name in angle brackets."""
        return f"<{modality}>"

    def replacements(self, items: Sequence[ProcessedItem]) -> list[Replacement]:
        """Return one token per row."""
        return [Replacement([1] * item.num_embeds) for item in items]

    def described(self, modality: Modality, data: Mapping[str, TensorData]) -> ProcessedItem:
        """Return None, because nothing is described."""
        raise ValueError(f"{modality} cannot be told from {sorted(data)}")

    def max_tokens(self, modality: Modality) -> int:
        """Return a small number of tokens."""
        del modality
        return 4

    def make_processor(self) -> Callable[[], FamilyProcessor]:
        """Raise an error, because this family has no processor."""
        raise NotImplementedError
