"""Adapters that a name may mean while it is being changed."""

from tests.soak.lora.names import Names


def test_a_name_is_unknown_before_loading_and_ambiguous_until_acknowledged() -> None:
    names = Names()
    assert names.possible("a", 0, 1) == {None}
    span = names.begin("a", 3, 10)
    assert names.possible("a", 5, 9) == {None}
    assert names.possible("a", 5, 10) == {None, 3}
    assert names.possible("a", 50, 60) == {None, 3}
    names.done("a", span, 12)
    assert names.possible("a", 11, 13) == {None, 3}
    assert names.possible("a", 12.1, 13) == {3}
    assert names.now("a") == 3


def test_what_was_replaced_holds_no_more_once_that_is_acknowledged() -> None:
    names = Names()
    names.done("a", names.begin("a", 1, 0), 1)
    second = names.begin("a", 2, 10)
    names.done("a", second, 11)
    assert names.possible("a", 2, 9) == {1}
    assert names.possible("a", 9, 10.5) == {1, 2}
    assert names.possible("a", 11.5, 12) == {2}
    names.done("a", names.begin("a", None, 20), 21)
    assert names.possible("a", 22, 23) == {None}
    assert names.now("a") is None


def test_a_change_that_was_refused_leaves_what_there_was() -> None:
    names = Names()
    names.done("a", names.begin("a", 1, 0), 1)
    names.failed(names.begin("a", 2, 5), 6)
    assert names.possible("a", 5, 5.5) == {1, 2}
    assert names.possible("a", 7, 8) == {1}
    assert names.now("a") == 1


def test_files_may_be_others_only_while_they_are_exchanged() -> None:
    names = Names()
    span = names.exchange("a", 5)
    assert names.exchanged("a", 4, 6)
    span.ended = 7
    assert names.exchanged("a", 6.9, 20)
    assert not names.exchanged("a", 7.1, 20)
    assert not names.exchanged("a", 1, 4)
    assert not names.exchanged("b", 1, 20)
