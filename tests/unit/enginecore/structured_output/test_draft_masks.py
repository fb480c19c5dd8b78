"""Masks after drafts equal those of a separate matcher that has accepted the same tokens."""

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from penstock_common.types.sampling import StructuredOutput
from penstock_enginecore.config import EngineCoreConfig, ModelConfig, StructuredOutputConfig
from penstock_enginecore.structured_output.backend import XgrammarBackend, token_bytes
from penstock_enginecore.structured_output.core.base import Grammar, Mask, bitmask_words
from penstock_enginecore.structured_output.factory import make_grammar_backend
from tests.fakes.engines.followed import TIMEOUT, allowed, follow_here
from tests.fakes.models.random_schemas import RandomModel, random_schema

pytestmark = pytest.mark.usefixtures("warm_processes")
MODEL = Path(__file__).resolve().parents[4] / "examples/demo_model/penstock-tiny"
VOCAB_SIZE = 2100
EOS = frozenset({1, 5})
REGEXES = (
    r"[a-z]{3,5}-\d{2}",
    r"([a-z ]{1,9}[.,] ?){2,6}",
    r"(yes|no|may be)( indeed)?",
    r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}",
    r"(Once upon a time|Once a year), .{0,20}",
)
KINDS = ("right", "wrong", "right up to", "allowed", "ended", "none")


@pytest.fixture(scope="module")
def backend() -> Iterator[XgrammarBackend]:
    """Yield a backend whose time limit for a token is so long that every mask is computed."""
    config = EngineCoreConfig(
        model=ModelConfig(path=str(MODEL)), structured_output=StructuredOutputConfig(token_budget=10.0)
    )
    made = make_grammar_backend(config, vocab_size=VOCAB_SIZE, eos_token_ids=EOS)
    assert isinstance(made, XgrammarBackend)
    yield made
    made.shutdown()


@pytest.fixture(scope="module")
def model() -> RandomModel:
    return RandomModel(token_bytes(Tokenizer.from_file(str(MODEL / "tokenizer.json")), VOCAB_SIZE), set(EOS))


class Walked:
    """A constrained request. ``output`` is its future output, unless ``take`` gets other tokens."""

    def __init__(self, backend: XgrammarBackend, model: RandomModel, constraint: dict[str, Any], rng: random.Random):
        self._backend = backend
        self._constraint = constraint
        self._rng = rng
        end = follow_here(backend, **constraint)
        self.output: list[int] = []
        row = np.empty(bitmask_words(VOCAB_SIZE), np.int32)
        while not end.terminated and len(self.output) < 60:
            choice = model.allowed(end, row)
            closing = choice[model.closing[choice]]
            likely = closing if len(closing) and rng.random() < 0.5 else choice
            self.output.append(int(rng.choice(likely.tolist())))
            assert end.accept(self.output[-1:])
        self.taken = self.output[: rng.randrange(len(self.output))] if rng.random() < 0.5 else []
        started = backend.start(StructuredOutput(**constraint), self.taken, lambda: None)
        self.grammar: Grammar = started.result(TIMEOUT)

    @property
    def over(self) -> bool:
        return self.grammar.terminated or len(self.taken) == len(self.output)

    def masks(self, drafts: Sequence[int]) -> list[Mask]:
        """Return masks from a separate matcher: before the drafts, and after each allowed draft that does not end the
        output.
        """
        alone = follow_here(self._backend, **self._constraint)
        assert alone.accept(self.taken)
        found = [np.empty(bitmask_words(VOCAB_SIZE), np.int32)]
        alone.fill(found[0])
        for token in drafts:
            if token in EOS or not alone.accept([token]):
                break
            found.append(np.empty_like(found[0]))
            alone.fill(found[-1])
        return found

    def drafts(self, kind: str) -> list[int]:
        """Return up to eight drafts.

        ``right up to`` gives random tokens after a correct prefix. ``allowed`` gives allowed tokens that differ from
        the output.
        """
        count = self._rng.randint(1, 8)
        right = self.output[len(self.taken) : len(self.taken) + count]
        wrong = [self._rng.randrange(VOCAB_SIZE) for _ in range(count)]
        match kind:
            case "right":
                return right
            case "wrong":
                return wrong
            case "right up to":
                return right[: self._rng.randrange(count + 1)] + wrong
            case "ended":
                return [*right[: self._rng.randrange(count + 1)], self._rng.choice(sorted(EOS)), *wrong]
            case "allowed":
                made = right[: self._rng.randrange(count)]
                while len(made) < count and (may := sorted(allowed(self.masks(made)[-1]) - EOS)):
                    made.append(self._rng.choice(may))
                return made
        return []

    def take(self) -> int:
        """Take the next token, or rarely another allowed token, after which the rest of the output is unknown."""
        if self._rng.random() < 0.1 and (may := sorted(allowed(self.masks([])[0]) - EOS)):
            self.output = [*self.taken, self._rng.choice(may)]
        token = self.output[len(self.taken)]
        assert self.grammar.accept(token)
        self.taken.append(token)
        return token


def settle(backend: XgrammarBackend, grammars: Sequence[Grammar]) -> None:
    """Wait until all masks are ready, including those after drafts."""
    backend.flush()
    for grammar in grammars:
        while not (grammar.terminated or (grammar.ready and grammar.drafted)):
            assert grammar.failure is None, grammar.failure
            backend.wait([grammar])


def same(found: Sequence[Mask], expected: Sequence[Mask]) -> bool:
    return np.array_equal(np.stack(found), np.stack(expected))


@pytest.mark.slow
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    seeds=st.lists(st.integers(0, 300), min_size=1, max_size=3),
    steps=st.lists(st.sampled_from(KINDS), min_size=1, max_size=12),
    again=st.lists(st.booleans(), min_size=1, max_size=12),
    randomness=st.integers(0, 10_000),
)
def test_masks_behind_drafts_are_those_of_a_matcher_that_took_them_in(
    backend: XgrammarBackend,
    model: RandomModel,
    seeds: list[int],
    steps: list[str],
    again: list[bool],
    randomness: int,
) -> None:
    rng = random.Random(randomness)
    walked = []
    for seed in seeds:
        regex = {"regex": REGEXES[seed % len(REGEXES)]}
        schema = {"json_schema": json.dumps(random_schema(random.Random(seed)))}
        walked.append(Walked(backend, model, rng.choice([regex, schema, schema]), rng))
    for number, kind in enumerate(steps):
        settle(backend, [each.grammar for each in walked])
        living = [each for each in walked if not each.over]
        drafts = [each.drafts(kind) for each in living]
        for each, drafted in zip(living, drafts, strict=True):
            if again[number % len(again)]:  # a failed step is repeated with other drafts
                each.grammar.draft(each.drafts(rng.choice(KINDS)))
                backend.flush()
            each.grammar.draft(drafted)
        settle(backend, [each.grammar for each in living])
        for each, drafted in zip(living, drafts, strict=True):
            expected = each.masks(drafted)
            assert same([each.grammar.mask, *each.grammar.draft_masks], expected), (kind, drafted)
            for place in range(rng.randint(1, len(drafted) + 1)):
                if each.over:
                    break
                token = each.take()
                if each.over or place + 1 >= len(expected) or token != drafted[place]:
                    break
                assert each.grammar.ready, "the mask behind a draft that held is known"
                assert np.array_equal(each.grammar.mask, expected[place + 1])
    for each in walked:
        each.grammar.close()
