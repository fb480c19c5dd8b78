"""Media that an engine caches for its sessions."""

import gc

import msgspec
import pytest

from penstock_common.errors import FailedPrecondition, ResourceExhausted
from penstock_common.types.media import MultiModalFeature
from penstock_enginecore.media.core.receiver_cache import (
    CACHE_FULL,
    NOT_CACHED,
    ReceivedFeature,
    ReceiverCache,
    SessionFeatures,
)
from tests.fakes.systems.media_session import identifier_of, item


def keep(session: SessionFeatures, *features: MultiModalFeature) -> list[MultiModalFeature]:
    return session.take([ReceivedFeature(feature, keep=True) for feature in features])


def without_data(feature: MultiModalFeature) -> MultiModalFeature:
    return msgspec.structs.replace(feature, data={})


def test_what_is_kept_may_be_left_out() -> None:
    session = ReceiverCache(1000).session()
    feature = item("a", 100, 20)
    (first,) = keep(session, feature)
    (again,) = session.take([ReceivedFeature(without_data(feature), keep=False)])
    assert again.data is first.data
    assert session.num_bytes == 120


def test_what_is_not_to_be_kept_is_not() -> None:
    session = ReceiverCache(1000).session()
    (taken,) = session.take([ReceivedFeature(item("a", 100), keep=False)])
    assert taken.num_bytes == 100
    assert session.identifiers == frozenset()


def test_what_is_not_there_is_named() -> None:
    session = ReceiverCache(1000).session()
    a, b = item("a", 100), item("b", 100)
    with pytest.raises(FailedPrecondition) as error:
        session.take([ReceivedFeature(a, keep=True), ReceivedFeature(without_data(b), keep=False)])
    assert (error.value.reason, error.value.field) == (NOT_CACHED, "mm_features[1]")
    assert session.identifiers == frozenset()


def test_one_may_stand_for_another_of_the_same_request() -> None:
    session = ReceiverCache(0).session()
    a = item("a", 100)
    first, second = session.take([ReceivedFeature(a, keep=False), ReceivedFeature(without_data(a), keep=False)])
    assert second.data is first.data


def test_what_is_kept_is_bounded() -> None:
    session = ReceiverCache(250).session()
    keep(session, item("a", 100))
    with pytest.raises(ResourceExhausted) as error:
        keep(session, item("b", 100), item("c", 51))
    assert error.value.reason == CACHE_FULL
    assert "the session would cache 251 bytes; the limit is receiver_cache_bytes, 250" in error.value.message
    assert session.identifiers == {identifier_of("a")}
    keep(session, item("b", 150), item("a", 100))
    session.drop([identifier_of("b"), identifier_of("unknown")])
    assert session.num_bytes == 100


def test_the_bytes_of_all_sessions_are_there_once() -> None:
    cache = ReceiverCache(1000)
    one, other = cache.session(), cache.session()
    (first,) = keep(one, item("a", 400))
    (second,) = keep(other, item("a", 400))
    assert second.data is first.data
    assert (cache.num_bytes, len(cache)) == (400, 1)
    one.clear()
    assert (other.num_bytes, len(cache)) == (400, 1)
    other.clear()
    assert len(cache) == 0


def test_a_session_does_not_have_what_another_has_had_kept() -> None:
    cache = ReceiverCache(1000)
    keep(cache.session(), item("a", 100))
    with pytest.raises(FailedPrecondition):
        keep(cache.session(), without_data(item("a", 100)))


def test_a_request_keeps_what_it_needs() -> None:
    cache = ReceiverCache(1000)
    session = cache.session()
    taken = keep(session, item("a", 400))
    cache.clear()
    gc.collect()
    assert (session.num_bytes, cache.num_bytes, taken[0].num_bytes) == (0, 400, 400)
    del taken
    gc.collect()
    assert cache.num_bytes == 0
