"""The LoRA adapters that requests can name here, wherever their names come from. Does no I/O."""

import enum
import hashlib
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType

import msgspec

from penstock_common.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unimplemented,
    nearest,
    quoted,
)
from penstock_common.lora_registry import LoraAdapter, LoraHeld, LoraRegistration, LoraRegistry, short
from penstock_frontend.config.frontend import LoraConfig, name_refusal


class LoraSource(enum.IntEnum):
    """Where a name comes from; of several, the first counts. Values equal ``penstock.admin.v1.LoraSource``."""

    CONFIG = 1
    DIRECTORY = 2
    RUN_TIME = 3


class NamedAdapter(msgspec.Struct, frozen=True):
    """What a name means."""

    adapter: LoraAdapter
    source: LoraSource
    pinned: bool = False

    @property
    def name(self) -> str:
        """The name."""
        return self.adapter.name


class Adapters:
    """Names of the configuration, of the watched directory and of run time, in this order of precedence. The last are kept in
    step with other frontends: whoever does that merges into ``registry``, and is told by ``on_change`` of what was said here.

    What engines say of the content of adapters that are not of run time is kept here, for as long as they lie where they do.
    """

    def __init__(
        self,
        config: LoraConfig,
        *,
        model: str,
        frontend_id: str,
        aliases: Mapping[str, str] = MappingProxyType({}),
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """``model``: the base model's name, which means no adapter. ``aliases``: other names, and those that they stand for.
        ``on_change``: called when something was registered here.
        """
        self._aliases = {name: target or model for name, target in aliases.items()}
        self.registry = LoraRegistry()
        self.on_change = on_change
        self._config = config
        self._model = model
        self._frontend_id = frontend_id
        self._paths: dict[LoraSource, Mapping[str, str]] = {
            LoraSource.CONFIG: config.adapters,
            LoraSource.DIRECTORY: {},
        }
        self._digests: dict[tuple[str, str], bytes] = {}
        """By name and path, what an engine said of adapters that are not of run time."""
        self._pinned: set[tuple[str, str]] = set()
        """Of those, what is pinned."""

    @property
    def serves(self) -> bool:
        """Whether requests may name adapters."""
        return self._config.serves

    def count(self) -> dict[str, int]:
        """How many names there are, by the words for where they come from."""
        counts = Counter(named.source for named in self.all())
        return {source.name.lower(): counts[source] for source in LoraSource}

    @property
    def names(self) -> list[str]:
        """All names, in order."""
        known = {each.name for each in self.registry.loaded()}.union(*self._paths.values())
        return sorted(known - {self._model, *self._aliases})

    @property
    def aliases(self) -> Mapping[str, str]:
        """Other names, in order, with those that they stand for: the model's or an adapter's, which there may be not (yet)."""
        return dict(sorted(self._aliases.items()))

    def all(self) -> list[NamedAdapter]:
        """What all names mean, by name."""
        return [named for name in self.names if (named := self.get(name)) is not None]

    def get(self, name: str) -> NamedAdapter | None:
        """The adapter that a name means; None where it means none."""
        name = self._aliases.get(name, name)
        if name == self._model:
            return None
        for source, paths in self._paths.items():
            if (path := paths.get(name)) is not None:
                key = (name, path)
                adapter = LoraAdapter(name, path, self._digests.get(key, b""))
                return NamedAdapter(adapter, source, key in self._pinned)
        registered = self.registry.get(name)
        if registered is None:
            return None
        return NamedAdapter(registered.adapter, LoraSource.RUN_TIME, registered.pinned)

    def named(self, name: str, *, field: str = "name") -> NamedAdapter:
        """What a name means. Raises NotFound."""
        if (named := self.get(name)) is None:
            names = self.names
            raise NotFound(
                f"{field} is {quoted(name)}, which is no LoRA adapter; {_some_of(name, names)}",
                field=field,
                reason="LORA_NOT_FOUND",
            )
        return named

    def asked_for(self, model: str, lora: str, *, field: str = "model") -> str:
        """The adapter that a request names, by ``model`` or by ``lora``; empty: none. The base model's name means none.

        Raises NotFound for what there is not, InvalidArgument for two names, Unimplemented for ``lora`` where none are served.
        """
        asked, (model, lora) = model, (self._aliases.get(name, name) for name in (model, lora))
        model, lora = ("" if name == self._model else name for name in (model, lora))
        if lora and not self.serves:
            raise Unimplemented("lora is not served: this frontend has no LoRA adapters (lora.enabled)", field="lora")
        if model and self.get(model) is None:
            names = self.names
            hint = nearest(model, [self._model, *self._aliases, *names])
            adapters = f" and {len(names)} LoRA adapter{'s' * (len(names) > 1)}" if names else ""
            known = f"known: {self._model}{adapters}{hint}" if hint else _listed([self._model, *self._aliases, *names])
            stands = f", which stands for {quoted(model)}" if asked != model else ""
            raise NotFound(f"{field} is {quoted(asked)}{stands}; {known}", field=field)
        if lora:
            self.named(lora, field="lora")
        if model and lora and model != lora:
            raise InvalidArgument(
                f"lora is {quoted(lora)} and {field} is {quoted(model)}: both name an adapter, and not the same",
                field="lora",
            )
        return lora or model

    def check_registrable(self, name: str) -> None:
        """Raise what speaks against giving this name to an adapter at run time, whatever that is."""
        if refusal := name_refusal(name):
            raise InvalidArgument(f"name {refusal}", field="name")
        if name == self._model:
            raise InvalidArgument(f"name is {quoted(name)}, the model's own", field="name")
        if name in self._aliases:
            stands = quoted(self._aliases[name])
            raise InvalidArgument(f"name is {quoted(name)}, which model.aliases has for {stands}", field="name")
        named = self.get(name)
        if named is not None and named.source is not LoraSource.RUN_TIME:
            raise AlreadyExists(f"name is {quoted(name)}, which the {_WORDS[named.source]} gives", field="name")
        if named is None and (count := len(self.names)) >= self._config.max_registered:
            raise ResourceExhausted(
                f"{count} LoRA adapters have names; lora.max_registered is {self._config.max_registered}",
                reason="LORA_NAMES_FULL",
            )

    def register(self, adapter: LoraAdapter, *, pinned: bool) -> NamedAdapter:
        """Give an adapter its name, on this frontend and those that it is in step with."""
        self._say(adapter.name, path=adapter.path, digest=adapter.digest, pinned=pinned)
        return NamedAdapter(adapter, LoraSource.RUN_TIME, pinned)

    def unregister(self, name: str) -> NamedAdapter:
        """Take a name away. Raises NotFound, and FailedPrecondition where it is not of run time."""
        named = self.named(name)
        if named.source is not LoraSource.RUN_TIME:
            raise FailedPrecondition(
                f"name is {quoted(name)}, which the {_WORDS[named.source]} gives: remove it there", field="name"
            )
        self._say(named.name, unloaded=True)
        return named

    def pin(self, named: NamedAdapter, *, pinned: bool) -> NamedAdapter:
        """Note whether engines keep an adapter in memory."""
        adapter = named.adapter
        if named.source is LoraSource.RUN_TIME:
            return self.register(adapter, pinned=pinned)
        (self._pinned.add if pinned else self._pinned.discard)((adapter.name, adapter.path))
        return NamedAdapter(adapter, named.source, pinned)

    def learned(self, adapter: LoraAdapter) -> None:
        """An engine has said what the content of an adapter is that is not of run time."""
        self._digests[adapter.name, adapter.path] = adapter.digest

    def forget(self, adapter: LoraAdapter) -> None:
        """Its content is not what was learned."""
        if self._digests.get(key := (adapter.name, adapter.path)) == adapter.digest:
            del self._digests[key]

    def follow_directory(self, paths: Mapping[str, str], changed: Mapping[str, str]) -> list[str]:
        """The watched directory has these adapters now, by name; what is in ``changed`` has other content than before. Returns
        names for which there is no room, or that cannot be names, such as the model's own and its aliases.
        """
        for key in changed.items():
            self._digests.pop(key, None)
        gone = set(self._paths[LoraSource.DIRECTORY].items()) - set(paths.items())
        for key in gone:
            self._digests.pop(key, None)
            self._pinned.discard(key)
        room = self._config.max_registered - len(self._config.adapters)
        taken = {self._model, *self._aliases}
        fit = [name for name in sorted(paths) if not name_refusal(name) and name not in taken]
        self._paths[LoraSource.DIRECTORY] = {name: paths[name] for name in fit[:room]}
        return sorted(paths.keys() - self._paths[LoraSource.DIRECTORY].keys())

    def others_with(self, digest: bytes) -> list[str]:
        """Names of adapters that have this content."""
        return [named.name for named in self.all() if named.adapter.digest == digest]

    def _say(
        self, name: str, *, unloaded: bool = False, path: str = "", digest: bytes = b"", pinned: bool = False
    ) -> None:
        self.registry.merge(
            [
                LoraRegistration(
                    name=name,
                    version=self.registry.next_version,
                    frontend_id=self._frontend_id,
                    unloaded=unloaded,
                    path=path,
                    digest=digest,
                    pinned=pinned,
                )
            ]
        )
        self.on_change()


_WORDS = {LoraSource.CONFIG: "configuration", LoraSource.DIRECTORY: "watched directory"}


_LISTED = 5
"""Names that an error lists."""


def _some_of(name: str, names: Collection[str]) -> str:
    """How many names there are and the one that may be meant; the first of them where none is alike."""
    hint = nearest(name, names)
    return f"there {'is 1' if len(names) == 1 else f'are {len(names)}'}{hint}" if hint else _listed(names)


def _listed(names: Collection[str]) -> str:
    first, more = list(names)[:_LISTED], len(names) - _LISTED
    return f"known: {', '.join(first) or 'none'}{f' and {more} more' if more > 0 else ''}"


# Where LoRA adapters are, and on which engines they should be.

LOADING = 4.0
"""What loading an adapter counts as in an engine's score, at least: as much as a waiting request."""
MOST_LOADING = 64.0
EVICTING = 8.0
"""What it counts as on top where it takes the place of others: somebody will want those again, and then others still."""
CACHED = 0.5
"""What an adapter counts as that is in memory and has no slot: less than a running request."""
SLOTS_FULL = 16.0
"""What an adapter counts as that waits until others leave a slot: as much as four waiting requests."""
MOST_HELD = 64
"""Adapters that an engine is taken to hold, those that it was sent last, while it does not say which it does."""
HINT_SECONDS = 1.0
"""How long an engine that says which it holds is taken to have what it was sent: by then it has said so, or has it not."""
_WAITING = 4.0
"""What a waiting request counts as."""


class Where(enum.Enum):
    """How an engine has an adapter."""

    ACTIVE = "active"
    """In a slot, or a request with it is on its way there."""
    CACHED = "cached"
    """In memory."""
    ABSENT = "absent"


class LoraPlaces:
    """By engine, which adapters it holds: as it says, and until it does, those that its requests from here had last. Each engine
    is the home of a part of the adapters, by rendezvous hashing, alike for all frontends: so a few engines hold each, and one
    that comes or goes changes the homes of few.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock``: seconds."""
        self._clock = clock
        self._told: dict[str, _Told] = {}
        self._sent: dict[str, OrderedDict[bytes, float]] = {}
        """By engine, what it was sent, and when."""
        self._most: dict[str, int] = {}

    def sent(self, engine: str, digest: bytes) -> None:
        """A request with this adapter goes to an engine."""
        sent = self._sent.setdefault(engine, OrderedDict())
        sent[digest] = self._clock()
        sent.move_to_end(digest)
        self._cut(engine)

    def lacks(self, engine: str, digest: bytes) -> None:
        """An engine says that it has not got this adapter."""
        self._sent.get(engine, OrderedDict()).pop(digest, None)

    def holds(self, engine: str, count: int) -> None:
        """An engine says how many it holds."""
        self._most[engine] = count
        self._cut(engine)

    def told(self, engine: str, held: LoraHeld) -> None:
        """An engine says which it holds; what it has said of that before, and comes later, is passed over."""
        known = self._told.get(engine)
        if known is None or known.version < held.version:
            self._told[engine] = _Told(held)

    def forget(self, engine: str) -> None:
        """An engine is gone, and holds nothing when it comes back."""
        for known in (self._told, self._sent, self._most):
            known.pop(engine, None)

    def where(self, engine: str, digest: bytes) -> Where:
        """How an engine has an adapter, as far as is known here."""
        told = self._told.get(engine)
        sent_at = self._sent.get(engine, _NOTHING).get(digest)
        if sent_at is not None and (told is None or self._clock() - sent_at < HINT_SECONDS):
            return Where.ACTIVE
        if told is None:
            return Where.ABSENT
        number = short(digest)
        if number in told.active:
            return Where.ACTIVE
        return Where.CACHED if number in told.held else Where.ABSENT

    def term(self, engine: str, digest: bytes) -> float:
        """What an engine's score has to grow by for a request with this adapter."""
        where = self.where(engine, digest)
        if where is Where.ACTIVE:
            return 0.0
        told = self._told.get(engine)
        if told is None:
            return LOADING
        cost = CACHED if where is Where.CACHED else told.loading
        return cost + SLOTS_FULL if told.full else cost

    def in_order(self, engines: Iterable[str], digest: bytes) -> list[str]:
        """The engines, the adapter's home first and then those that are next to be."""
        return sorted(engines, key=lambda engine: _weight(engine, digest))

    def _cut(self, engine: str) -> None:
        sent = self._sent.get(engine, OrderedDict())
        while len(sent) > self._most.get(engine, MOST_HELD):
            sent.popitem(last=False)


class _Told:
    """What an engine said last."""

    __slots__ = ("active", "full", "held", "loading", "version")

    def __init__(self, held: LoraHeld) -> None:
        self.version = held.version
        self.active = frozenset(held.active)
        self.held = frozenset(held.held)
        self.full = 0 < held.max_loras <= len(held.active)
        self.loading = min(max(_WAITING * held.requests_per_load, LOADING), MOST_LOADING)
        if held.full:
            self.loading += EVICTING


_NOTHING: OrderedDict[bytes, float] = OrderedDict()


def _weight(engine: str, digest: bytes) -> bytes:
    return hashlib.blake2b(engine.encode(), key=digest, digest_size=8).digest()
