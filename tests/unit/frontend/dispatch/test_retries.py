"""Failures that a request may survive, and suspicions that are withdrawn when it proves innocent."""

import pytest

from penstock_common.types.request import EngineCoreRequest, RequestContext
from penstock_common.types.sampling import SamplingParams
from penstock_frontend.config import RetriesConfig
from penstock_frontend.dispatch.journal import Call, JournalEntry
from penstock_frontend.dispatch.retries import Blame, Retries


def entry() -> JournalEntry:
    request = EngineCoreRequest(
        request_id="r", prompt_token_ids=[1], sampling_params=SamplingParams(), context=RequestContext()
    )
    return JournalEntry(request, Call())


def lose(
    retries: Retries, entry: JournalEntry, engine: str, blame: Blame = Blame.ALONE, *, in_doubt: bool = True
) -> str:
    """Lose the request's engine. Returns the reason of the error that ends the request, or "" if it is tried again."""
    entry.engine = engine
    error = retries.verdict(entry, f"{engine} is gone", blame, in_doubt=in_doubt)
    if error is None:
        entry.leave()
    return "" if error is None else error.reason


def reason(error: object) -> str:
    return getattr(error, "reason", "")


@pytest.fixture
def retries() -> Retries:
    return Retries(RetriesConfig(max_strikes=3, max_moves=8))


def test_two_losses_alone_are_enough_when_they_are_certain(retries: Retries) -> None:
    one = entry()
    assert lose(retries, one, "a", in_doubt=False) == ""
    assert not retries.is_in_doubt(one)
    assert lose(retries, one, "b", in_doubt=False) == "QUARANTINED"


@pytest.mark.parametrize("blame", [Blame.ALONE, Blame.SHARED])
def test_losses_in_doubt_end_nothing_and_keep_from_the_next_engine(retries: Retries, blame: Blame) -> None:
    one = entry()
    enough = 2 if blame is Blame.ALONE else 3
    for engine in "abc"[: enough - 1]:
        assert lose(retries, one, engine, blame) == ""
        assert not retries.is_in_doubt(one)
    assert lose(retries, one, "d", blame) == ""
    assert retries.is_in_doubt(one)


def test_an_engine_that_lives_takes_its_loss_back(retries: Retries) -> None:
    one = entry()
    for engine in "ab":
        lose(retries, one, engine)
    retries.acquit(one, "c")
    assert retries.is_in_doubt(one)
    retries.acquit(one, "a")
    assert not retries.is_in_doubt(one)
    assert (one.losses, one.losses_alone) == (1, 1)
    retries.acquit(one, "b")
    assert (one.losses, one.losses_alone, retries.is_suspect(one)) == (0, 0, False)


def test_each_engine_that_has_died_counts_and_the_last_one_ends_it(retries: Retries) -> None:
    one = entry()
    for engine in "ab":
        lose(retries, one, engine)
    assert reason(retries.accuse(one, "c")) == ""
    assert reason(retries.accuse(one, "b")) == ""
    assert retries.is_in_doubt(one)
    error = retries.accuse(one, "a")
    assert reason(error) == "QUARANTINED"
    assert "2 engines in a row failed while this request was the only request on the engine" in str(error)
    assert str(error).endswith("Last loss: b is gone")


def test_certain_losses_and_those_in_doubt_count_together_until_it_is_known(retries: Retries) -> None:
    one = entry()
    lose(retries, one, "a", in_doubt=False)
    lose(retries, one, "b")
    assert retries.is_in_doubt(one)
    retries.acquit(one, "b")
    assert not retries.is_in_doubt(one)
    assert lose(retries, one, "b", in_doubt=False) == "QUARANTINED"


def test_what_an_engine_brings_clears_what_was_in_doubt(retries: Retries) -> None:
    one = entry()
    lose(retries, one, "a")
    one.progressed = True
    lose(retries, one, "b")
    assert (one.losses, one.doubts) == (0, {})
    retries.acquit(one, "a")
    assert reason(retries.accuse(one, "a")) == ""
    assert (one.losses, one.losses_alone) == (0, 0)


def test_what_is_never_known_counts_in_the_end(retries: Retries) -> None:
    one = entry()
    for engine in "ab":
        lose(retries, one, engine)
    assert reason(retries.presume(one)) == "QUARANTINED"
    assert not retries.is_in_doubt(one)


def test_moves_are_bounded_also_when_every_engine_lives(retries: Retries) -> None:
    one = entry()
    for _ in range(8):
        assert lose(retries, one, "a") == ""
        retries.acquit(one, "a")
    assert lose(retries, one, "a") == "RETRIES_EXHAUSTED"


def test_a_suspect_in_doubt_gives_its_turn_away(retries: Retries) -> None:
    one, other = entry(), entry()
    for suspect in (one, other):
        for engine in "ab":
            lose(retries, suspect, engine, Blame.SHARED)
    assert retries.may_go(one)
    assert not retries.may_go(other)
    assert not retries.trial_over()
    lose(retries, one, "c", Blame.SHARED)
    assert retries.is_in_doubt(one)
    assert retries.trial_over()
    assert retries.may_go(other)
