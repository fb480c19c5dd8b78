"""Variants of the state machines with one defect each, which the exploration must find.

Some defects are published defects of vLLM.
"""

from typing import NamedTuple

import msgspec

from penstock_common.types.data_parallel import PauseMode, StartWave
from penstock_coordinator.group import GroupMachine, Waves
from penstock_enginecore.data_parallel.core.rank import Forward, Phase, Rank, agree
from penstock_frontend.dispatch.wave_state import Waves as Belief
from tests.modelcheck.bounds import Bounds
from tests.modelcheck.protocol import Protocol

replaced = msgspec.structs.replace


class Mutation(NamedTuple):
    name: str
    protocol: Protocol
    bounds: Bounds
    rules: tuple[str, ...]
    """Numbers of the violated invariants. The exploration finds the violation with the fewest events."""


ONE = Bounds(requests=(0,))
TWO = Bounds(requests=(0, 0))
PAUSED = Bounds(requests=(0,), pause_calls=("keep", "resume"))
GROWS = Bounds(requests=(0,), scales=(3,), spares=1)

GROWS_IDLE = Bounds(requests=(), scales=(3,), spares=1, failed_preparations=1)
BREAKS = Bounds(requests=(0,), broken_collectives=1)
LOSES = Bounds(requests=(0,), losses=1)
SILENT = Bounds(requests=(0,), ticks=False)

# Defects of ranks.


class PausesAlone(Rank, frozen=True):
    def start_dp_wave(self, message):
        return (self, ()) if self.pauses.on else super().start_dp_wave(message)


class AgreesAlone(Rank, frozen=True):
    def gathered(self, rows):
        after, effects = super().gathered(rows)
        if self.pauses.on and self.pauses > max(row.pauses for row in rows) and after.phase is Phase.FORWARD:
            return after._stop(completed=True)
        return after, effects


class WaitsForItsOwnBroadcast(Rank, frozen=True):
    def add(self, epoch, wave, *, refused=False):
        after, effects = super().add(epoch, wave, refused=refused)
        if self.phase is Phase.IDLE and after.phase is Phase.EXCHANGE:
            told = tuple(effect for effect in effects if isinstance(effect, StartWave))
            return after._with(phase=Phase.IDLE), told
        return after, effects


class StartsOnlyOlderWaves(Rank, frozen=True):
    def add(self, epoch, wave, *, refused=False):
        if self.phase is Phase.IDLE and not self.pauses.on and wave == self.wave and not refused:
            return self._with(unfinished=True), ()
        return super().add(epoch, wave, refused=refused)


class ResumesTwice(Rank, frozen=True):
    def resume(self, pauses):
        if pauses == self.pauses and self.phase is Phase.IDLE and pauses.number:
            return self._exchange()
        return super().resume(pauses)


class RefusesSilently(Rank, frozen=True):
    def add(self, epoch, wave, *, refused=False):
        return (self, ()) if refused else super().add(epoch, wave, refused=refused)


class SaysNothingAgain(Rank, frozen=True):
    def repeat(self):
        return self, ()


class HidesWhereItBroke(Rank, frozen=True):
    def repeat(self):
        after, said = super().repeat()
        return after, said[1:] if self.phase is Phase.BROKEN else said


class FailsOnlyOnce(Rank, frozen=True):
    def prepare_failed(self, epoch):
        after, said = super().prepare_failed(epoch)
        return after._with(unable=False), said


class ForgetsTheNextWave(Rank, frozen=True):
    def start_dp_wave(self, message):
        after, effects = super().start_dp_wave(message)
        return after._with(start_at=0), effects


class ObeysOldStarts(Rank, frozen=True):
    def start_dp_wave(self, message):
        return super().start_dp_wave(replaced(message, wave=max(message.wave, self.wave)))


class CountsNoWaves(Rank, frozen=True):
    def _stop(self, *, completed):
        return super()._stop(completed=False)


class KeepsPausesToItself(Rank, frozen=True):
    @property
    def _has_news(self):
        return self.ready and self.standby.epoch != self.told


class KeepsResumesToItself(Rank, frozen=True):
    @property
    def _has_news(self):
        return super()._has_news and self.pauses.on


class ObeysOldPauses(Rank, frozen=True):
    def _raise_pauses(self, pauses):
        return super()._raise_pauses(pauses) if pauses >= self.pauses else (self._with(pauses=pauses), ())


