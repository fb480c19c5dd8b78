"""Hostile constraints are refused or end only their own request, and other grammars continue."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock_common.errors import RequestFailed
from penstock_common.types.sampling import StructuredOutput
from penstock_enginecore.config import EngineCoreConfig, ModelConfig
from penstock_enginecore.structured_output.backend import XgrammarBackend
from penstock_enginecore.structured_output.factory import make_grammar_backend
from tests.fakes.engines.followed import Followed, allowed, follow
from tests.fakes.models.hostile_constraints import HOSTILE

pytestmark = pytest.mark.slow

MODEL = Path(__file__).resolve().parents[4] / "examples/demo_model/penstock-tiny"
TOKENS = 40
REFUSED = {"INVALID_ARGUMENT"}
CODES = {"refused": [REFUSED], "served": [set()], "either": [set(), REFUSED, {"RESOURCE_EXHAUSTED"}]}


@pytest.fixture(scope="module")
def backend() -> Iterator[XgrammarBackend]:
    config = EngineCoreConfig(model=ModelConfig(path=str(MODEL)))
    made = make_grammar_backend(config, vocab_size=2048, eos_token_ids=frozenset({1}))
    assert isinstance(made, XgrammarBackend)
    yield made
    made.shutdown()


@pytest.fixture(scope="module")
def neighbour(backend: XgrammarBackend) -> Followed:
    return follow(backend, regex="([a-z]{3} )*")


def walk(backend: XgrammarBackend, constraint: dict[str, object]) -> None:
    """Take the same token of a constraint as long as it is allowed."""
    backend.check(StructuredOutput(**constraint))  # type: ignore[arg-type]
    followed, token = follow(backend, **constraint), -1
    for _ in range(TOKENS):
        if not (choices := allowed(followed.grammar.mask)):
            return
        token = token if token in choices else min(choices)
        assert followed.accept([token])


def code(backend: XgrammarBackend, constraint: dict[str, object]) -> set[str]:
    """Return the code of the error that ends a constraint."""
    try:
        walk(backend, constraint)
    except RequestFailed as e:
        return {e.code} if e.field.startswith("sampling_params.structured_output") else {e.field}
    return set()


def test_there_are_twenty_two():
    assert len(HOSTILE) == 22


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_constraint_gets_its_verdict_and_its_neighbour_goes_on(
    backend: XgrammarBackend, neighbour: Followed, name: str
):
    constraint, verdict = HOSTILE[name]
    assert code(backend, constraint) in CODES[verdict]
    before = allowed(neighbour.grammar.mask)
    assert neighbour.accept([min(before - {1})])
    assert allowed(neighbour.grammar.mask)
