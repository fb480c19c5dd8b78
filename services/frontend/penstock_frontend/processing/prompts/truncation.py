"""Texts that are tokenized and cut to so many tokens. What a tokenizer puts around a text stays, as transformers has it."""

import tokenizers


def encode_cut(backend: tokenizers.Tokenizer, text: str, longest: int) -> tokenizers.Encoding:
    """The first tokens of a text, ``longest`` with those around it, which must be fewer."""
    encoding = backend.encode(text, add_special_tokens=False)
    encoding.truncate(longest - backend.num_special_tokens_to_add(False))
    return backend.post_process(encoding)


def encode_pair_cut(backend: tokenizers.Tokenizer, text: str, second: str, longest: int) -> tokenizers.Encoding:
    """The same of two texts in one prompt: the longer one gives way until both are alike."""
    one, other = (backend.encode(each, add_special_tokens=False) for each in (text, second))
    of_one, of_other = _shares(len(one), len(other), longest - backend.num_special_tokens_to_add(True))
    one.truncate(of_one)
    other.truncate(of_other)
    return backend.post_process(one, other)


def _shares(first: int, second: int, room: int) -> tuple[int, int]:
    """How many tokens of each text stay. An odd one is the longer text's, of texts that are alike the second's."""
    shorter = min(first, second, room // 2)
    return (shorter, min(second, room - shorter)) if first <= second else (min(first, room - shorter), shorter)