class ResumesTooEarly(Rank, frozen=True):
    def resume(self, pauses):
        return super().pause(pauses)


class ForgetsHeld(Rank, frozen=True):
    def _raise_pauses(self, pauses):
        after, effects = super()._raise_pauses(pauses)
        return after._with(unfinished=self.unfinished) if not pauses.on else after, effects


class HoldsForAnOlderPause(Rank, frozen=True):
    def _stop(self, *, completed):
        if self.agreed.on and self.agreed != self.pauses:
            return self._with(held=self.held or self.unfinished, unfinished=False)._settle(completed)
        return super()._stop(completed=completed)

    def _settle(self, completed):
        return Rank._stop(self, completed=completed)


class ExchangesWhenIdle(Rank, frozen=True):
    def stepped(self, *, unfinished):
        after = self._with(step=self.step + 1, unfinished=unfinished)
        return after._exchange() if not unfinished else after._forward()


class StepsInAPause(Rank, frozen=True):
    def gathered(self, rows):
        after, effects = super().gathered(rows)
        if self.unfinished and after.phase is Phase.IDLE:
            step = Forward(self.group.epoch, self.wave, self.step, after.agreed, dummy=False)
            return self._with(phase=Phase.FORWARD, unfinished=True), (step,)
        return after, effects


class IgnoresWhatHasBegun(Rank, frozen=True):
    def reconfigure(self, message):
        return (self, ()) if message.group.epoch == self.standby.epoch else super().reconfigure(message)


class ForgetsTheGroupsWave(Rank, frozen=True):
    def reconfigure(self, message):
        return super().reconfigure(replaced(message, wave=0))


class SwitchesUnasked(Rank, frozen=True):
    def prepared(self, epoch):
        return self._open(self.standby) if epoch == self.standby.epoch else (self, ())


# Defects of the agreement between ranks.


def oldest_pause(rows):
    return replaced(agree(rows), pauses=min(row.pauses for row in rows))


def work_of_rank_0(rows):
    agreement = agree(rows)
    return replaced(agreement, run=agreement.run and rows[0].unfinished)


def goes_on_in_a_pause(rows):
    agreement = agree(rows)
    return replaced(agreement, run=agreement.run or (agreement.pauses.on and agreement.pauses.mode is PauseMode.KEEP))


def first_prepared(rows):
    return replaced(agree(rows), switch_to=max(row.prepared for row in rows))


def wave_of_rank_0(rows):
    return replaced(agree(rows), wave=rows[0].wave)


# Defects of the coordinator's waves.


class Predicts(Waves, frozen=True):
    def first_request(self, message):
        after, sent = super().first_request(message)
        return replaced(after, running=bool(sent) or after.running), sent


class ExcludesTheTarget(Waves, frozen=True):
    def first_request(self, message):
        after, sent = super().first_request(message)
        return after, tuple(start for start in sent if start.engine != message.engine)


class TellsNobody(Waves, frozen=True):
    def start_wave(self, message):
        return super().start_wave(message)[0], ()


class ObeysOldCompletions(Waves, frozen=True):
    def wave_complete(self, message):
        return self._seen(message.wave + 1, message.pauses, running=False), ()


class BelievesNoReports(Waves, frozen=True):
    def report(self, message):
        return self, ()


class KeepsRunningOverEpochs(Waves, frozen=True):
    def regroup(self, group):
        return replaced(self, group=group)


# Defects of the coordinator's groups.


class TakesNewcomersWord(GroupMachine, frozen=True):
    def _goes_by(self, message):
        return message.group.epoch > self.group.epoch


class IgnoresLateFailures(GroupMachine, frozen=True):
    def prepare_failed(self, message):
        return super().prepare_failed(message) if message.epoch == self.standby.epoch else (self, ())


class NamesTooFew(GroupMachine, frozen=True):
    def prepare_failed(self, message):
        after, sent = super().prepare_failed(message)
        if (after, sent) == (self, ()) and message.epoch == self.group.epoch and message.engine not in self.opened:
            return self._name(tuple(m for m in self._living() if m != message.engine))
        return after, sent


class WaitsForTheDead(GroupMachine, frozen=True):
    def gone(self, engine):
        return self, ()


class BlamesNoNetwork(GroupMachine, frozen=True):
    def peer_lost(self, message):
        return super().peer_lost(message) if self.broken else (self, ())


class GivesEpochsTwice(GroupMachine, frozen=True):
    def _next_epoch(self):
        return self.highest + 1


