"""A prompt, or parts of one, given as vectors in place of token ids."""

from typing import Literal

import msgspec

EmbedsDtype = Literal["float32", "float16", "bfloat16"]
ELEMENT_BYTES: dict[EmbedsDtype, int] = {"float32": 4, "float16": 2, "bfloat16": 2}


class PromptEmbeds(msgspec.Struct, frozen=True, kw_only=True):
    """``data``: row-major little-endian elements of ``[num_tokens, hidden_size]``, what the model's embedding layer would give.

    ``is_token[i]`` says that position i is a token id after all, and its row means nothing; empty: every position is a vector.
    """

    dtype: EmbedsDtype
    num_tokens: int
    hidden_size: int
    data: bytes
    is_token: tuple[bool, ...] = ()

    def is_vector(self, position: int) -> bool:
        """Whether the position of the prompt is a vector."""
        return position < self.num_tokens and not (self.is_token and self.is_token[position])

    @property
    def row_bytes(self) -> int:
        """Bytes of a position."""
        return self.hidden_size * ELEMENT_BYTES[self.dtype]
