"""Family of Whisper, whose prompts begin with one audio clip of at most one window of 30 seconds.

The engine's decoder attends to the clip in separate layers. The clip has positions at the start of the prompt, so that
engines schedule and cache it like other media.

https://huggingface.co/docs/transformers/model_doc/whisper
"""

from collections.abc import Sequence

from penstock_common.types.media import EmbedRun, Modality
from penstock_frontend.processing.media.families.audio import FEATURES, Audio, Windows, windows_of
from penstock_frontend.processing.media.families.base import ProcessedItem, Replacement
from penstock_frontend.processing.media.families.checkpoint import Checkpoint

PLACEHOLDER = "<|startoflm|>"
"""Token that stands for the clip. Transcriptions never contain this token."""
_ALIGNMENT = 32
"""The number of positions for a clip is a multiple of this number of tokens, so that these positions fill complete
blocks of the KV cache.
"""


class _Window(Windows):
    """Format of the window of a clip."""

    def check(self, num_samples: int) -> None:
        """Raise ValueError if a clip is empty, or longer than the window."""
        if num_samples > self.samples:
            raise ValueError(
                f"the clip has {num_samples / self.sampling_rate:.1f} s of sound; the limit for a clip in a prompt is "
                f"{self.samples / self.sampling_rate:.0f} s; send longer clips to /v1/audio/transcriptions"
            )
        super().check(num_samples)


class Whisper(Audio):
    """Family of Whisper. The rows of a clip are the outputs of the encoder."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        rows = checkpoint.number("max_source_positions", checkpoint.config, default=1500)
        window = _Window(*windows_of(checkpoint)._replace(rows_of_window=rows))
        super().__init__(checkpoint, PLACEHOLDER, window, (FEATURES,))
        self._num_positions = -(-rows // _ALIGNMENT) * _ALIGNMENT

    def replacements(self, items: Sequence[ProcessedItem]) -> list[Replacement]:
        """Return the token ids of the clip. The encoder's outputs are at the first positions, and no token attends to
        the other positions. Raises ValueError if there are several clips.
        """
        if len(items) != 1:
            raise ValueError(f"the prompt has {len(items)} audio clips; a prompt of a Whisper model has exactly one")
        rows = self._windows.rows_of_window
        return [Replacement([self._token_id] * self._num_positions, embed_runs=(EmbedRun(0, rows),))]

    def max_tokens(self, modality: Modality) -> int:
        """Return the number of positions of a clip, which does not depend on its length."""
        del modality
        return self._num_positions
