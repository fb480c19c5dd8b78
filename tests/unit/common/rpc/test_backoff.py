import random

from penstock_common.rpc.reconnect import Backoff


def test_delays_double_up_to_the_maximum_and_are_shortened_by_at_most_half():
    backoff = Backoff(initial=0.1, maximum=1.0, rng=random.Random(1))
    for full in (0.1, 0.2, 0.4, 0.8, 1.0, 1.0):
        assert full / 2 <= backoff.next() <= full


def test_reset_starts_from_the_beginning():
    backoff = Backoff(initial=0.1, maximum=1.0)
    for _ in range(5):
        backoff.next()
    backoff.reset()
    assert backoff.next() <= 0.1


def test_a_lowered_maximum_holds_at_once():
    backoff = Backoff(initial=0.1, maximum=10.0)
    for _ in range(10):
        backoff.next()
    backoff.maximum = 0.5
    assert backoff.next() <= 0.5


def test_clients_do_not_come_back_at_the_same_time():
    assert len({Backoff(initial=1.0, maximum=1.0).next() for _ in range(100)}) > 90
