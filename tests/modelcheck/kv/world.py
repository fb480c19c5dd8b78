"""Two engines, one with KV blocks and one that pulls them, and the messages and copies in flight between them.

The state machines are the real ones (``BlockPool``, ``Leases``, ``Pull``, and the machines of ``Destination``). The
servers and clients are minimal. They read a message, begin a copy, end the copy, and send the result. A copy reads its
blocks at the end of the copy, which is the worst case. The source's requests begin with computed blocks. A state is a
``World``, and ``events`` yields the possible events.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from penstock_common.types.kv_transfer import BlockName
from penstock_enginecore.core.kv_cache.block_pool import BlockPool, KVCacheBlock
from penstock_enginecore.core.request import Hold
from penstock_enginecore.kv_transfer.core.kv_loads import KvLoads, Loads
from penstock_enginecore.kv_transfer.core.leases import Lease, Leases
from penstock_enginecore.kv_transfer.core.pull import Acknowledge, Arrived, Ask, Broken, Effect, Ended, GiveUp, Pull
from tests.modelcheck.kv.destination import Destination, destination_of, pool_of
from tests.modelcheck.kv.destination import same as _same
from tests.modelcheck.violation import Violation

Event = tuple[Any, ...]
LEASE_SECONDS, MAX_SECONDS, SILENCE, WINDOW = 5.0, 1e9, 1.0, 1 << 20


@dataclass(frozen=True)
class Bounds:
    """Bounds of the exploration.

    ``prompts`` has the blocks of each request as letters. Equal letters are equal blocks. The other fields limit the
    number of optional events.
    """

    prompts: tuple[str, ...] = ("ab", "ac")
    num_blocks: int = 5
    max_leased: int = 4
    pressure: int = 0
    """Number of blocks that the source suddenly needs for other requests."""
    pressures: int = 0
    sleeps: int = 0
    ticks: int = 0
    breaks: int = 0
    silences: int = 0
    aborts: int = 0
    give_ups: int = 0
    """Number of times that a loading request gives up its blocks and waits again."""
    deaths: int = 0
    room: int = 8
    """Blocks of the pulling engine. A request needs one block more than its prompt has letters."""


@dataclass(frozen=True)
class Machines:
    """State machine classes to explore."""

    leases: type[Leases] = Leases
    pull: type[Pull] = Pull
    loads: type[Loads] = Loads
    kv_loads: type[KvLoads] = KvLoads


class NoLock:
    """Lock without effect, because events happen one at a time."""

    def __enter__(self) -> None:
        """Do nothing: there are no other threads."""

    def __exit__(self, *_: object) -> None:
        """Do nothing."""

    def notify_all(self) -> None:
        """Do nothing."""


@dataclass
class Server:
    """The source's end of a stream.

    Attributes:
        asked: Unanswered fetches.
        reading: Blocks of the first fetch that are being copied.
    """

    lease_id: bytes
    incarnation: int
    asked: list[tuple[int, int, list[bytes]]] = field(default_factory=list)
    in_fetch: bool = False
    reading: tuple[BlockName, int | None] | None = None


@dataclass
class Stream:
    """A stream between the engines.

    Attributes:
        up, down: Messages in flight in the two directions.
        broken: The connection is lost. Each end notices this separately.
    """

    up: list[Any] = field(default_factory=list)
    down: list[Any] = field(default_factory=list)
    server: Server | None = None
    broken: bool = False


@dataclass
class Taker:
    """The pull of a request on the loading engine."""

    pull: Pull
    stream: Stream
    incarnation: int


class World:
    """A state. ``apply`` applies an event to a copy."""

    def __init__(self, bounds: Bounds, machines: Machines) -> None:
        self.bounds, self.machines = bounds, machines
        self.left = {name: getattr(bounds, name) for name in _BUDGETS}
        self.now = 0.0
        self.incarnation = 0
        self.engine = Destination(bounds.room, machines.kv_loads, machines.loads)
        self._connect()
        self.takers: dict[int, Taker | None] = {}
        self.orphans: list[tuple[bytes, int, BlockName, int]] = []
        """Copies whose stream has ended: lease, incarnation, content, block."""
        self.servers: list[Server] = []
        """Servers that have not noticed the end of their stream."""
        self.sources: dict[int, int] = {}
        """Incarnation of the source at the handover, by request that was handed over under a lease."""
        self._start()
        self.running: dict[int, list[KVCacheBlock]] = {}
        by_name: dict[str, KVCacheBlock] = {}
        for request, prompt in enumerate(bounds.prompts):
            blocks = []
            for letter in prompt:
                if letter in by_name:
                    self.pool.touch([by_name[letter]])
                else:
                    [by_name[letter]] = self.pool.allocate(1)
                    self.pool.cache(by_name[letter], letter.encode() * 16)
                    self.memory[by_name[letter].block_id] = letter
                blocks.append(by_name[letter])
            self.running[request] = blocks
        self.pressed: list[KVCacheBlock] = []

    def _connect(self) -> None:
        self.engine.fetch, self.engine.abandon_fetch = self._fetch, self._abandon

    def _start(self) -> None:
        self.pool = BlockPool(self.bounds.num_blocks + 1)
        self.leases = self.machines.leases(
            self.pool.free, self.bounds.max_leased, lease_seconds=LEASE_SECONDS, max_seconds=MAX_SECONDS
        )
        self.leases._lock = NoLock()  # type: ignore[assignment]
        self.memory: dict[int, str] = {}
        self.pressed = []
        self.running = {}

    # Events.

    def events(self) -> Iterator[Event]:
        """Yield the possible events."""
        yield from self.calm_events()
        left = self.left
        for name, event in (
            ("ticks", "tick"),
            ("sleeps", "sleep"),
            ("deaths", "die"),
            ("pressures", "press"),
        ):
            if left[name] and (name != "pressures" or not self.pressed):
                yield (event,)
        for request, taker in self.takers.items():
            if taker is None:
                continue
            if left["breaks"] and not taker.stream.broken:
                yield "break", request
            if left["silences"] and not taker.pull.state.ended:
                yield "silent", request
        if left["aborts"]:
            for request in self.engine.requests:
                yield "abort", request
        if left["give_ups"] and len(self.engine.kv_loads):
            yield ("give up",)

    def calm_events(self) -> Iterator[Event]:
        """Yield the events without a fault."""
        for request in self.running:
            yield "hand over", request
        for request in self.sources:
            if request not in self.takers:
                yield "pull", request
        if self.leases.next_expiry() == 0.0:
            yield ("give back",)
        if self.pressed:
            yield ("ease",)
        for place in range(len(self.orphans)):
            yield "orphan read", place
        for place in range(len(self.servers)):
            yield "server notices", place
        for request, taker in self.takers.items():
            if taker is not None:
                yield from self._of_taker(request, taker)
        yield from self._of_engine()

    def _of_engine(self) -> Iterator[Event]:
        engine = self.engine
        for number, load in engine.bringing.items():
            if load.writing:
                yield "write", number
        if engine.has_news:
            yield ("step",)
        ready = engine.kv_loads._ready
        for number, request in engine.requests.items():
            if request in engine.running:
                yield "finish", number
            elif request.key in ready:
                yield "start loaded", number
            elif request.hold is Hold.NONE:
                yield "turn", number

    def _of_taker(self, request: int, taker: Taker) -> Iterator[Event]:
        stream = taker.stream
        if stream.broken and not taker.pull.state.ended:
            yield "notice", request
        if not stream.broken and stream.up and (stream.server is not None or stream.up[0][0] == "open"):
            yield "up", request
        if not stream.broken and stream.down and not taker.pull.state.ended:
            yield "down", request
        if (server := stream.server) is not None:
            if server.asked and server.reading is None:
                yield "read", request
            if server.reading is not None:
                yield "copied", request
        if request not in self.engine.requests:
            yield "close", request

    def apply(self, event: Event) -> "World":
        """Return the world after the event. Raises Violation."""
        after = copied(self)
        name, arguments = event[0], event[1:]
        if name in _COSTS and after.left[_COSTS[name]]:
            after.left[_COSTS[name]] -= 1
        try:
            getattr(after, "_" + name.replace(" ", "_"))(*arguments)
        except Broken as e:
            raise Violation("6 one end breaks the protocol", str(e)) from e
        except (KeyError, RuntimeError, ValueError) as e:
            raise Violation("4 a machine is told what cannot be", f"{type(e).__name__}: {e}") from e
        after.check()
        return after

    # Events of the source.

    def _hand_over(self, request: int) -> None:
        blocks = self.running.pop(request)
        names = {BlockName(0, letter.encode() * 16): b.block_id for letter, b in self._lettered(request, blocks)}
        self.pool.touch(blocks)
        if self.leases.grant(self._lease(request), [list(blocks)], names, self.now) is None:
            self.pool.free(blocks)
        else:
            self.sources[request] = self.incarnation
        self.pool.free(blocks)

    def _lettered(self, request: int, blocks: list[KVCacheBlock]) -> Iterator[tuple[str, KVCacheBlock]]:
        return zip(self.bounds.prompts[request], blocks, strict=True)

    def _lease(self, request: int) -> bytes:
        return bytes([request]) * 16

    def _tick(self) -> None:
        before = {lease.lease_id for lease in self.leases._leases.values() if lease.num_pulls}
        self.now += LEASE_SECONDS
        self.leases.expire(self.now)
        if any(lease_id not in self.leases for lease_id in before):
            raise Violation("4 a lease ended while a pull was open")

    def _give_back(self) -> None:
        self.leases.expire(self.now)

    def _sleep(self) -> None:
        self.leases.revoke_all()

    def _press(self) -> None:
        """Take blocks for other requests: revoke leases, then preempt requests."""
        fetched = {lease.lease_id for lease in self.leases._leases.values() if lease.num_fetches}
        while self.pool.num_free_blocks < self.bounds.pressure and self.leases.revoke_one():
            pass
        if any(lease_id not in self.leases for lease_id in fetched):
            raise Violation("4 a lease was revoked that was read from")
        while self.pool.num_free_blocks < self.bounds.pressure and self.running:
            self.pool.free(self.running.pop(max(self.running)))
        if self.pool.num_free_blocks >= self.bounds.pressure:
            self.pressed = self.pool.allocate(self.bounds.pressure)
            self.memory |= {block.block_id: "!" for block in self.pressed}

    def _ease(self) -> None:
        self.pool.free(self.pressed)
        self.pressed = []

    def _die(self) -> None:
        self.incarnation += 1
        for taker in self.takers.values():
            if taker is not None:
                taker.stream.broken, taker.stream.server = True, None
        self.servers, self.orphans = [], []
        self._start()

    # Messages from the pulling engine to the source.

    def _up(self, request: int) -> None:
        taker = self.takers[request]
        assert taker is not None
        stream = taker.stream
        message = stream.up.pop(0)
        if message[0] == "open":
            lease_id = self._lease(request)
            if message[1] != self.incarnation or self.leases.opened(lease_id) is None:
                stream.broken = True
                return
            stream.server = Server(lease_id, self.incarnation)
            stream.down.append(("opened",))
            return
        server = stream.server
        assert server is not None
        if message[0] == "fetch":
            server.asked.append((message[1], 0, list(message[2])))
        elif message[0] == "release":
            self.leases.released(server.lease_id)
        elif message[0] == "end":
            stream.broken, stream.server = True, None
            self._server_ends(server)

    def _read(self, request: int) -> None:
        """Begin to copy the next block of the first fetch, or end the fetch."""
        stream = self._stream(request)
        server = stream.server
        assert server is not None
        number, group, hashes = server.asked[0]
        if not server.in_fetch:
            self.leases.fetch_began(server.lease_id)
            server.in_fetch = True
        if not hashes:
            self.leases.fetch_ended(server.lease_id)
            server.in_fetch = False
            server.asked.pop(0)
            stream.down.append(("done", number))
            return
        name = BlockName(group, hashes[0])
        ids = self.leases.read_began(server.lease_id, [name])
        if ids is None:
            hashes.pop(0)
            stream.down.append(("missing", number, name))
            return
        server.reading = name, ids[0]

    def _copied(self, request: int) -> None:
        stream = self._stream(request)
        server = stream.server
        assert server is not None
        assert server.reading is not None
        name, block_id = server.reading
        server.reading = None
        number, _, hashes = server.asked[0]
        hashes.pop(0)
        if block_id is None:
            stream.down.append(("missing", number, name))
        else:
            stream.down.append(("block", number, name, self._content(block_id, name)))
        self.leases.read_ended(server.lease_id)

    def _content(self, block_id: int, name: BlockName) -> str:
        letter = self.memory[block_id]
        if letter.encode() != name.hash[:1]:
            raise Violation("2 a block was read that has another content", f"{letter} for {name.hash[:1].decode()}")
        if not self.pool.blocks[block_id].ref_count:
            raise Violation("3 a block under a copy has no reference")
        return letter

    def _orphan_read(self, place: int) -> None:
        lease_id, _, name, block_id = self.orphans.pop(place)
        self._content(block_id, name)
        self.leases.read_ended(lease_id)

    def _server_notices(self, place: int) -> None:
        self._server_ends(self.servers.pop(place))

    def _server_ends(self, server: Server) -> None:
        if server.in_fetch:
            self.leases.fetch_ended(server.lease_id)
        if server.reading is not None:
            name, block_id = server.reading
            if block_id is None:
                self.leases.read_ended(server.lease_id)
            else:
                self.orphans.append((server.lease_id, server.incarnation, name, block_id))
        self.leases.closed(server.lease_id, self.now)

    # Events of the pulling engine.

    def _pull(self, request: int) -> None:
        pull = self.machines.pull(self.now, silence=SILENCE, window=WINDOW)
        stream = Stream(up=[("open", self.sources[request])])
        self.takers[request] = Taker(pull, stream, self.sources[request])
        self.engine.arrive(request, self.bounds.prompts[request])

    def _fetch(self, request: int, number: int, names: list[BlockName]) -> None:
        taker = self._taker(request)
        self._carry_out(taker, taker.pull.fetch(number, names, self.now))

    def _abandon(self, request: int, number: int) -> None:
        if (taker := self.takers[request]) is not None:
            self._carry_out(taker, taker.pull.abandon(number))

    def _down(self, request: int) -> None:
        taker = self._taker(request)
        message = taker.stream.down.pop(0)
        match message[0]:
            case "opened":
                self._carry_out(taker, taker.pull.opened(self.now))
            case "missing":
                taker.pull.missing(message[1], message[2], self.now)
            case "done":
                self._carry_out(taker, taker.pull.done(message[1], self.now))
            case "block":
                self._carry_out(taker, taker.pull.block(message[1], message[2], 1, self.now, good=True))

    def _carry_out(self, taker: Taker, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Ask(number, _, hashes):
                    taker.stream.up.append(("fetch", number, hashes))
                case Acknowledge():
                    pass
                case Arrived(number, index, sequence):
                    self.engine.arrived(number, index, sequence)
                case Ended(number):
                    self.engine.ended(number)
                case GiveUp(released):
                    stream = taker.stream
                    if not stream.broken and released:
                        stream.up = [each for each in stream.up if each[0] == "open"] + [("release",), ("end",)]
                    elif not stream.broken:
                        self._drop(stream)

    def _drop(self, stream: Stream) -> None:
        stream.broken = True
        stream.up, stream.down = [], []
        if stream.server is not None:
            self.servers.append(stream.server)
            stream.server = None

    def _write(self, number: int) -> None:
        request = self.engine.bringing[number].request
        sequence = self.engine.written(number)
        if (taker := self.takers[request]) is not None:
            self._carry_out(taker, taker.pull.taken(sequence, self.now))

    def _step(self) -> None:
        self.engine.kv_loads.begin_step(paused=False)

    def _turn(self, request: int) -> None:
        self.engine.turn(request)

    def _start_loaded(self, request: int) -> None:
        self.engine.start_loaded(request)

    def _finish(self, request: int) -> None:
        self.engine.finish(request)

    def _give_up(self) -> None:
        self.engine.kv_loads.give_up_one()

    def _close(self, request: int) -> None:
        taker = self._taker(request)
        self._carry_out(taker, taker.pull.close(released=True))
        stream = taker.stream
        if stream.broken or not stream.up:  # otherwise the last message is still in flight
            self._end_taker(request)

    def _end_taker(self, request: int) -> None:
        taker = self._taker(request)
        if any(load.request == request and not load.ended for load in self.engine.bringing.values()):
            raise Violation("4 a fetch does not end")
        if not taker.stream.broken:
            self._drop(taker.stream)
        self.takers[request] = None

    def _abort(self, request: int) -> None:
        self.engine.end(request)

    def _break(self, request: int) -> None:
        self._drop(self._stream(request))

    def _notice(self, request: int) -> None:
        taker = self._taker(request)
        self._fail(taker, request, "gone")

    def _silent(self, request: int) -> None:
        taker = self._taker(request)
        self._fail(taker, request, "silent")

    def _fail(self, taker: Taker, request: int, reason: str) -> None:
        if request in self.engine.requests:
            self.engine.requests[request].has_source = False
        self._carry_out(taker, taker.pull.fail(reason))

    def _taker(self, request: int) -> Taker:
        taker = self.takers[request]
        assert taker is not None
        return taker

    def _stream(self, request: int) -> Stream:
        return self._taker(request).stream

    # Invariants.

    def check(self) -> None:
        """Check the invariants of every state. Raises Violation."""
        held: dict[int, int] = {}
        leases = [*self.leases._leases.values(), *self.leases._read_on.values(), *self.leases._over]
        for tables in [lease.tables for lease in leases]:
            for table in tables:
                for block in table:
                    held[block.block_id] = held.get(block.block_id, 0) + 1
        if set(held) != set(self.leases._holders) or len(held) > self.bounds.max_leased:
            raise Violation("7 leases have other blocks than they count, or too many")
        for blocks in (*self.running.values(), self.pressed):
            for block in blocks:
                held[block.block_id] = held.get(block.block_id, 0) + 1
        for block in self.pool.blocks[1:]:
            if block.ref_count != held.get(block.block_id, 0):
                raise Violation("4 references leak, or are given back twice", repr(block))
        self.engine.check()

    def check_rest(self) -> None:
        """When nothing happens any more. Raises Violation."""
        if any(taker is not None for taker in self.takers.values()):
            raise Violation("4 a request never goes on")
        self.engine.check_rest()
        if len(self.leases) or self.pool.num_free_blocks != self.pool.num_usable_blocks:
            raise Violation("4 blocks are never given back")

    def key(self) -> tuple[Any, ...]:
        """Return a key of the state. Keys are equal for equal states."""
        leases = tuple(
            (each.lease_id[0], each.state.value, each.num_pulls, each.num_fetches, each.num_reads, each.expires_at)
            for each in (*self.leases._leases.values(), *self.leases._read_on.values(), *self.leases._over)
        )
        blocks = tuple((block.ref_count, block.block_hash) for block in self.pool.blocks)
        takers = tuple((request, _taker_key(taker)) for request, taker in sorted(self.takers.items()))
        return (
            tuple(self.left.values()),
            self.now,
            self.incarnation,
            leases,
            (len(self.leases._leases), len(self.leases._read_on)),
            blocks,
            tuple(sorted(self.memory.items())),
            tuple(sorted(self.running)),
            len(self.pressed),
            tuple(sorted(self.sources.items())),
            takers,
            self.engine.key(),
            tuple(self.orphans),
            tuple(_server_key(server) for server in self.servers),
        )


def copied(world: World) -> World:
    """Return a copy of the state."""
    after = _same(world)
    after.left = world.left.copy()
    after.pool = pool = pool_of(world.pool)
    blocks = pool.blocks
    after.engine = destination_of(world.engine)
    after._connect()
    after.memory = world.memory.copy()
    after.running = {request: [blocks[block.block_id] for block in held] for request, held in world.running.items()}
    after.pressed = [blocks[block.block_id] for block in world.pressed]
    after.leases = leases = _same(world.leases)
    leases._free = pool.free

    def lease_of(lease: Lease) -> Lease:
        other = _same(lease)
        other.tables = [[blocks[block.block_id] for block in table] for table in lease.tables]
        return other

    leases._leases = {lease_id: lease_of(lease) for lease_id, lease in world.leases._leases.items()}
    leases._read_on = {lease_id: lease_of(lease) for lease_id, lease in world.leases._read_on.items()}
    leases._over = [lease_of(lease) for lease in world.leases._over]
    leases._holders, leases.ends = world.leases._holders.copy(), world.leases.ends.copy()
    after.sources = world.sources.copy()
    after.orphans = world.orphans.copy()
    after.servers = [_server_of(server) for server in world.servers]
    after.takers = {request: None if taker is None else _taker_of(taker) for request, taker in world.takers.items()}
    return after


def _server_of(server: Server) -> Server:
    other = _same(server)
    other.asked = [(number, group, hashes.copy()) for number, group, hashes in server.asked]
    return other


def _taker_of(taker: Taker) -> Taker:
    other = _same(taker)
    other.stream = stream = _same(taker.stream)
    stream.up, stream.down = stream.up.copy(), stream.down.copy()
    if stream.server is not None:
        stream.server = _server_of(stream.server)
    other.pull = pull = _same(taker.pull)
    pull._of, pull._sizes, pull._taken = pull._of.copy(), pull._sizes.copy(), pull._taken.copy()
    pull._fetches = {}
    for fetch_id, fetch in taker.pull._fetches.items():
        pull._fetches[fetch_id] = same = _same(fetch)
        same.left, same.asked, same.unasked = fetch.left.copy(), fetch.asked.copy(), fetch.unasked.copy()
    return other


_BUDGETS = ("pressures", "sleeps", "ticks", "breaks", "silences", "aborts", "give_ups", "deaths")
_COSTS = {
    "press": "pressures",
    "sleep": "sleeps",
    "tick": "ticks",
    "break": "breaks",
    "silent": "silences",
    "abort": "aborts",
    "give up": "give_ups",
    "die": "deaths",
}


def _server_key(server: Server | None) -> Any:
    if server is None:
        return None
    asked = tuple((number, group, tuple(hashes)) for number, group, hashes in server.asked)
    return server.lease_id, server.incarnation, asked, server.in_fetch, server.reading


def _taker_key(taker: Taker | None) -> Any:
    if taker is None:
        return None
    stream, pull = taker.stream, taker.pull
    return (
        pull.state.value,
        pull.num_fetches,
        tuple(pull._of.items()),
        tuple(stream.up),
        tuple(stream.down),
        _server_key(stream.server),
        stream.broken,
    )
