"""Any order of events: the members are those whose lease is live, and only the latest session speaks for each."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock_common.types.cluster import EngineRegistration
from penstock_common.types.outputs import SchedulerStats
from penstock_coordinator.membership import Change, IdTaken, MemberChanged, Membership, SessionEnded, engine_status

LEASE = 10
ENGINES = st.sampled_from(["a", "b", "c", "d"])
INCARNATIONS = st.sampled_from(["1", "2", "3"])


class Model:
    """Expected state of one member, from a simple model of the events."""

    def __init__(self, incarnation, session, expires_at, draining, address):
        self.incarnation = incarnation
        self.address = address
        self.session = session
        self.expires_at = expires_at
        self.draining = draining
        self.former = set()
        self.step = 0
        self.index = None


class MembershipMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.now = 0
        self.membership = Membership(lease_seconds=LEASE, now=0)
        self.sessions = []
        self.live = {}

    def owner(self, session):
        return next((name for name, model in self.live.items() if model.session == session), None)

    @rule(
        engine_id=ENGINES,
        incarnation=INCARNATIONS,
        draining=st.booleans(),
        address=st.sampled_from(["h:1", "h:1", "h:2"]),
    )
    def register(self, engine_id, incarnation, draining, address):
        session = len(self.sessions)
        self.sessions.append(engine_id)
        registration = EngineRegistration(
            engine_id=engine_id, incarnation=incarnation, address=address, model="m", draining=draining
        )
        (effect,) = self.membership.register(session, registration, self.now)
        known = self.live.get(engine_id)
        if known is not None and incarnation in known.former:
            assert isinstance(effect, SessionEnded)
            return
        if known is not None and incarnation != known.incarnation and address != known.address:
            assert isinstance(effect, IdTaken)
            return
        assert isinstance(effect, MemberChanged)
        model = Model(incarnation, session, self.now + LEASE, draining, address)
        if known is None:
            assert effect.change is Change.JOINED
            assert effect.index == min(set(range(5)) - {m.index for m in self.live.values()})
        else:
            assert effect.index == known.index
            model.former = known.former
            if incarnation == known.incarnation:
                model.draining |= known.draining
                model.step = known.step
            else:
                model.former = known.former | {known.incarnation}
        model.index = effect.index
        self.live[engine_id] = model

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), step=st.integers(0, 20), with_stats=st.booleans())
    def report(self, data, step, with_stats):
        session = data.draw(st.integers(0, len(self.sessions) - 1))
        stats = SchedulerStats(step_counter=step) if with_stats else None
        effects = self.membership.report(session, stats, self.now)
        owner = self.owner(session)
        assert bool(effects) == (owner is None)
        if owner is not None:
            self.live[owner].expires_at = self.now + LEASE
            self.live[owner].step = max(self.live[owner].step, step if with_stats else 0)

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def drain(self, data):
        session = data.draw(st.integers(0, len(self.sessions) - 1))
        self.membership.drain(session, self.now)
        if (owner := self.owner(session)) is not None:
            self.live[owner].draining = True
            self.live[owner].expires_at = self.now + LEASE

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def leave(self, data):
        session = data.draw(st.integers(0, len(self.sessions) - 1))
        self.membership.leave(session)
        if (owner := self.owner(session)) is not None:
            del self.live[owner]

    @rule(seconds=st.integers(1, LEASE // 2))
    def tick(self, seconds):
        self.now += seconds
        expired = {name for name, model in self.live.items() if model.expires_at <= self.now}
        effects = self.membership.tick(self.now)
        assert {effect.engine_id for effect in effects} == expired
        for name in expired:
            del self.live[name]

    @rule(seconds=st.integers(LEASE // 2 + 1, 10 * LEASE))
    def stall(self, seconds):
        self.now += seconds
        assert self.membership.tick(self.now) == []
        for model in self.live.values():
            model.expires_at = self.now + LEASE

    @invariant()
    def members_are_the_live_ones(self):
        members = {m.registration.engine_id: m for m in self.membership.members}
        assert members.keys() == self.live.keys()
        for name, model in self.live.items():
            assert members[name].index == model.index
            assert members[name].registration.incarnation == model.incarnation
            assert members[name].draining == model.draining
            assert members[name].stats.step_counter == model.step

    @invariant()
    def the_view_has_unique_indices_in_order(self):
        indices = [engine_status(member).index for member in self.membership.members]
        assert indices == sorted(set(indices))

    @invariant()
    def nothing_is_remembered_of_ended_sessions(self):
        assert len(self.membership._engine_of_session) == len(self.live)


TestMembership = MembershipMachine.TestCase
TestMembership.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
