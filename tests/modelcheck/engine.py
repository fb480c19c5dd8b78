"""Minimal engine around a rank: requests, their state, and the engine's current collective."""

from typing import NamedTuple

from penstock_common.types.data_parallel import PauseMode, PrepareFailed, StartWave
from penstock_enginecore.data_parallel.core.rank import (
    AbortCollective,
    Exchange,
    Forward,
    Hold,
    Join,
    Leave,
    Prepare,
    Rank,
    Release,
    ResumeRefused,
    RollBack,
)
from tests.modelcheck.invariants import check_rank
from tests.modelcheck.violation import Violation


class Asked(NamedTuple):
    id: int
    left: int
    """Number of steps until the request is finished."""
    held: bool


class Entered(NamedTuple):
    """A collective that the engine has entered, but not all other engines."""

    collective: Exchange | Forward
    batch: tuple[int, ...] = ()


class Ended(NamedTuple):
    """A collective that all engines have entered, and whose result the engine has not read."""

    collective: Exchange | Forward
    batch: tuple[int, ...]
    rows: tuple


class Engine(NamedTuple):
    rank: Rank
    requests: tuple[Asked, ...] = ()
    slot: Entered | Ended | None = None
    preparing: int = 0
    """Epoch of the group that the engine is building."""


class Done(NamedTuple):
    """Result of an event at an engine."""

    engine: Engine
    sent: tuple = ()
    """Messages to the coordinator."""
    told: tuple = ()
    """Messages to frontends."""
    ended: tuple[int, ...] = ()
    """Requests that have ended."""
    moved: tuple[int, ...] = ()
    """Requests that are resumed on another engine."""
    forward: Forward | None = None
    """Step that the engine has entered."""


def settle(engine: Engine, rank: Rank, effects: tuple, **changes) -> Done:
    """Carry out the effects that the rank returned."""
    before = engine
    engine = engine._replace(rank=rank, **changes)
    sent, ended, moved, forward = [], [], [], None
    for effect in effects:
        match effect:
            case Exchange():
                engine = engine._replace(slot=Entered(effect))
            case Forward():
                batch = tuple(r.id for r in engine.requests if not r.held)
                engine, forward = engine._replace(slot=Entered(effect, batch)), effect
            case AbortCollective():
                engine = engine._replace(slot=None)
            case Hold(mode):
                if mode is PauseMode.ABORT:
                    ended += [r.id for r in engine.requests if not r.held]
                    engine = engine._replace(requests=tuple(r for r in engine.requests if r.held))
            case Release():
                engine = engine._replace(requests=tuple(r._replace(held=False) for r in engine.requests))
            case Prepare(group):
                engine = engine._replace(preparing=group.epoch)
            case Leave():
                moved += [r.id for r in engine.requests]
                engine = engine._replace(requests=(), preparing=0)
            case RollBack() | ResumeRefused():
                pass
            case Join():
                engine = engine._replace(preparing=0)
            case _:
                sent.append(effect)
    if rank.paused:
        engine = engine._replace(requests=tuple(r._replace(held=True) for r in engine.requests))
    _check(before, engine)
    return Done(engine, tuple(sent), (), tuple(ended), tuple(moved), forward)


def take_result(engine: Engine) -> Done:
    ended = engine.slot
    engine = engine._replace(slot=None)
    if isinstance(ended.collective, Exchange):
        return settle(engine, *engine.rank.gathered(ended.rows))
    requests = tuple(r._replace(left=r.left - 1) if r.id in ended.batch and not r.held else r for r in engine.requests)
    left = tuple(r for r in requests if r.left)
    over = tuple(r.id for r in requests if not r.left)
    rank, effects = engine.rank.stepped(unfinished=any(not r.held for r in left))
    done = settle(engine, rank, effects, requests=left)
    return done._replace(ended=done.ended + over)


def add(engine: Engine, request: int, epoch: int, wave: int, steps: int, refused: bool) -> Done:
    rank, effects = engine.rank.add(epoch, wave, refused=refused)
    if refused:
        return settle(engine, rank, effects)._replace(ended=(request,))
    return settle(engine, rank, effects, requests=(*engine.requests, Asked(request, steps, rank.pauses.on)))


def drop(engine: Engine, ids: tuple[int, ...]) -> Done:
    """Abort requests."""
    left = tuple(r for r in engine.requests if r.id not in ids)
    unfinished, held = any(not r.held for r in left), any(r.held for r in left)
    rank, effects = engine.rank.left_with(unfinished=unfinished, held=held)
    gone = tuple(r.id for r in engine.requests if r.id in ids)
    return settle(engine, rank, effects, requests=left)._replace(ended=gone)


def tick(engine: Engine) -> Done:
    done = settle(engine, *engine.rank.repeat())
    return done._replace(told=tuple(m for m in done.sent if isinstance(m, StartWave)))


def lose_peer(engine: Engine) -> Done:
    rank, effects = engine.rank.peer_lost()
    return settle(engine, rank, effects, slot=None)


def prepared(engine: Engine) -> Done:
    rank, effects = engine.rank.prepared(engine.preparing)
    return settle(engine, rank, effects, preparing=0)


def not_prepared(engine: Engine) -> Done:
    rank, effects = engine.rank.prepare_failed(engine.preparing)
    return settle(engine, rank, effects, preparing=0)


def cannot_join(engine: Engine) -> Done:
    """Fail to prepare the next group on this engine, so that the group's collective fails."""
    done = lose_peer(engine)
    failed = PrepareFailed(engine.rank.engine, engine.rank.group.epoch)
    return done._replace(sent=(*done.sent, failed))


def _check(before: Engine, after: Engine) -> None:
    """Check the invariants that hold for an engine after every event."""
    rank = after.rank
    check_rank(before.rank, rank)
    if rank.held != any(r.held for r in after.requests) or rank.unfinished != any(not r.held for r in after.requests):
        raise Violation("10 a request is neither held nor run", f"{rank} {after.requests}")
