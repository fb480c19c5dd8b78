"""Media cached by an engine: the frontend's view, compared with the actual contents."""

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_common.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from penstock_common.tensors.chunks import Limits
from penstock_common.types.media import MultiModalFeature
from penstock_common.types.outputs import EngineCoreOutputs
from penstock_enginecore.media.core.receiver_cache import CACHE_FULL, NOT_CACHED, ReceiverCache
from penstock_frontend.rpc.tensor_sender import MediaMirror
from tests.fakes.systems.media_session import MediaSessionPair, assert_same, identifier_of, item, request_of

QUOTA = 1000
SIZES = {"a": (300,), "b": (400, 50), "c": (900,), "d": (3, 2), "e": (1001,), "f": (600, 400), "g": (2500, 700)}
"""Bytes of items: some go inline, some in chunks, some are too large to be kept."""
ITEMS = {name: item(name, *sizes) for name, sizes in SIZES.items()}
LIMITS = Limits(400, 4096)
"""Limits of messages so small that tensors of 200 bytes or more are sent in chunks."""


def ids(*names: str) -> list[str]:
    return [identifier_of(name) for name in names]


def sent(mirror: MediaMirror, *names: str) -> list[tuple[bool, bool]]:
    return [(each.with_data, each.keep) for each in mirror.send([ITEMS[name] for name in names])]


def test_what_was_kept_is_left_out() -> None:
    mirror = MediaMirror(QUOTA)
    assert sent(mirror, "a", "b") == [(True, True), (True, True)]
    assert sent(mirror, "b", "d") == [(False, False), (True, True)]
    assert (mirror.num_queries, mirror.num_hits) == (4, 1)
    assert mirror.take_drops(10) == []


def test_the_least_recently_used_item_is_evicted() -> None:
    mirror = MediaMirror(QUOTA)
    sent(mirror, "a")
    sent(mirror, "b")
    sent(mirror, "a")
    assert sent(mirror, "f", "d") == [(True, True), (True, False)]
    assert mirror.take_drops(10) == ids("b", "a")
    assert mirror.num_bytes == 1000


def test_what_does_not_fit_drops_nothing() -> None:
    mirror = MediaMirror(QUOTA)
    sent(mirror, "a")
    assert sent(mirror, "e") == [(True, False)]
    assert mirror.take_drops(10) == []
    assert sent(mirror, "a") == [(False, False)]


def test_items_of_one_request_do_not_push_each_other_out() -> None:
    mirror = MediaMirror(QUOTA)
    assert sent(mirror, "a", "c") == [(True, True), (True, False)]
    assert mirror.take_drops(10) == []


def test_an_item_twice_in_a_request_goes_once() -> None:
    mirror = MediaMirror(0)
    assert sent(mirror, "a", "a") == [(True, False), (False, False)]


def test_what_was_cleared_is_dropped_and_goes_with_its_data() -> None:
    mirror = MediaMirror(QUOTA)
    sent(mirror, "a", "b")
    mirror.cleared()
    assert mirror.take_drops(1) == ids("a")
    assert mirror.take_drops(10) == ids("b")
    assert (len(mirror), mirror.num_bytes) == (0, 0)
    assert sent(mirror, "a") == [(True, True)]


def test_what_was_refused_is_dropped_whether_it_was_kept_or_not() -> None:
    mirror = MediaMirror(QUOTA)
    sent(mirror, "a")
    mirror.refused(ids("a", "e"))
    assert set(mirror.take_drops(10)) == set(ids("a", "e"))
    assert len(mirror) == 0


def test_a_request_is_sent_again_with_what_the_engine_has_forgotten() -> None:
    pair = MediaSessionPair(ReceiverCache(QUOTA), limits=LIMITS)
    pair.out.add(request_of("1", ITEMS["a"], ITEMS["d"]))
    pair.settle()
    pair.out.add(request_of("2", ITEMS["a"], ITEMS["b"]))
    pair.send()
    pair.clear()
    pair.settle()
    assert pair.refused == {}
    assert_same(pair.received["2"], [ITEMS["a"], ITEMS["b"]])
    assert pair.kept.identifiers == pair.mirror.identifiers


