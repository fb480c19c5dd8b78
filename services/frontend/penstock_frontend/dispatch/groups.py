"""The data-parallel groups that engines are ranks of: who takes requests, in which wave, and who is told of one."""

from collections.abc import Callable, Iterable

import msgspec

from penstock_common.types.cluster import ClusterView
from penstock_common.types.data_parallel import FirstRequest, PoolGroup, StartDpWave, StartWave
from penstock_common.types.request import EngineCoreRequest
from penstock_frontend.dispatch.waves import Waves

Send = Callable[[FirstRequest | StartDpWave], None]


class EngineGroups:
    """A belief per pool, as the coordinator tells of its group, and what follows from it. Ranks are known by name."""

    def __init__(self, send: Send) -> None:
        """``send``: takes a first request to the coordinator, and the start of a wave to a rank."""
        self._send = send
        self._waves: dict[tuple[str, str], Waves] = {}
        self._routed: dict[tuple[str, str], frozenset[str]] = {}
        self._pool_of: dict[str, tuple[str, str]] = {}
        """By rank that is a member, the pool."""

    def follow_view(self, view: ClusterView) -> None:
        """What the coordinator says of them. It is never believed to have gone back."""
        for told in view.groups:
            self._follow(told)

    def _follow(self, told: PoolGroup) -> None:
        key = told.model, told.pool
        waves, _ = self._waves.get(key, Waves()).seen(told.view)
        self._waves[key] = waves
        group = waves.view.group
        if group.epoch == told.view.group.epoch:
            self._routed[key] = frozenset() if told.suspended else frozenset(told.view.routed)
        self._pool_of = {rank: pool for rank, pool in self._pool_of.items() if pool != key}
        self._pool_of.update((rank, key) for rank in group.members)

    def disconnected(self) -> None:
        """There is no coordinator: the groups are believed idle until there is one."""
        self._waves = {key: waves.disconnected()[0] for key, waves in self._waves.items()}

    def accepts(self, rank: str) -> bool:
        """Whether requests may go to a rank: it is in its group, does not leave, and the group does not stand still for want of
        others. Before anybody has told of groups it may.
        """
        if not self._waves:
            return True
        key = self._pool_of.get(rank)
        return key is not None and rank in self._routed[key]

    def leaves_out(self, rank: str, model: str, pool: str) -> bool:
        """Whether the pool has a group in which an engine that could be a rank of it has no place."""
        waves = self._waves.get((model, pool))
        members = () if waves is None else waves.view.group.members
        return bool(members) and rank not in members

    def stamped(self, rank: str, request: EngineCoreRequest) -> EngineCoreRequest:
        """The request as it goes to a rank: with the wave that its group is believed to be in."""
        view = self._believed(rank).view
        return msgspec.structs.replace(request, group_epoch=view.group.epoch, current_wave=view.wave)

    def sent(self, rank: str) -> None:
        """A request went to a rank. Of a group that is believed idle, the other ranks are told, and the coordinator."""
        if rank in self._pool_of:
            self._tell(self._believed(rank).sent(rank)[1])

    def start_wave(self, message: StartWave) -> None:
        """A rank waits for the others."""
        key = self._pool_of.get(message.engine)
        if key is not None:
            self._waves[key], told = self._waves[key].start_wave(message)
            self._tell(told)

    def _believed(self, rank: str) -> Waves:
        key = self._pool_of.get(rank)
        return Waves() if key is None else self._waves[key]

    def _tell(self, messages: Iterable[FirstRequest | StartDpWave]) -> None:
        for message in messages:
            self._send(message)
