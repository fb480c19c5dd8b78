"""Prompts that begin with the token of a text's beginning, which the tokenizer adds, too.

A model sees two of them then, which it never did in training. Most such prompts were made by a chat template and sent as text.
"""

from collections.abc import Sequence

from penstock_common.errors import quoted
from penstock_frontend.processing.prompts.tokenizer import Tokenizer
from penstock_frontend.telemetry.call_warnings import WarningKind, warn


def warn_of_double_bos(token_ids: Sequence[int], tokenizer: Tokenizer, *, field: str) -> None:
    """Warn the client of a call if its prompt, tokenized with special tokens, begins with the same one twice.

    ``field``: the prompt's, as errors have it.
    """
    first = tokenizer.leading_token
    if first is not None and len(token_ids) > 1 and token_ids[0] == token_ids[1] == first:
        name = quoted(tokenizer.text_of(first))
        warn(
            WarningKind.DOUBLE_BOS,
            field,
            f"begins with {name}, and the tokenizer adds another one: leave it out, or set add_special_tokens to false",
        )