def test_a_request_that_is_refused_again_and_again_goes_further() -> None:
    pair = MediaSessionPair(ReceiverCache(QUOTA), limits=LIMITS)
    pair.out.add(request_of("1", ITEMS["a"]))
    for _ in range(3):
        pair.spoil["1"] = FailedPrecondition("no", field="mm_features[0]", reason=NOT_CACHED)
        while pair.send():
            pass
        while pair.deliver():
            pass
        assert pair.refused == {}
        pair.hear()
    assert pair.refused["1"].reason == NOT_CACHED
    pair.settle()
    assert pair.kept.identifiers == pair.mirror.identifiers == frozenset()


def test_the_last_time_nothing_is_to_be_kept() -> None:
    pair = MediaSessionPair(ReceiverCache(QUOTA), limits=LIMITS)
    pair.out.add(request_of("1", ITEMS["a"]))
    for _ in range(2):
        pair.spoil["1"] = ResourceExhausted("full", field="mm_features", reason=CACHE_FULL)
        while pair.send():
            pass
        while pair.deliver():
            pass
        pair.hear()
    pair.settle()
    assert_same(pair.received["1"], [ITEMS["a"]])
    assert pair.kept.identifiers == frozenset()


def test_an_abort_while_chunks_are_under_way_leaves_nothing() -> None:
    pair = MediaSessionPair(ReceiverCache(QUOTA), limits=LIMITS)
    pair.out.add(request_of("1", ITEMS["f"]))
    pair.send()
    pair.deliver()
    assert pair.tensors.num_bytes > 0
    pair.out.abort(["1"], "test")
    pair.settle()
    assert (pair.received, pair.kept.identifiers, pair.mirror.identifiers) == ({}, frozenset(), frozenset())
    assert len(pair.tensors) == 0


def test_media_that_are_too_large_for_the_engine_are_refused_here() -> None:
    pair = MediaSessionPair(ReceiverCache(QUOTA), limits=LIMITS)
    pair.out.add(request_of("1", item("large", 3000, 1500)))
    pair.settle()
    assert pair.received == {}
    assert (pair.refused["1"].code, pair.refused["1"].reason) == ("INVALID_ARGUMENT", "MESSAGE_TOO_LARGE")
    assert "4500 bytes once they are processed; engines accept up to 4096" in pair.refused["1"].message


def test_equal_items_of_one_request_go_once_whoever_made_them() -> None:
    pair = MediaSessionPair(ReceiverCache(0), limits=LIMITS)
    one, other = item("f", 600, 400, offset=1), item("f", 600, 400, offset=5)
    pair.out.add(request_of("1", one, other))
    pair.settle()
    assert pair.refused == {}
    assert_same(pair.received["1"], [one, other])


def test_nothing_is_remembered_of_requests_that_have_ended() -> None:
    pair = MediaSessionPair(ReceiverCache(QUOTA), limits=LIMITS)
    for number in range(4):
        pair.out.add(request_of(str(number), ITEMS["a"]))
    pair.settle()
    pair.end("0")
    pair.out.abort(["1"], "test")
    pair.down.append(EngineCoreOutputs(finished_requests=["2"]))
    pair.settle()
    assert pair.out._tensors is not None
    assert list(pair.out._tensors._sent) == ["3"]


names = st.lists(st.sampled_from(sorted(ITEMS)), min_size=1, max_size=3)
steps = st.one_of(
    st.tuples(st.just("add"), names),
    st.tuples(st.just("abort"), st.integers(1, 4)),
    st.tuples(st.just("send"), st.integers(1, 3)),
    st.tuples(st.just("deliver"), st.integers(1, 3)),
    st.tuples(st.just("hear"), st.integers(1, 3)),
    st.tuples(st.just("end"), st.just(0)),
    st.tuples(st.just("clear"), st.just(0)),
    st.tuples(st.just("spoil"), st.sampled_from(["INVALID", NOT_CACHED, CACHE_FULL])),
    st.tuples(st.just("reconnect"), st.just(0)),
)
ERRORS = {
    "INVALID": InvalidArgument("it is broken", field="mm_features[0].data"),
    NOT_CACHED: FailedPrecondition("it is not there", field="mm_features[0]", reason=NOT_CACHED),
    CACHE_FULL: ResourceExhausted("it is full", field="mm_features", reason=CACHE_FULL),
}


