"""When a frontend is to be sent requests."""

from penstock_frontend.calls.admission import DRAINING, FULL, SEEN, Readiness


def test_it_is_ready_from_the_first_engine_on_whatever_becomes_of_it() -> None:
    readiness = Readiness(without_engines=False)
    assert not readiness.update(engine=False, view=True, full=False)
    assert (readiness.ready, readiness.answers, readiness.why) == (False, False, SEEN)
    assert readiness.update(engine=True, view=True, full=False)
    assert not readiness.update(engine=False, view=True, full=False)
    assert (readiness.ready, readiness.why) == (True, "")


def test_without_engines_it_is_ready_from_the_first_view_on() -> None:
    readiness = Readiness(without_engines=True)
    assert not readiness.update(engine=False, view=False, full=False)
    assert readiness.update(engine=False, view=True, full=False)
    assert readiness.ready


def test_it_is_not_ready_while_it_is_full() -> None:
    readiness = Readiness(without_engines=False)
    readiness.update(engine=True, view=False, full=False)
    assert readiness.update(engine=True, view=False, full=True)
    assert readiness.why == FULL
    assert readiness.answers
    assert readiness.update(engine=False, view=False, full=False)
    assert readiness.ready


def test_it_is_not_ready_any_more_once_it_drains() -> None:
    readiness = Readiness(without_engines=False)
    readiness.update(engine=True, view=False, full=False)
    readiness.drain(moves_clients=False)
    assert not readiness.update(engine=True, view=False, full=False)
    assert readiness.why == DRAINING
    assert not readiness.answers


def test_while_it_moves_its_clients_they_may_begin_calls_until_it_closes() -> None:
    readiness = Readiness(without_engines=False)
    readiness.update(engine=True, view=False, full=False)
    readiness.drain(moves_clients=True)
    assert (readiness.ready, readiness.answers) == (False, True)
    readiness.close()
    assert not readiness.answers
