import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_common.lora_registry import LoraRegistration, LoraRegistry

NAMES = ("a", "b", "c")
REGISTRATIONS = st.builds(
    LoraRegistration,
    name=st.sampled_from(NAMES),
    version=st.integers(1, 5),
    frontend_id=st.sampled_from(["f1", "f2"]),
    unloaded=st.booleans(),
    path=st.sampled_from(["/x", "/y"]),
    digest=st.sampled_from([b"", b"1" * 16]),
    pinned=st.booleans(),
)


def of(name, version, frontend_id="f", **said):
    return LoraRegistration(name=name, version=version, frontend_id=frontend_id, path=f"/{version}", **said)


@given(st.lists(REGISTRATIONS, max_size=30).flatmap(lambda said: st.tuples(st.just(said), st.permutations(said * 2))))
def test_any_order_and_number_of_deliveries_comes_to_the_same(deliveries):
    said, shuffled = deliveries
    first, second = LoraRegistry(), LoraRegistry()
    first.merge(said)
    for each in shuffled:
        second.merge([each])
    assert {each.name: each for each in first} == {each.name: each for each in second}
    assert (len(first), first.next_version, first.loaded()) == (len(second), second.next_version, second.loaded())


@given(st.lists(REGISTRATIONS, max_size=30))
def test_changes_are_told_once_and_in_order(said):
    registry, place, told = LoraRegistry(), 0, {}
    for each in said:
        changed = registry.merge([each])
        changes = registry.changes_since(place)
        assert [registration for _, registration in changes] == changed
        place = max([place, *(at for at, _ in changes)])
        told.update((registration.name, registration) for _, registration in changes)
    assert told == {each.name: each for each in registry}
    assert dict(told) == {each.name: each for _, each in registry.changes_since(0)}


def test_a_late_load_does_not_undo_an_unload():
    registry = LoraRegistry()
    registry.merge([of("a", 1), of("a", 2, unloaded=True)])
    assert registry.merge([of("a", 1), of("a", 1, "zz")]) == []
    assert (registry.get("a"), len(registry)) == (None, 0)
    assert registry.merge([of("a", registry.next_version)])
    assert (registry.get("a").path, len(registry)) == ("/3", 1)


def test_of_one_version_the_higher_frontend_counts():
    registry = LoraRegistry()
    registry.merge([of("a", 4, "f2", digest=b"2"), of("a", 4, "f1", digest=b"1")])
    assert registry.get("a").digest == b"2"


def test_the_next_version_is_above_those_of_all_names_and_of_what_did_not_count():
    registry = LoraRegistry()
    assert registry.next_version == 1
    registry.merge([of("a", 7), of("b", 3), of("a", 5)])
    assert registry.next_version == 8


@pytest.mark.parametrize("order", [range(1, 9), range(8, 0, -1)])
def test_the_newest_unloads_are_remembered(order):
    registry = LoraRegistry(max_unloaded=3)
    registry.merge([of("kept", 1)])
    for version in order:
        registry.merge([of(f"n{version}", version, unloaded=True)])
    assert {each.name for each in registry} == {"kept", "n6", "n7", "n8"}
    assert (len(registry), [each.name for each in registry.loaded()]) == (1, ["kept"])
    assert registry.merge([of("n8", 7)]) == []


def test_no_unload_is_remembered_where_none_is_to_be():
    registry = LoraRegistry(max_unloaded=0)
    registry.merge([of("a", 1), of("a", 2, unloaded=True)])
    assert (list(registry), len(registry)) == ([], 0)
