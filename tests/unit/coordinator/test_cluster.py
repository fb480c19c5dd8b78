from penstock_coordinator.cluster import Frontends


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
