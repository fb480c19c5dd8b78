"""What must hold in every state of a network, and where it has come to its rest. Names begin with the invariants' numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock_common.types.data_parallel import (
    FirstRequest,
    PauseMode,
    Pauses,
    PrepareFailed,
    RankReport,
    Reconfigure,
    StartDpWave,
    StartWave,
)
from penstock_enginecore.core.data_parallel.effects import Forward
from penstock_enginecore.core.data_parallel.rank import Phase
from tests.modelcheck.numbers import DOWN, Left, State
from tests.modelcheck.violation import Violation

if TYPE_CHECKING:
    from tests.modelcheck.world import World


def broken(world: World, rule: str, detail: str) -> None:
    if rule.split()[0] not in world.protocol.unchecked:
        raise Violation(rule, detail)


def check_forward(world: World, state: State, at: int, step: Forward) -> None:
    ranks = [world.parts.values[state[i]].rank for i in range(world.engine_count) if i != at and state[i] != DOWN]
    others = [rank for rank in ranks if rank.group.epoch == step.epoch]
    told = [rank.pauses for rank in others if rank.paused and rank.pauses > step.pauses]
    paused = [rank for rank in others if rank.paused and rank.pauses == step.pauses]
    waits = step.pauses.mode is PauseMode.WAIT
    if step.pauses.on and not waits:
        raise Violation("7 a step during a pause", str(step))
    if told or (paused and (not waits or len(paused) == len(others) > 0)):
        raise Violation("7 a step after a pause was complete", f"{step} {told}")


def check_running(world: World, state: State) -> None:
    waves = world.parts.values[state[world.coordinator_at]].waves
    if not waves.running:
        return
    ranks = [world.parts.values[state[at]].rank for at in range(world.engine_count) if state[at] != DOWN]
    here = waves.group.epoch, waves.wave
    if len(ranks) == world.engine_count and not any(
        (rank.group.epoch, rank.wave) > here or ((rank.group.epoch, rank.wave) == here and rank.phase is not Phase.IDLE)
        for rank in ranks
    ):
        broken(world, "5 the coordinator says running of a wave that nobody is in", str(waves))


def check_expelled(world: World, before: State, after: State, event: Any) -> None:
    """Who lives stays in the group when its coordinator names it anew, unless it said that it cannot."""
    old, new = world.parts.values[before[world.coordinator_at]], world.parts.values[after[world.coordinator_at]]
    message = world.described_message(event)[1] if type(event) is int else None
    ranks = [world.parts.values[number].rank for number in after[: world.engine_count] if number != DOWN]
    if new.group == old.standby:
        left = [r for r in ranks if r.engine in old.group.members and r.group != new.group and not r.ready]
        if left:
            raise Violation("14 a change is taken as done that is not", str(left))
    if new.highest == old.highest or new.group.epoch != new.highest or new.group == old.standby:
        return
    if type(message) is PrepareFailed or (type(message) is RankReport and message.group == new.group):
        return
    if old.recovering and event != ("recovered",):
        raise Violation("16 a coordinator decides before all had time to report", str(new.group))
    lost = {r.engine for r in ranks if r.group == old.group} & set(old.group.members) - set(new.group.members)
    if lost:
        raise Violation("15 a rank that lives is expelled", f"{lost} by {new.group}")


def check_size(world: World, before: State, after: State) -> None:
    """Whoever is named is enough to go on."""
    old, new = world.parts.values[before[world.coordinator_at]], world.parts.values[after[world.coordinator_at]]
    if new.highest > old.highest and new.group.epoch == new.highest and len(new.group.members) < new.min_size:
        raise Violation("15 a group is named that is too small", str(new))


def check_epochs(world: World, state: State) -> None:
    """An epoch is one group."""
    machine = world.parts.values[state[world.coordinator_at]]
    engines_ = [world.parts.values[number] for number in state[: world.engine_count] if number != DOWN]
    groups = {machine.group, machine.standby}
    groups |= {engine.rank.group for engine in engines_ if engine.rank.phase is not Phase.OUTSIDE}
    groups |= {engine.rank.standby for engine in engines_}
    groups |= {message.group for _, _, message in world.under_way(state) if type(message) is Reconfigure}
    if len({group.epoch for group in groups}) < len(groups):
        raise Violation("16 an epoch was given out twice", str(groups))


def check_told(world: World, before: Any, after: Any, message: Any, sent: Any) -> None:
    told = {start.engine for start in sent if isinstance(start, StartDpWave)}
    excluded = set(after.view.group.members) - told if told else set()
    if isinstance(message, FirstRequest) and excluded:
        broken(world, "3 a rank is excluded that reported no start", f"{excluded} after {message}")
    if isinstance(message, StartWave) and excluded - {message.engine}:
        raise Violation("3 a rank is excluded that reported no start", f"{excluded} after {message}")
    recovering = getattr(after, "recovering", False)
    if not recovering and (after.view.group.epoch, after.view.wave) < (before.view.group.epoch, before.view.wave):
        raise Violation("11 what is known of a wave goes back", f"{before} -> {after}")


def check_rest(world: World, state: State, left: Left) -> Pauses | None:
    """Where nothing is left to happen everything is done. The pause that is on, if one is."""
    machine = world.part(state, world.coordinator_at)
    living = {name: world.parts.values[n] for name, n in zip(world.names, state, strict=False) if n != DOWN}
    if machine and len(living) < machine.min_size:
        return None
    groups = [machine.group] if machine else [engine.rank.group for engine in living.values()]
    names = max(groups, key=lambda group: group.epoch).members
    if any(name not in living for name in names):
        raise Violation("15 the group waits for a rank that is dead", str(machine))
    ranks = [living[name].rank for name in names]
    waiting = [rank for rank in ranks if rank.phase is not Phase.IDLE]
    if waiting and (machine or left.live):
        raise Violation("2 a rank waits for ever", str(waiting))
    if any(engine.rank.phase is not Phase.OUTSIDE for name, engine in living.items() if name not in names):
        raise Violation("20 a rank outside of the group thinks that it is in it", str(living))
    _check_agreed(machine, ranks, waiting)
    if ranks[0].pauses.on and not waiting:
        if not all(rank.paused for rank in ranks):
            raise Violation("8 a pause is never complete", str(ranks))
        return ranks[0].pauses
    if left.live:
        raise Violation("2 a request is never run", f"{left.live:b} of {living}")
    return None


def _check_agreed(machine: Any, ranks: list[Any], waiting: list[Any]) -> None:
    if not waiting:
        if len({rank.pauses for rank in ranks}) > 1:
            raise Violation("7 a pause or resume has not reached all", str(ranks))
        if len({rank.wave for rank in ranks}) > 1:
            raise Violation("4 idle ranks are in different waves", str(ranks))
    if machine is None:
        return
    if machine.waves.running:
        raise Violation("5 the coordinator says running for ever", str(machine))
    if {(r.group, r.wave) for r in ranks} != {(machine.group, machine.waves.wave)}:
        raise Violation("4 coordinator and ranks are in different waves", f"{machine} {ranks}")
    if not machine.finished or machine.standby.epoch or machine.recovering:
        raise Violation("14 a change is never over", str(machine))
