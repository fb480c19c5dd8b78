"""A prompt, or parts of one, given as vectors in place of token ids."""

from typing import Any, Literal

import msgspec

from penstock_common.types.octets import Octets

EmbedsDtype = Literal["float32", "float16", "bfloat16"]
ELEMENT_BYTES: dict[EmbedsDtype, int] = {"float32": 4, "float16": 2, "bfloat16": 2}

IS_VECTOR, IS_TOKEN = b"\0", b"\1"


class PromptEmbeds(msgspec.Struct, frozen=True, kw_only=True, weakref=True):
    """``data``: row-major little-endian elements of ``[vectors, hidden_size]``, what the model's embedding layer would give: a
    row for each position that is a vector, in order. ``num_tokens``: positions of the prompt.

    ``is_token``: a byte for each position, 1 where it is a token id after all; empty: every position is a vector. The sequences
    of a request share one of these. ``memo``: what an engine has found out about it, once for all of them.
    """

    dtype: EmbedsDtype
    num_tokens: int
    hidden_size: int
    data: Octets
    is_token: bytes = b""
    memo: dict[object, Any] = msgspec.field(default_factory=dict)

    def is_vector(self, position: int) -> bool:
        """Whether the position of the prompt is a vector."""
        return position < self.num_tokens and not (self.is_token and self.is_token[position])

    def num_vectors(self, start: int, end: int) -> int:
        """How many of the positions from ``start`` to ``end`` are vectors."""
        end = min(end, self.num_tokens)
        return max(end - start, 0) - self.is_token.count(IS_TOKEN, start, end)

    def is_alike(self, other: "PromptEmbeds") -> bool:
        """Whether the other one says the same of its data."""
        return (self.dtype, self.num_tokens, self.hidden_size, self.is_token) == (
            other.dtype,
            other.num_tokens,
            other.hidden_size,
            other.is_token,
        )

    @property
    def row_bytes(self) -> int:
        """Bytes of a vector."""
        return self.hidden_size * ELEMENT_BYTES[self.dtype]

    def last(self, count: int) -> "PromptEmbeds | None":
        """That of the last ``count`` positions; None when none of them is a vector."""
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
