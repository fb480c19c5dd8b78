"""Order in which requests leave a draining engine: too slow ones, then those of unknown speed, then all."""

import pytest

from penstock_common.types.outputs import EngineCoreOutput
from penstock_common.types.request import EngineCoreRequest
from penstock_common.types.sampling import SamplingParams
from penstock_frontend.dispatch.drains import Drain
from penstock_frontend.dispatch.journal import Journal, JournalEntry

NOW = 100.0


def entry(name: str, *, max_tokens: int | None = 100, pace: float | None = None) -> JournalEntry:
    """Return a request with 11 tokens at ``NOW``. The last ten took ``pace`` seconds each. Without ``pace`` it has no
    tokens.
    """
    clock = NOW - 10 * pace if pace is not None else NOW
    journal = Journal(lambda: clock, on_left=lambda engine, request_id: None)
    request = EngineCoreRequest(
        request_id=name, prompt_token_ids=[1], sampling_params=SamplingParams(max_tokens=max_tokens)
    )
    [entry] = journal.begin([request])
    journal.assign(entry, "e")
    if pace is not None:
        for offset, count in ((0, 1), (1, 10)):
            journal.accept("e", [EngineCoreOutput(request_id=name, offset=offset, new_token_ids=[7] * count)])
    return entry


def test_those_that_are_too_slow_for_the_tokens_they_may_make_are_late() -> None:
    slow, fast = entry("slow", pace=1.0), entry("fast", pace=0.1)
    assert Drain(NOW, 80.0).late([slow, fast], NOW) == [slow]
    assert Drain(NOW, 100.0).late([slow, fast], NOW) == []


def test_unstarted_requests_are_assumed_to_be_as_fast_as_the_others() -> None:
    others = [entry(f"r{number}", pace=pace) for number, pace in enumerate((0.1, 0.2, 5.0))]
    new = entry("new")
    assert new in Drain(NOW, 15.0).late([*others, new], NOW)
    assert new not in Drain(NOW, 25.0).late([*others, new], NOW)


@pytest.mark.parametrize("known", [entry("r", max_tokens=None, pace=9.0), entry("r")], ids=["max_tokens", "speed"])
def test_what_nobody_can_tell_of_is_late_at_the_last_look_only(known: JournalEntry) -> None:
    drain = Drain(NOW, 20.0)
    assert drain.late([known], NOW) == drain.late([known], NOW + 18.9) == []
    assert drain.late([known], NOW + 19.0) == [known]


def test_without_time_everything_is_late_at_once() -> None:
    one = entry("r", pace=0.001)
    drain = Drain(NOW, 0.0)
    assert (drain.late([one], NOW), drain.next_look(NOW)) == ([one], None)


@pytest.mark.parametrize("time_left", [0.001, 1.0, 30.0, 86_400.0])
def test_looks_come_ever_closer_until_the_last(time_left: float) -> None:
    drain, looks = Drain(NOW, time_left), [NOW]
    while (when := drain.next_look(looks[-1])) is not None:
        looks.append(when)
    assert looks == sorted(set(looks))
    assert len(looks) < 20
    assert NOW + 0.89 * time_left <= looks[-1] <= NOW + time_left
