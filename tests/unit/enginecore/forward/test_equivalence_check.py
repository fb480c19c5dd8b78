"""Choice of the forward pass that replaces a model, and cleanup of the other candidates."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

from penstock_enginecore.forward.equivalence_check import Candidate, SpentError, first_proven
from penstock_enginecore.models.errors import UnsuitableError

EXPECTED = torch.arange(12, dtype=torch.float32).view(3, 4)


@dataclass
class Replacement:
    """A candidate whose output is ``result()``. ``fate`` records the calls to it."""

    result: Callable[[], torch.Tensor]
    fate: list[str] = field(default_factory=list)

    def probe(self) -> torch.Tensor:
        return self.result()

    def where(self) -> str:
        return " in the middle"

    def take_over(self) -> "Replacement":
        self.fate.append("took over")
        return self

    def undo(self) -> None:
        self.fate.append("undone")


def failing() -> torch.Tensor:
    raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")


def unsuitable() -> Replacement:
    raise UnsuitableError("its gate has a bias")


def never() -> Replacement:
    raise AssertionError("one before it was proved")


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (lambda: EXPECTED * 1.1, "its results differ by 0.1 in the middle"),
        (lambda: EXPECTED.index_fill(0, torch.tensor([1]), torch.nan), "its results differ by nan in the middle"),
        (failing, "RuntimeError: mat1 and mat2 shapes cannot be multiplied"),
    ],
    ids=["wrong", "nan", "failing"],
)
def test_a_candidate_that_computes_something_else_is_undone_and_the_next_one_tried(
    result: Callable[[], torch.Tensor], reason: str
) -> None:
    wrong, right = Replacement(result), Replacement(lambda: EXPECTED + 1e-6)
    candidates = [Candidate("fast", lambda: wrong), Candidate("slower", lambda: right), Candidate("slow", never)]
    proven = first_proven(candidates, lambda: EXPECTED)
    assert proven.serves is right
    assert (wrong.fate, right.fate) == (["undone"], ["took over"])
    assert proven.name == "slower"
    assert proven.reasons == f"; fast not used: {reason}"
    assert proven.refuted


def test_a_candidate_that_is_not_made_for_the_model_says_why_and_is_no_warning() -> None:
    proven = first_proven([Candidate("decoder", unsuitable)], lambda: EXPECTED)
    assert proven.serves is None
    assert proven.name is None
    assert proven.reasons == "; decoder not used: its gate has a bias"
    assert not proven.refuted


@pytest.mark.parametrize(("dtype", "share"), [(torch.float32, 1e-4), (torch.float16, 0.01), (torch.bfloat16, 0.05)])
def test_results_in_a_narrow_dtype_are_allowed_its_rounding(dtype: torch.dtype, share: float) -> None:
    rounded, wrong = Replacement(lambda: EXPECTED * (1 + share)), Replacement(lambda: EXPECTED * (1 + 10 * share))
    candidates = [Candidate("wrong", lambda: wrong), Candidate("fast", lambda: rounded)]
    assert first_proven(candidates, lambda: EXPECTED.to(dtype)).serves is rounded


def test_a_candidate_that_rounds_is_allowed_that() -> None:
    rounded = Replacement(lambda: EXPECTED * 1.05)
    candidates = [
        Candidate("exact", lambda: Replacement(lambda: EXPECTED * 1.05)),
        Candidate("rounded", lambda: rounded, torch.bfloat16),
    ]
    assert first_proven(candidates, lambda: EXPECTED).serves is rounded


@pytest.mark.parametrize("agreed", [False, True])
def test_a_candidate_that_consumed_the_weights_is_final_and_the_last_one_tried(agreed: bool) -> None:
    spent = Replacement(lambda: EXPECTED if agreed else 2 * EXPECTED)
    candidates = [
        Candidate("decoder", unsuitable),
        Candidate("linear", lambda: spent, spends=True),
        Candidate("slow", never),
    ]
    with pytest.raises(SpentError, match="^decoder not used: its gate has a bias; linear not used: "):
        first_proven(candidates, lambda: EXPECTED, lambda ok: ok and not agreed)
    assert not spent.fate


def test_without_candidates_the_model_does_not_run() -> None:
    assert first_proven([], failing).serves is None


def test_ranks_of_one_model_take_the_same_candidate() -> None:
    answers = iter([False, True, False, True, True])
    asked: list[bool] = []

    def agree(ok: bool) -> bool:
        asked.append(ok)
        return ok and next(answers)

    unbuilt, other, right = (Replacement(lambda: EXPECTED) for _ in range(3))
    candidates = [Candidate("built here alone", lambda: unbuilt), Candidate("right here alone", lambda: other)]
    proven = first_proven([*candidates, Candidate("right", lambda: right)], lambda: EXPECTED, agree)
    assert proven.serves is right
    assert (unbuilt.fate, other.fate) == (["undone"], ["undone"])
    assert asked == [True] * 5
    assert proven.unsuitable == {"built here alone": "another worker cannot use it"}
    assert proven.refuted == {"right here alone": "another worker cannot use it"}


def test_a_rank_that_cannot_build_a_candidate_says_so_to_the_others() -> None:
    asked: list[bool] = []

    def agree(ok: bool) -> bool:
        asked.append(ok)
        return ok

    assert first_proven([Candidate("decoder", unsuitable)], lambda: EXPECTED, agree).serves is None
    assert asked == [False]
