"""The grammar process, and other requests' grammars when a constraint kills it."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import xgrammar

from penstock_common.errors import Internal, InvalidArgument, ResourceExhausted, Unavailable
from penstock_enginecore.config import StructuredOutputConfig
from penstock_enginecore.structured_output.following_client import CompiledConstraint, GrammarFollower
from penstock_enginecore.structured_output.grammar_processes import Children, Masks, Ready, Result
from tests.fakes.engines.followed import TIMEOUT, Followed, allowed

A, LONG, B, EOS = range(4)
INFO = xgrammar.TokenizerInfo([b"a", b"a" * 64, b"b", b""], xgrammar.VocabType.RAW, vocab_size=4, stop_token_ids=[EOS])
COMPILER = xgrammar.GrammarCompiler(INFO, max_threads=1)
LETTERS = "root ::= [ab]*\n"
PAIRS = 'root ::= ("a" "b")*\n'
EXPLODES = 'root ::= x{0,1000} "b"\nx ::= "a"{0,1000}\n'
"""After the long token, this grammar has too many possible continuations to compute in time."""


CONFIG = StructuredOutputConfig(token_budget=0.05)


@pytest.fixture(scope="module")
def children() -> Iterator[Children]:
    made = Children(CONFIG)
    yield made
    made.close()
    made.thread.shutdown()


@pytest.fixture
def follower(children: Children) -> Iterator[GrammarFollower]:
    made = GrammarFollower(CONFIG, 4, frozenset({EOS}), children)
    made.start(INFO.serialize_json().encode())
    yield made
    made.close()


def compiled(follower: GrammarFollower, grammar: str) -> CompiledConstraint:
    return follower.compiled("grammar", COMPILER.compile_grammar(grammar).serialize_json().encode())


def begun(follower: GrammarFollower, grammar: str, tokens: tuple[int, ...] = ()) -> Followed:
    grammar_ = follower.begin(compiled(follower, grammar), tokens, lambda: None).result(TIMEOUT)
    return Followed(follower, grammar_)  # type: ignore[arg-type]


def may(followed: Followed) -> set[int]:
    followed.settle()
    return allowed(followed.grammar.mask)


def worker(follower: GrammarFollower) -> int:
    """Return the pid of the process that follows tokens: the only child of the started process."""
    pid = follower.pid
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    return int(child)


def test_masks_follow_the_tokens(follower: GrammarFollower):
    pairs = begun(follower, PAIRS)
    assert may(pairs) == {A, EOS}
    assert not pairs.accept([B])
    assert pairs.accept([A])
    assert may(pairs) == {B}
    assert pairs.accept([B, EOS])
    assert pairs.terminated
    assert not pairs.accept([A])


def test_a_request_begins_behind_the_tokens_it_has(follower: GrammarFollower):
    assert may(begun(follower, PAIRS, (A, B, A))) == {B}
    with pytest.raises(
        InvalidArgument, match="has tokens that the constraint in structured_output does not allow"
    ) as e:
        begun(follower, PAIRS, (A, A))
    assert e.value.field == "prior_output_token_ids"


def test_a_token_that_hangs_ends_its_request_and_the_others_go_on(follower: GrammarFollower):
    pairs, letters, explodes = (begun(follower, grammar) for grammar in (PAIRS, LETTERS, EXPLODES))
    assert pairs.accept([A])
    with pytest.raises(ResourceExhausted, match="more than 50 ms of CPU time for one token") as e:
        explodes.accept([LONG])
    assert (e.value.field, e.value.reason) == ("grammar", "GRAMMAR_TOO_COSTLY")
    assert may(pairs) == {B}
    assert pairs.accept([B])
    assert letters.accept([LONG, B])
    assert may(letters) == {A, LONG, B, EOS}


def test_requests_outlive_the_process(follower: GrammarFollower):
    pairs = begun(follower, PAIRS)
    assert pairs.accept([A])
    for _ in range(3):
        os.kill(worker(follower), signal.SIGKILL)
        assert begun(follower, LETTERS).accept([A])
        assert may(pairs) == {B}
    assert pairs.accept([B, A])
    assert may(pairs) == {B}


def test_a_process_that_is_lost_for_good_fails_what_it_followed_and_is_started_again(follower: GrammarFollower):
    pairs, told = begun(follower, PAIRS), []
    pairs.grammar.changed = lambda: told.append(True)  # type: ignore[attr-defined]
    os.kill(follower.pid or 0, signal.SIGKILL)
    while not told:
        follower.wait([])
    assert isinstance(pairs.grammar.failure, Internal)
    assert "the process that computes grammar masks ended" in pairs.grammar.failure.message
    assert not follower.running
    follower.start(INFO.serialize_json().encode())
    assert may(begun(follower, PAIRS)) == {A, EOS}


def test_closing_fails_what_waits(follower: GrammarFollower):
    waiting = follower.begin(compiled(follower, PAIRS), (), lambda: None)
    follower.close()
    follower.close()
    assert isinstance(waiting.exception(TIMEOUT), Unavailable)
    assert isinstance(follower.begin(compiled(follower, PAIRS), (), lambda: None).exception(TIMEOUT), Unavailable)


def test_a_failure_inside_ends_its_request_with_an_incident(follower: GrammarFollower):
    pairs, letters = begun(follower, PAIRS), begun(follower, LETTERS)
    failed = Result(pairs.grammar.number, "failed", text="RuntimeError: broken")  # type: ignore[attr-defined]
    for tell in follower._take(Masks(follower._generation, [failed], b"")):
        tell()
    assert isinstance(pairs.grammar.failure, Internal)
    assert pairs.grammar.failure.reason == "INCIDENT"
    assert "broken" not in pairs.grammar.failure.message
    assert letters.accept([A])


def test_a_mask_is_not_taken_for_that_of_a_later_token(follower: GrammarFollower):
    pairs = begun(follower, PAIRS)
    assert pairs.grammar.accept(A)
    stale = Result(pairs.grammar.number, "mask", taken=0)  # type: ignore[attr-defined]
    follower._take(Masks(follower._generation, [stale], np.array([9], np.int32).tobytes()))
    assert not pairs.grammar.ready
    assert may(pairs) == {B}


def test_masks_behind_drafts_are_not_taken_for_those_of_others(follower: GrammarFollower):
    pairs = begun(follower, PAIRS)
    for drafts in ([A, B], [A, A]):  # a failed step is repeated
        pairs.grammar.draft(drafts)
        follower.flush()
    while not pairs.grammar.drafted:
        follower.wait([pairs.grammar])
    assert [allowed(mask) for mask in pairs.grammar.draft_masks] == [{B}]


def test_nobody_waits_for_masks_behind_drafts_of_a_step_that_is_over(follower: GrammarFollower):
    pairs = begun(follower, PAIRS)
    pairs.grammar.draft([A, B])
    assert not pairs.grammar.drafted
    assert pairs.grammar.accept(A)
    assert pairs.grammar.drafted
    assert may(pairs) == {B}
    assert not pairs.grammar.draft_masks


def test_a_late_mask_is_told_and_only_then(follower: GrammarFollower):
    pairs, told = begun(follower, PAIRS), []
    pairs.grammar.changed = lambda: told.append(True)  # type: ignore[attr-defined]
    assert pairs.accept([A])
    assert not told
    assert pairs.grammar.accept(B)
    assert not pairs.grammar.missed()
    pairs.settle()
    while not told:
        follower.wait([])
    assert pairs.grammar.missed()


def test_a_process_that_ends_once_at_a_token_is_followed_by_another(follower: GrammarFollower):
    """If the process ends twice, the constraint is at fault. If it ends once, the machine may have been busy."""
    pairs = begun(follower, PAIRS)
    suspect = pairs.grammar.number  # type: ignore[attr-defined]
    told = follower._take_over(Ready(follower._generation, [suspect], costly=True))
    assert not told
    assert pairs.grammar.failure is None
    (tell,) = follower._take_over(Ready(follower._generation, [suspect], costly=True))
    tell()
    assert isinstance(pairs.grammar.failure, ResourceExhausted)