class DecidesAtOnce(GroupMachine, frozen=True):
    def _decide(self, *, anew=False):
        return GroupMachine._decide(replaced(self, recovering=False), anew=anew)


class TellsGroupsOnce(GroupMachine, frozen=True):
    def repeat(self):
        return self, ()


class LeavesTheExpelled(GroupMachine, frozen=True):
    def _name(self, members):
        after, sent = super()._name(members)
        return after, tuple(message for message in sent if message.engine in members)

    def _catch_up(self, engine, epoch):
        return () if engine not in self.group.members else super()._catch_up(engine, epoch)


# Defects of frontends.


class PassesNothingOn(Belief, frozen=True):
    def start_wave(self, message):
        return super().start_wave(message)[0], ()


class SendsOnlyRequests(Belief, frozen=True):
    def sent(self, engine):
        return self, ()


def ranks(rank, **more):
    return Protocol(rank=rank, **more)


MUTATIONS = (
    Mutation("vllm #38009: a paused rank ignores start_dp_wave", ranks(PausesAlone), PAUSED, ("2", "7", "8")),
    Mutation("vllm #36594: each rank decides by its own pause", ranks(AgreesAlone), PAUSED, ("1", "2", "4")),
    Mutation(
        "vllm #39366: reports a start, waits for the broadcast",
        ranks(WaitsForItsOwnBroadcast, unchecked=frozenset("5")),
        Bounds(requests=(0,), ticks=False),
        ("2",),
    ),
    Mutation(
        "vllm #51983: a request of the current wave starts nothing",
        ranks(StartsOnlyOlderWaves, frontend=SendsOnlyRequests),
        ONE,
        ("2",),
    ),
    Mutation("vllm #55229: a second resume enters a collective", ranks(ResumesTwice), PAUSED, ("6",)),
    Mutation(
        "vllm #51481: running as soon as a start is forwarded",
        Protocol(waves=Predicts, rank=RefusesSilently),
        Bounds(requests=(0,), refusals=1),
        ("5",),
    ),
    Mutation(
        "vllm #51481: and for ever",
        Protocol(waves=Predicts, rank=PausesAlone, unchecked=frozenset("5")),
        Bounds(ranks=1, requests=(0,), pause_calls=("abort",)),
        ("5",),
    ),
    Mutation("an excluded rank that reported nothing", Protocol(waves=ExcludesTheTarget), ONE, ("3",)),
    Mutation(
        "an excluded rank whose request was refused",
        Protocol(waves=ExcludesTheTarget, rank=RefusesSilently, unchecked=frozenset("3")),
        Bounds(requests=(0,), refusals=1, ticks=False),
        ("2",),
    ),
    Mutation("says only once that it waits", ranks(SaysNothingAgain), Bounds(requests=(0,), losses=2), ("2", "4", "5")),
    Mutation(
        "forgets a start of the next wave", ranks(ForgetsTheNextWave), Bounds(requests=(0, 0), ticks=False), ("2",)
    ),
    Mutation("obeys an old start", ranks(ObeysOldStarts), ONE, ("2", "6")),
    Mutation("counts no waves", ranks(CountsNoWaves), ONE, ("4", "2")),
    Mutation("keeps a pause to itself", ranks(KeepsPausesToItself), PAUSED, ("7", "8")),
    Mutation("keeps a resume to itself", ranks(KeepsResumesToItself), PAUSED, ("7", "2")),
    Mutation("obeys an old pause", ranks(ObeysOldPauses), PAUSED, ("6",)),
    Mutation("resumes before the pause is complete", ranks(ResumesTooEarly), PAUSED, ("9",)),
    Mutation("forgets what it held", ranks(ForgetsHeld), PAUSED, ("10",)),
    Mutation(
        "holds for a pause that is over",
        ranks(HoldsForAnOlderPause),
        Bounds(requests=(0, 0), pause_calls=("keep", "resume")),
        ("10",),
    ),
    Mutation(
        "exchanges when it has no work", ranks(ExchangesWhenIdle), Bounds(requests=(0,), interval=2, steps=2), ("1",)
    ),
    Mutation("steps in a pause", ranks(StepsInAPause), PAUSED, ("7", "1")),
    Mutation("agrees on the oldest pause", Protocol(agree=oldest_pause), PAUSED, ("2", "7", "8", "6")),
    Mutation("agrees on the work of rank 0", Protocol(agree=work_of_rank_0), ONE, ("2",)),
    Mutation("agrees to go on in a pause", Protocol(agree=goes_on_in_a_pause), PAUSED, ("7",)),
    Mutation(
        "agrees to switch when one is prepared", Protocol(agree=first_prepared), GROWS, ("2", "14", "20", "4", "1")
    ),
    Mutation(
        "agrees on the wave of rank 0",
        Protocol(agree=wave_of_rank_0),
        Bounds(ranks=3, requests=(0,), rank_crashes=1),
        ("4",),
    ),
    Mutation(
        "a coordinator that passes no start on",
        Protocol(waves=TellsNobody, frontend=PassesNothingOn),
        Bounds(requests=(0,), losses=1),
        ("2",),
    ),
    Mutation(
        "a coordinator that takes an old end for a new one",
        Protocol(waves=ObeysOldCompletions),
        Bounds(requests=(0, 0), duplicates=1),
        ("6", "11"),
    ),
    Mutation(
        "a coordinator that waits for wave_complete",
        Protocol(waves=BelievesNoReports),
        Bounds(requests=(0,), losses=1),
        ("5", "4"),
    ),
    Mutation(
        "running goes on in the next epoch",
        Protocol(waves=KeepsRunningOverEpochs),
        Bounds(requests=(0,), broken_collectives=1),
        ("5",),
    ),
    Mutation(
        "nobody passes on who waits, without a coordinator",
        Protocol(frontend=PassesNothingOn),
        Bounds(requests=(0, 0), coordinator_crashes=1, coordinator_returns=False),
        ("2",),
    ),
    Mutation("a newcomer's word that all have switched", Protocol(group=TakesNewcomersWord), GROWS, ("14",)),
    Mutation(
        "a change that fails late is ignored",
        Protocol(group=IgnoresLateFailures),
        Bounds(requests=(), scales=(3,), spares=1, failed_preparations=1),
        ("2",),
    ),
    Mutation(
        "who can is named, however few they are",
        Protocol(group=NamesTooFew),
        Bounds(requests=(0,), min_size=2, broken_collectives=1, failed_preparations=1),
        ("15",),
    ),
    Mutation(
        "ranks ignore that a change has begun",
        ranks(IgnoresWhatHasBegun),
        Bounds(ranks=3, requests=(), scales=(2,), broken_collectives=1),
        ("2", "20"),
    ),
    Mutation(
        "a group is named without its wave", ranks(ForgetsTheGroupsWave), Bounds(requests=(0,), rank_crashes=1), ("4",)
    ),
    Mutation("a rank switches when it is prepared", ranks(SwitchesUnasked), GROWS, ("2", "4", "14", "1")),
    Mutation(
        "a lease that never ends", Protocol(group=WaitsForTheDead), Bounds(requests=(), rank_crashes=1), ("2", "15")
    ),
    Mutation(
        "a network that fails expels nobody and renews nothing",
        Protocol(group=BlamesNoNetwork),
        Bounds(requests=(0,), broken_collectives=1),
        ("2",),
    ),
    Mutation(
        "an epoch is given out again",
        Protocol(group=GivesEpochsTwice),
        Bounds(requests=(), scales=(3,), spares=1, coordinator_crashes=1, rank_crashes=1),
        ("16",),
    ),
    Mutation(
        "a restarted coordinator decides at once",
        Protocol(group=DecidesAtOnce),
        Bounds(requests=(), coordinator_crashes=1),
        ("16",),
    ),
    Mutation(
        "a group is named only once",
        Protocol(group=TellsGroupsOnce),
        Bounds(requests=(), scales=(3,), spares=1, losses=1),
        ("2", "14", "20"),
    ),
    Mutation(
        "an expelled rank is not told",
        Protocol(group=LeavesTheExpelled),
        Bounds(requests=(), scales=(3,), spares=1, failed_preparations=1),
        ("20", "2"),
    ),
    Mutation(
        "who is in a broken group does not say where it is",
        ranks(HidesWhereItBroke),
        Bounds(requests=(0,), coordinator_crashes=1, rank_crashes=1, losses=1),
        ("15", "20"),
    ),
    Mutation(
        "says only once that it cannot be in a group",
        ranks(FailsOnlyOnce),
        Bounds(requests=(), scales=(3,), spares=1, failed_preparations=1, losses=1),
        ("2",),
    ),
)
