"""What every dataset comes to: prompts without end."""

from collections.abc import Awaitable, Callable, Iterator, Sequence

import msgspec

from penstock_common.errors import ConfigError
from penstock_local.rpc.client import ModelInfo

CountTokens = Callable[[str], Awaitable[int]]
"""How many tokens a text has, by the server's tokenizer. Raises what the server fails with."""
FIRST_ID = 10
"""Random ids begin here: the first few are special tokens in many vocabularies."""


class Prompt(msgspec.Struct, frozen=True):
    """What one request sends.

    ``text`` is text or token ids, ``max_tokens`` how many new ones it asks for, ``schema`` a JSON schema that the answer must
    follow; empty: none.
    """

    text: str | Sequence[int]
    max_tokens: int
    schema: str = ""
    images: Sequence[bytes] = ()
    """Files of images that stand before the text."""


class Dataset(msgspec.Struct, frozen=True):
    """``prompts`` never end, and are the same for the same seed. ``about`` says in words what they are."""

    prompts: Iterator[Prompt]
    about: str


def check_lengths(longest: int, model: ModelInfo, *, flags: str) -> None:
    """Raise ConfigError, naming ``flags``, when the model takes no sequences of ``longest`` tokens."""
    if model.max_model_len and longest > model.max_model_len:
        raise ConfigError(
            f"prompts and outputs have up to {longest} tokens together; {model.name} takes {model.max_model_len}: lower {flags}"
        )


def random_ids(model: ModelInfo) -> range:
    """The ids that random prompts are drawn from. Raises ConfigError when the server does not say how many there are."""
    if model.vocab_size <= FIRST_ID:
        raise ConfigError(f"the server says that {model.name} has {model.vocab_size} token ids; use --prompts FILE")
    return range(FIRST_ID, model.vocab_size)
