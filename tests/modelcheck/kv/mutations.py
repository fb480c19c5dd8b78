"""Variants of leases, pulls and loads with one defect each, which the exploration must find."""

from dataclasses import dataclass
from typing import Any

from penstock_enginecore.kv_transfer.core.kv_loads import KvLoads, Loads
from penstock_enginecore.kv_transfer.core.leases import Leases, LeaseState
from penstock_enginecore.kv_transfer.core.pull import Ended, Pull, PullState
from tests.modelcheck.kv.world import Bounds, Machines


@dataclass(frozen=True)
class Mutation:
    """A defect. ``rules`` has the numbers of invariants, of which the exploration must find one violated."""

    name: str
    machines: Machines
    bounds: Bounds
    rules: tuple[str, ...]


class FreesUnderACopy(Leases):
    """Defect (vllm 21570): blocks are freed while they are read."""

    def _end(self, lease: Any, state: LeaseState) -> None:
        super()._end(lease, state)
        if self._read_on.pop(lease.lease_id, None) is not None:
            self._over.append(lease)

    def read_ended(self, lease_id: bytes) -> bool:
        return lease_id in self._leases and super().read_ended(lease_id)


class KeepsWhatWasRead(Leases):
    def read_ended(self, lease_id: bytes) -> bool:
        lease = self._leases.get(lease_id) or self._read_on[lease_id]
        lease.num_reads -= 1
        return False


class CountsNoReads(Leases):
    def read_began(self, lease_id: bytes, names: Any) -> Any:
        found = super().read_began(lease_id, names)
        if found is not None:
            self._leases[lease_id].num_reads -= 1
        return found

    def read_ended(self, lease_id: bytes) -> bool:
        return False


class StopsTheClockForGood(Leases):
    def closed(self, lease_id: bytes, now: float) -> None:
        """Do nothing."""


class ExpiresUnderAPull(Leases):
    def expire(self, now: float) -> int:
        with self._lock:
            for lease in [lease for lease in self._leases.values() if lease.expires_at <= now]:
                self._end(lease, LeaseState.EXPIRED)
        return self._give_back()


class ReleasesTwice(Leases):
    def released(self, lease_id: bytes) -> bool:
        lease = self._leases.get(lease_id)
        over = super().released(lease_id)
        if lease is not None:
            self._over.append(lease)
        return over


class RevokesWhatIsRead(Leases):
    def revoke_one(self) -> bool:
        for lease in self._leases.values():
            self._end(lease, LeaseState.REVOKED)
            return self._give_back() > 0
        return False


class GrantsWithoutLimit(Leases):
    def grant(self, *given: Any) -> Any:
        self._max_blocks = 1000
        return super().grant(*given)


class ForgetsWhoElseHolds(Leases):
    def _give_back(self) -> int:
        ids = {block.block_id for lease in self._over for table in lease.tables for block in table}
        count = super()._give_back()
        for block_id in ids:
            self._holders.pop(block_id, None)
        return count


class RevokesOnlyOnPaper(Leases):
    def revoke_all(self) -> None:
        self._leases.clear()


class TakesBlocksNobodyWants(Pull):
    def abandon(self, fetch_id: int) -> Any:
        return [Ended(fetch_id)] if fetch_id in self._fetches else []


class LeavesFetchesOpen(Pull):
    def fail(self, reason: str) -> Any:
        return [effect for effect in super().fail(reason) if not isinstance(effect, Ended)]


class EndsFetchesTwice(Pull):
    def _end(self, *given: Any, **more: Any) -> Any:
        effects = super()._end(*given, **more)
        return [*effects, *(effect for effect in effects if isinstance(effect, Ended))]


class AsksTwice(Pull):
    def opened(self, now: float) -> Any:
        asks = super().opened(now)
        return asks + asks


class LosesWhatWasAskedEarly(Pull):
    def opened(self, now: float) -> Any:
        self.state, self._heard = PullState.OPEN, now
        return []


class ReleasesNothing(Pull):
    def close(self, *, released: bool) -> Any:
        self.state = PullState.CLOSED
        return [Ended(fetch_id) for fetch_id in self._fetches]


class BringsTwice(Loads):
    def bringing(self, names: Any) -> None:
        """Return None, as if no load were in flight."""

    def begin(self, number: int, places: Any, owner: str) -> None:
        self._bringing.clear()
        super().begin(number, places, owner)


