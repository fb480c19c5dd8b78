"""A coordinator and its frontends as ends of streams, where messages come late, not at all, or after a restart."""

from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from penstock_common.lora_registry import MAX_REGISTRATIONS, Gossip, LoraRegistration, LoraRegistry

FRONTENDS = ("f1", "f2", "f3")
NAMES = st.sampled_from(["a", "b", "c", "d"])
ONE = st.sampled_from(FRONTENDS)


class Stream:
    """Both ends of a frontend's session, and the messages in flight."""

    def __init__(self, frontend, coordinator):
        self.ends = {"up": Gossip(frontend), "down": Gossip(coordinator)}
        self.on_the_way = {"up": deque(), "down": deque()}

    def tell(self, way):
        if news := self.ends[way].tell():
            self.on_the_way[way].append(news)

    def deliver(self, way):
        if self.on_the_way[way]:
            self.ends["down" if way == "up" else "up"].hear(self.on_the_way[way].popleft())


class GossipMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.coordinator = LoraRegistry()
        self.frontends = {name: LoraRegistry() for name in FRONTENDS}
        self.streams = {name: Stream(self.frontends[name], self.coordinator) for name in FRONTENDS}
        self.said = LoraRegistry()
        """Keep the state of a reference that receives every message at once."""

    @rule(frontend=ONE, name=NAMES, unloaded=st.booleans(), path=st.sampled_from(["/x", "/y"]))
    def say(self, frontend, name, unloaded, path):
        registry = self.frontends[frontend]
        new = LoraRegistration(
            name=name, version=registry.next_version, frontend_id=frontend, unloaded=unloaded, path=path
        )
        assert registry.merge([new]) == [new]
        self.said.merge([new])

    @rule(frontend=ONE, way=st.sampled_from(["up", "down"]))
    def tell(self, frontend, way):
        self.streams[frontend].tell(way)

    @rule(frontend=ONE, way=st.sampled_from(["up", "down"]))
    def deliver(self, frontend, way):
        self.streams[frontend].deliver(way)

    @rule(frontend=ONE)
    def stream_breaks(self, frontend):
        self.streams[frontend] = Stream(self.frontends[frontend], self.coordinator)

    @rule()
    def coordinator_restarts(self):
        self.coordinator = LoraRegistry()
        self.streams = {name: Stream(self.frontends[name], self.coordinator) for name in FRONTENDS}

    @invariant()
    def nobody_has_what_is_older_than_it_was(self):
        for registry in (self.coordinator, *self.frontends.values()):
            for each in registry:
                newest = next(said for said in self.said if said.name == each.name)
                assert each.precedence <= newest.precedence

    def teardown(self):
        for _ in range(3):
            for stream in self.streams.values():
                for way in ("up", "down"):
                    stream.tell(way)
                    while stream.on_the_way[way]:
                        stream.deliver(way)
        everything = {each.name: each for each in self.said}
        for registry in (self.coordinator, *self.frontends.values()):
            assert {each.name: each for each in registry} == everything
        for stream in self.streams.values():
            assert [end.tell() for end in stream.ends.values()] == [[], []]


TestGossip = GossipMachine.TestCase
TestGossip.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


@given(st.integers(0, 3 * MAX_REGISTRATIONS))
@settings(max_examples=20, deadline=None)
def test_many_registrations_are_told_in_several_messages(count):
    here, there = LoraRegistry(), LoraRegistry()
    here.merge(LoraRegistration(name=str(n), version=n + 1, frontend_id="f") for n in range(count))
    ends, messages = (Gossip(here), Gossip(there)), 0
    while news := ends[0].tell():
        assert len(news) <= MAX_REGISTRATIONS
        ends[1].hear(news)
        messages += 1
    assert messages == -(-count // MAX_REGISTRATIONS)
    assert (list(there), ends[1].tell()) == (list(here), [])


def test_received_changes_are_not_sent_back():
    frontend, coordinator = LoraRegistry(), LoraRegistry()
    coordinator.merge([LoraRegistration(name="a", version=1, frontend_id="f2")])
    up, down = Gossip(frontend), Gossip(coordinator)
    up.hear(down.tell())
    assert (up.tell(), frontend.get("a").version) == ([], 1)
