"""Prompt embeddings: embeddings that a client sends instead of some or all token IDs of a prompt."""

from typing import Any, Literal

import msgspec

from penstock_common.types.octets import Octets

EmbedsDtype = Literal["float32", "float16", "bfloat16"]
ELEMENT_BYTES: dict[EmbedsDtype, int] = {"float32": 4, "float16": 2, "bfloat16": 2}

IS_VECTOR, IS_TOKEN = b"\0", b"\1"


class PromptEmbeds(msgspec.Struct, frozen=True, kw_only=True, weakref=True):
    """Prompt embeddings. The sequences of a request share one instance.

    Attributes:
        data: Row-major little-endian elements of ``[vectors, hidden_size]``, which replace outputs of the model's
            embedding layer. The tensor has one row, in order, for each position that is a vector.
        num_tokens: Number of positions of the prompt.
        is_token: One byte per position, 1 for a token ID. Empty if every position is a vector.
        memo: Cache of values that an engine derives from the embeddings, shared by all sequences.
    """

    dtype: EmbedsDtype
    num_tokens: int
    hidden_size: int
    data: Octets
    is_token: bytes = b""
    memo: dict[object, Any] = msgspec.field(default_factory=dict)

    def is_vector(self, position: int) -> bool:
        """Return whether ``position`` of the prompt has a vector instead of a token ID."""
        return position < self.num_tokens and not (self.is_token and self.is_token[position])

    def num_vectors(self, start: int, end: int) -> int:
        """Return the number of vectors at the positions from ``start`` to ``end - 1``."""
        end = min(end, self.num_tokens)
        return max(end - start, 0) - self.is_token.count(IS_TOKEN, start, end)

    def is_alike(self, other: "PromptEmbeds") -> bool:
        """Return whether ``other`` has the same dtype, sizes and positions of token IDs. The embeddings are not
        compared.
        """
        return (self.dtype, self.num_tokens, self.hidden_size, self.is_token) == (
            other.dtype,
            other.num_tokens,
            other.hidden_size,
            other.is_token,
        )

    @property
    def row_bytes(self) -> int:
        """Size in bytes of the embedding of one position."""
        return self.hidden_size * ELEMENT_BYTES[self.dtype]

    def last(self, count: int) -> "PromptEmbeds | None":
        """Return the embeddings of the last ``count`` positions, or None if all these positions are token IDs."""
        if count >= self.num_tokens:
            return self
        kept = self.num_vectors(self.num_tokens - count, self.num_tokens)
        if not kept:
            return None
        return PromptEmbeds(
            dtype=self.dtype,
            num_tokens=count,
            hidden_size=self.hidden_size,
            data=self.data[-kept * self.row_bytes :],
            is_token=self.is_token[-count:],
        )