class ForgetsWhoWaits(Loads):
    def end(self, number: int) -> Any:
        load = super().end(number)
        load.waiting.clear()
        return load


class KeepsItsOwner(Loads):
    """Defect: when a load ends, its blocks go to a request that has already ended."""

    def leave(self, key: str) -> int | None:
        if (number := self._of_owner.pop(key, None)) is not None:
            return number
        return super().leave(key)

    def end(self, number: int) -> Any:
        self._of_owner.setdefault(self._loads[number].owner or "", number)
        return super().end(number)


class NeverArrives(Loads):
    """Defect: blocks still count as in flight after their load has ended."""

    def end(self, number: int) -> Any:
        bringing = self._bringing.copy()
        load = super().end(number)
        self._bringing = bringing
        return load


class FreesUnderALoad(KvLoads):
    """Defect: a preempted request frees blocks while a load still writes to them."""

    def give_up(self, request: Any) -> None:
        places = [place for load in self._loads._loads.values() if load.owner == request.key for place in load.places]
        super().give_up(request)
        self._pool.free([self._pool.blocks[place.block_id] for place in places])


PLAIN = Bounds(prompts=("ab",))
SHARED = Bounds(prompts=("ab", "ac"))
SLEEPS = Bounds(prompts=("ab",), sleeps=1, pressure=5, pressures=1)
BREAKS = Bounds(prompts=("ab",), breaks=1, ticks=1)
EQUAL = Bounds(prompts=("a", "a"))
GIVES_UP = Bounds(prompts=("a",), give_ups=1)
ABORTS = Bounds(prompts=("a",), aborts=1)

MUTATIONS = (
    Mutation("gives blocks back under a copy", Machines(leases=FreesUnderACopy), SLEEPS, ("2", "3")),
    Mutation("counts no copies", Machines(leases=CountsNoReads), SLEEPS, ("2", "3")),
    Mutation("keeps what was read to the end", Machines(leases=KeepsWhatWasRead), SLEEPS, ("4",)),
    Mutation("a lost pull stops the clock for good", Machines(leases=StopsTheClockForGood), BREAKS, ("4",)),
    Mutation("the clock runs under a pull", Machines(leases=ExpiresUnderAPull), BREAKS, ("4",)),
    Mutation("gives back twice", Machines(leases=ReleasesTwice), PLAIN, ("4", "7")),
    Mutation(
        "revokes what is read from",
        Machines(leases=RevokesWhatIsRead),
        Bounds(prompts=("ab",), pressure=5, pressures=1),
        ("4",),
    ),
    Mutation(
        "grants without a limit",
        Machines(leases=GrantsWithoutLimit),
        Bounds(prompts=("ab", "cd"), max_leased=2),
        ("7",),
    ),
    Mutation("forgets who else holds a block", Machines(leases=ForgetsWhoElseHolds), SHARED, ("7",)),
    Mutation("revokes and gives nothing back", Machines(leases=RevokesOnlyOnPaper), SLEEPS, ("4", "7")),
    Mutation(
        "takes what was abandoned",
        Machines(pull=TakesBlocksNobodyWants),
        Bounds(prompts=("ab",), give_ups=1),
        ("4",),
    ),
    Mutation("a source that is gone ends no fetch", Machines(pull=LeavesFetchesOpen), BREAKS, ("4",)),
    Mutation("fetches end twice", Machines(pull=EndsFetchesTwice), BREAKS, ("4",)),
    Mutation("asks twice", Machines(pull=AsksTwice), PLAIN, ("6",)),
    Mutation("loses what was asked for early", Machines(pull=LosesWhatWasAskedEarly), PLAIN, ("4",)),
    Mutation("brings what is on its way", Machines(loads=BringsTwice), EQUAL, ("5",)),
    Mutation("forgets who waits for a load of another", Machines(loads=ForgetsWhoWaits), EQUAL, ("4",)),
    Mutation("a load that has ended still brings", Machines(loads=NeverArrives), GIVES_UP, ("4",)),
    Mutation("a load keeps an owner that has left", Machines(loads=KeepsItsOwner), ABORTS, ("4",)),
    Mutation("gives blocks back that are written to", Machines(kv_loads=FreesUnderALoad), GIVES_UP, ("3", "4")),
)
