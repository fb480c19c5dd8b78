"""Outputs of oracle engines. They depend only on the request, so that any engine can resume a request of another
engine.

The vocabulary is that of ``small_tokenizers.byte_level``. Output token i of a request with seed s is a printable token
chosen by (s, i). Seeds from ``WALK`` on walk through ``WALKED``, whose characters span several tokens, and start again
at its end. With a constraint, the output is one of its texts, chosen by the seed, and the end-of-sequence token.
"""

import functools
import json

from penstock.common.v1 import sampling_pb2
from tests.fakes.engines.fake_engine import token_at
from tests.fakes.models.small_tokenizers import EOS, byte_level

WALK = 1_000_000
WALKED = "größer über Ähren 你好世界 naïve 🙂🙂 café; "


@functools.cache
def eos_token_id() -> int:
    """Return the token that ends a constrained output."""
    token_id: int | None = byte_level().token_to_id(EOS)
    assert token_id is not None
    return token_id


@functools.cache
def vocab_size() -> int:
    """Return the number of token ids."""
    size: int = byte_level().get_vocab_size()
    return size


@functools.cache
def _printable() -> tuple[int, ...]:
    """Return the tokens that consist of printable ASCII characters."""
    tokenizer = byte_level()
    texts = ((token_id, tokenizer.decode([token_id])) for token_id in range(vocab_size()))
    return tuple(token_id for token_id, text in texts if text and text.isascii() and text.isprintable())


@functools.cache
def _walked() -> tuple[int, ...]:
    return tuple(byte_level().encode(WALKED, add_special_tokens=False).ids)


def token(seed: int, index: int) -> int:
    """Return the token at an output index of a request without a constraint."""
    if seed >= WALK:
        walked = _walked()
        return walked[index % len(walked)]
    printable = _printable()
    return printable[token_at(seed, index, vocab_size=len(printable))]


def output(params: sampling_pb2.SamplingParams, count: int) -> list[int]:
    """Return the output tokens of a request, at most ``count``. A constraint may end the output earlier.

    Raises ValueError for a constraint other than ``choice``, and ``json_schema`` with an ``enum``.
    """
    if params.HasField("structured_output"):
        options = constrained_texts(params)
        text = options[params.seed % len(options)]
        return [*byte_level().encode(text, add_special_tokens=False).ids, eos_token_id()][:count]
    return [token(params.seed, index) for index in range(count)]


def constrained_texts(params: sampling_pb2.SamplingParams) -> list[str]:
    """Return the texts that a request's constraint allows. Raises ValueError for unsupported constraints."""
    constraint = params.structured_output
    if constraint.HasField("choice") and constraint.choice.options:
        return list(constraint.choice.options)
    if constraint.HasField("json_schema"):
        schema = json.loads(constraint.json_schema)
        if isinstance(schema, dict) and schema.get("enum"):
            return [json.dumps(value) for value in schema["enum"]]
    raise ValueError("structured_output: an oracle takes choice, and json_schema with enum")
