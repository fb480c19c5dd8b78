"""The numbers under which requests are sent to engines."""

import time

from penstock_common.types.request import EngineCoreRequest
from penstock_frontend.dispatch.journal import Journal, JournalEntry


def empty() -> Journal:
    return Journal(time.monotonic, on_left=lambda engine, request_id: None)


def entries(journal: Journal, *request_ids: str) -> list[JournalEntry]:
    return journal.begin([EngineCoreRequest(request_id=i, prompt_token_ids=[1]) for i in request_ids])


def test_numbers_begin_again_when_they_are_used_up_and_pass_over_those_in_use() -> None:
    journal = empty()
    first, second, third = entries(journal, "a", "b", "c")
    journal.assign(first, "engine")
    journal._last_number = 2**32 - 2
    journal.assign(second, "engine")
    journal.assign(third, "engine")
    assert [first.number, second.number, third.number] == [1, 2**32 - 1, 2]


def test_a_request_is_sent_under_its_number() -> None:
    journal = empty()
    (entry,) = entries(journal, "a")
    journal.assign(entry, "engine")
    assert entry.to_send().request_number == entry.number != 0


def test_a_request_without_an_engine_has_no_number() -> None:
    journal = empty()
    (entry,) = entries(journal, "a")
    journal.assign(entry, "engine")
    journal.leave(entry)
    assert entry.number == 0
