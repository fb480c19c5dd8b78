"""Random JSON schemas with supported keywords, and a random model that follows a bitmask."""

import random
from typing import Any

import numpy as np

from penstock_enginecore.structured_output.core.base import bitmask_words
from tests.fakes.engines.followed import Walk

KEYS = ["a", "name", "naïve key", 'quo"te', "back\\slash", "line\nbreak", "id", "kind", "größe", "a b", "aa", ""]
PATTERNS = [
    r"^[A-Z]{2}\d{3}$",
    r"^\w+$",
    "b",
    r'^["\\/]{1,3}$',
    "^(yes|no)?$",
    r"^[^a-z\s]{2,4}$",
    r"\.$",
    "^(a|bc){2,3}",
]
FORMATS = ["date", "time", "date-time", "uuid", "ipv4", "email"]
VALUES: list[Any] = ["x", "zwei\n", '"', 1, -2.5, 1e30, True, None, [1, "a"], {"k": [None]}, 12345678901234567890, "😀"]


def random_schema(rng: random.Random, depth: int = 0) -> Any:
    """Return a random schema that at least one value satisfies."""
    leaves = [_string, _integer, _number, _enum, _const, lambda _: {"type": "boolean"}, lambda _: {"type": "null"}]
    nested = [_object, _object, _array, _any_of] if depth < 2 else []
    write = rng.choice(nested if depth == 0 else leaves + nested)
    return write(rng) if write in leaves else write(rng, depth)


def _string(rng: random.Random) -> Any:
    low = rng.randint(0, 5)
    return {"type": "string"} | rng.choice(
        [
            {},
            {"minLength": low, "maxLength": low + rng.randint(0, 9)},
            {"maxLength": low},
            {"pattern": rng.choice(PATTERNS)},
            {"format": rng.choice(FORMATS)},
        ]
    )


def _integer(rng: random.Random) -> Any:
    return {"type": "integer"} | _bounds(rng, rng.randint(-1500, 1500), rng.randint(2, 3000))


def _number(rng: random.Random) -> Any:
    return {"type": "number"} | _bounds(
        rng, round(rng.uniform(-30, 30), rng.randint(0, 4)), round(rng.uniform(0.01, 9), 3)
    )


def _bounds(rng: random.Random, low: float, span: float) -> Any:
    bounds = {
        rng.choice(["minimum", "exclusiveMinimum"]): low,
        rng.choice(["maximum", "exclusiveMaximum"]): round(low + span, 6),
    }
    return dict(rng.sample(sorted(bounds.items()), rng.randint(0, 2)))


def _enum(rng: random.Random) -> Any:
    return {"enum": rng.sample(VALUES, rng.randint(1, 4))}


def _const(rng: random.Random) -> Any:
    return {"const": rng.choice(VALUES)}


def _object(rng: random.Random, depth: int) -> Any:
    names = rng.sample(KEYS, rng.randint(0, 5))
    schema: Any = {"type": "object", "properties": {name: random_schema(rng, depth + 1) for name in names}}
    schema["required"] = rng.sample(names, rng.randint(0, len(names)))
    more = rng.choice([None, None, False, True, {"type": "integer"}])
    return schema if more is None else schema | {"additionalProperties": more}


def _array(rng: random.Random, depth: int) -> Any:
    low = rng.randint(0, 2)
    schema: Any = {"type": "array", "items": random_schema(rng, depth + 1)}
    if rng.random() < 0.3:
        schema["prefixItems"] = [random_schema(rng, depth + 1) for _ in range(rng.randint(1, 2))]
    return schema | rng.choice([{}, {"minItems": low}, {"minItems": low, "maxItems": low + rng.randint(0, 3)}])


def _any_of(rng: random.Random, depth: int) -> Any:
    return {"anyOf": [random_schema(rng, depth + 1) for _ in range(rng.randint(1, 3))]}


class RandomModel:
    """Model that samples allowed tokens with equal probability, except for tokens that close a string, array or object.

    The longer the output, the higher the probability of a closing token. Otherwise a random walk through nested values
    might not end.
    """

    def __init__(self, tokens: list[bytes], eos_token_ids: set[int]) -> None:
        self.tokens = tokens
        self.eos_token_ids = eos_token_ids
        # The schemas' patterns require a full stop at the end of a string.
        self.closing = np.array(
            [i in eos_token_ids or (bool(t) and not t.strip(b'"]}.')) for i, t in enumerate(tokens)]
        )

    def run(self, grammar: Walk, rng: random.Random, budget: int = 3000) -> bytes:
        """Return the output's bytes. Fails if the grammar does not end within ``budget`` tokens, or allows an early end
        token.
        """
        row = np.empty(bitmask_words(len(self.tokens)), np.int32)
        output: list[int] = []
        while not grammar.terminated:
            assert len(output) < budget, b"".join(self.tokens[t] for t in output)
            allowed = self.allowed(grammar, row)
            assert len(allowed), b"".join(self.tokens[t] for t in output)
            closing = allowed[self.closing[allowed]]
            soon = rng.random() < min(0.1 + len(output) / 60, 0.8)
            output.append(int(rng.choice(closing if soon and len(closing) else allowed)))
            assert grammar.accept(output[-1:])
        assert output[-1] in self.eos_token_ids
        assert not self.eos_token_ids & set(output[:-1])
        return b"".join(self.tokens[t] for t in output[:-1])

    def allowed(self, grammar: Walk, row: np.ndarray) -> np.ndarray:
        """Ids of the tokens that the grammar allows next."""
        row[:] = -1
        grammar.fill(row)
        return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
