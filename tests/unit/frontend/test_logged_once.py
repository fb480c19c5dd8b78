"""Memory of a client's log lines, so that each thing is logged once."""

from penstock_frontend.call_warnings import LoggedOnce


def test_a_thing_is_new_once_per_client() -> None:
    once = LoggedOnce()
    assert once.new("a", ["x", "y", "x"]) == ["x", "y"]
    assert once.new("a", ["y", "z"]) == ["z"]
    assert once.new("b", ["x"]) == ["x"]


def test_the_client_that_was_heard_of_longest_ago_is_forgotten_first() -> None:
    once = LoggedOnce()
    for number in range(1024):
        once.new(f"client {number}", ["x"])
    assert once.new("client 0", ["x"]) == []
    assert once.new("one more", ["x"]) == ["x"]
    assert once.new("client 0", ["x"]) == []
    assert once.new("client 1", ["x"]) == ["x"]


def test_a_client_has_at_most_64_things() -> None:
    once = LoggedOnce()
    assert len(once.new("a", [f"x{number}" for number in range(100)])) == 64
    assert once.new("a", ["y"]) == []