class Checked:
    """The two ends of a session. Checks the conditions that must always hold."""

    def __init__(self) -> None:
        self.cache = ReceiverCache(QUOTA)
        self.other = MediaSessionPair(self.cache, limits=LIMITS)
        """Another session, which has the bytes of some items kept already."""
        self.other.out.add(request_of("other", ITEMS["a"], ITEMS["b"]))
        self.other.settle()
        self.pair = MediaSessionPair(self.cache, limits=LIMITS)
        self.requests: dict[str, list[MultiModalFeature]] = {}
        self.aborted: set[str] = set()
        self.ended: set[str] = set()
        self.spoilt: set[str] = set()
        self.count = 0

    def do(self, step: tuple[str, object]) -> None:
        what, how = step
        pair = self.pair
        match what, how:
            case "add", list():
                self.count += 1
                features = [ITEMS[name] for name in how]
                if sum(f.num_bytes for f in {f.identifier: f for f in features}.values()) > LIMITS.max_tensor_bytes:
                    return
                self.requests[str(self.count)] = features
                pair.out.add(request_of(str(self.count), *features))
            case "abort", int():
                request_id = str(self.count - how + 1)
                if request_id in self.requests:
                    self.aborted.add(request_id)
                    pair.out.abort([request_id], "test")
            case "send", int():
                for _ in range(how):
                    pair.send()
            case "deliver", int():
                for _ in range(how):
                    self.deliver()
            case "hear", int():
                for _ in range(how):
                    pair.hear()
            case "end", _:
                if request_id := next(iter(pair.received), ""):
                    pair.end(request_id)
                    self.ended.add(request_id)
            case "clear", _:
                pair.clear()
                self.other.down.append(None)
            case "spoil", str():
                pair.spoil[str(self.count + 1)] = ERRORS[how]
                self.spoilt.add(str(self.count + 1))
            case "reconnect", _:
                pair.close()
                self.pair = MediaSessionPair(self.cache, limits=LIMITS)
                for request_id, features in self.requests.items():
                    if request_id not in self.aborted | self.ended:
                        self.pair.out.add(request_of(request_id, *features))
        self.check()

    def deliver(self) -> None:
        pair = self.pair
        expected = pair.up[0] if pair.up else None
        pair.deliver()
        if expected is not None:
            # The engine never keeps items unknown to the frontend, so it never exceeds its quota.
            assert pair.kept.identifiers <= expected[1]
            assert pair.kept.num_bytes <= expected[2] <= QUOTA

    def check(self) -> None:
        pair = self.pair
        assert pair.kept.num_bytes <= QUOTA
        assert pair.mirror.num_bytes <= QUOTA
        for request_id, received in pair.received.items():
            assert_same(received, self.requests[request_id])

    def settle(self) -> None:
        while self.pair.send():
            self.check()
        while self.pair.up or self.pair.down or self.pair.out:
            self.pair.send()
            self.deliver()
            self.pair.hear()
            self.check()
        self.other.settle()

    def check_end(self) -> None:
        """Check the state after all messages: both ends agree, and every request arrived whole or was refused for its
        own fault.
        """
        pair = self.pair
        for each in (pair, self.other):
            assert each.kept.identifiers == each.mirror.identifiers
            assert each.kept.num_bytes == each.mirror.num_bytes
        assert len(pair.tensors) == 0
        assert len(self.cache) == len(pair.kept.identifiers | self.other.kept.identifiers)
        for request_id in self.requests.keys() - self.aborted - self.ended:
            assert (request_id in pair.received) != (request_id in pair.refused)
        assert set(pair.refused) <= self.spoilt


@settings(max_examples=300, deadline=None)
@given(st.lists(steps, max_size=40))
def test_both_ends_agree_under_any_order_of_events(order: Sequence[tuple[str, object]]) -> None:
    checked = Checked()
    for step in order:
        checked.do(step)
    checked.settle()
    checked.check_end()
