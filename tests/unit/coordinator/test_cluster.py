from penstock_coordinator.cluster import Frontends
from penstock_coordinator.view_channel import Subscription


def test_held_requests_are_summed_and_leave_with_their_frontend():
    frontends = Frontends()
    frontends.connect(1, "a")
    frontends.connect(2, "b")
    frontends.demand(1, "a", 3)
    frontends.demand(2, "b", 4)
    assert (len(frontends), frontends.num_held_requests) == (2, 7)
    frontends.disconnect(1, "a")
    assert (len(frontends), frontends.num_held_requests) == (1, 4)


def test_an_old_stream_of_a_reconnected_frontend_changes_nothing():
    frontends = Frontends()
    frontends.connect(1, "a")
    frontends.connect(2, "a")
    frontends.demand(1, "a", 9)
    frontends.disconnect(1, "a")
    assert (len(frontends), frontends.num_held_requests) == (1, 0)


def test_held_requests_count_for_the_pools_and_models_of_their_stream():
    frontends = Frontends()
    frontends.connect(1, "f", Subscription(model="a", pools=frozenset({"large"})))
    frontends.connect(2, "f/b", Subscription(model="b"))
    frontends.demand(1, "f", 3)
    frontends.demand(2, "f/b", 4)
    assert frontends.held_for("large", {"a"}) == 3
    assert frontends.held_for("small", {"b"}) == 4
    assert frontends.held_for("small", {"a"}) == 0
    assert frontends.held_for("large", ()) == 7  # a pool without engines: its model is not known
    assert frontends.held_for("small", ()) == 4
