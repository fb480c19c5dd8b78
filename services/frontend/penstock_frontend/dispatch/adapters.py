"""LoRA adapters that requests can name, and the engines that hold them. Does no I/O."""

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
    """Source of an adapter's name. The first source in this order wins. Values equal ``penstock.admin.v1.LoraSource``."""

    CONFIG = 1
    DIRECTORY = 2
    RUN_TIME = 3


class NamedAdapter(msgspec.Struct, frozen=True):
    """An adapter with the source of its name."""

    adapter: LoraAdapter
    source: LoraSource
    pinned: bool = False

    @property
    def name(self) -> str:
        """Name of the adapter."""
        return self.adapter.name


class Adapters:
    """Resolves adapter names from the configuration, the watched directory and run-time registration, in this order of
    precedence.

    Run-time names are shared with other frontends: the code that exchanges them merges into ``registry``, and
    ``on_change`` reports registrations made here. For all other adapters this class keeps the content digests that
    engines report, while the adapters' paths stay.
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
        """Args:
        config: the LoRA settings.
        model: the base model's name, which means no adapter.
        frontend_id: name of this frontend in registrations.
        aliases: further names, each with its target.
        on_change: called when a name was registered or removed here.
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
        """Digest that an engine reported for adapters not registered at run time, by name and path."""
        self._pinned: set[tuple[str, str]] = set()
        """Pinned adapters among those not registered at run time, by name and path."""

    @property
    def serves(self) -> bool:
        """True if requests may name adapters."""
        return self._config.serves

    def count(self) -> dict[str, int]:
        """Return the number of names by source."""
        counts = Counter(named.source for named in self.all())
        return {source.name.lower(): counts[source] for source in LoraSource}

    @property
    def names(self) -> list[str]:
        """All names, sorted."""
        known = {each.name for each in self.registry.loaded()}.union(*self._paths.values())
        return sorted(known - {self._model, *self._aliases})

    @property
    def aliases(self) -> Mapping[str, str]:
        """Aliases with their targets, sorted. A target may be an adapter that does not exist (yet)."""
        return dict(sorted(self._aliases.items()))

    def all(self) -> list[NamedAdapter]:
        """Return all adapters, sorted by name."""
        return [named for name in self.names if (named := self.get(name)) is not None]

    def get(self, name: str) -> NamedAdapter | None:
        """Return the adapter of a name or alias, or None."""
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
        """Return the adapter of a name. Raises NotFound."""
        if (named := self.get(name)) is None:
            names = self.names
            raise NotFound(
                f"{field} is {quoted(name)}, which is not a LoRA adapter; {_some_of(name, names)}",
                field=field,
                reason="LORA_NOT_FOUND",
            )
        return named

    def asked_for(self, model: str, lora: str, *, field: str = "model") -> str:
        """Return the name of the adapter that a request names by ``model`` or ``lora``; empty for the base model.

        Raises:
            NotFound: no model or adapter has that name.
            InvalidArgument: the fields name two different adapters.
            Unimplemented: ``lora`` is set, but no adapters are served.
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
                f"lora is {quoted(lora)} and {field} is {quoted(model)}: they name two different adapters",
                field="lora",
            )
        return lora or model

    def check_registrable(self, name: str) -> None:
        """Check that an adapter may get this name at run time. Raises a RequestFailed that says why not."""
        if refusal := name_refusal(name):
            raise InvalidArgument(f"name {refusal}", field="name")
        if name == self._model:
            raise InvalidArgument(f"name is {quoted(name)}, the model's own", field="name")
        if name in self._aliases:
            stands = quoted(self._aliases[name])
            raise InvalidArgument(f"name is {quoted(name)}, which model.aliases has for {stands}", field="name")
        named = self.get(name)
        if named is not None and named.source is not LoraSource.RUN_TIME:
            raise AlreadyExists(
                f"name is {quoted(name)}, which the {_WORDS[named.source]} defines; choose another name", field="name"
            )
        if named is None and (count := len(self.names)) >= self._config.max_registered:
            raise ResourceExhausted(
                f"{count} LoRA adapters have names; lora.max_registered is {self._config.max_registered}",
                reason="LORA_NAMES_FULL",
            )

    def register(self, adapter: LoraAdapter, *, pinned: bool) -> NamedAdapter:
        """Register an adapter at run time, on this frontend and on all frontends that share the registry."""
        self._say(adapter.name, path=adapter.path, digest=adapter.digest, pinned=pinned)
        return NamedAdapter(adapter, LoraSource.RUN_TIME, pinned)

    def unregister(self, name: str) -> NamedAdapter:
        """Remove a name. Raises NotFound, and FailedPrecondition if it was not registered at run time."""
        named = self.named(name)
        if named.source is not LoraSource.RUN_TIME:
            raise FailedPrecondition(
                f"name is {quoted(name)}, which the {_WORDS[named.source]} defines; remove the adapter there",
                field="name",
            )
        self._say(named.name, unloaded=True)
        return named

    def pin(self, named: NamedAdapter, *, pinned: bool) -> NamedAdapter:
        """Record whether engines keep an adapter in memory."""
        adapter = named.adapter
        if named.source is LoraSource.RUN_TIME:
            return self.register(adapter, pinned=pinned)
        (self._pinned.add if pinned else self._pinned.discard)((adapter.name, adapter.path))
        return NamedAdapter(adapter, named.source, pinned)

    def learned(self, adapter: LoraAdapter) -> None:
        """Record the content digest that an engine reported for an adapter not registered at run time."""
        self._digests[adapter.name, adapter.path] = adapter.digest

    def forget(self, adapter: LoraAdapter) -> None:
        """Drop a recorded digest, because the adapter's content differs from it."""
        if self._digests.get(key := (adapter.name, adapter.path)) == adapter.digest:
            del self._digests[key]

    def follow_directory(self, paths: Mapping[str, str], changed: Mapping[str, str]) -> list[str]:
        """Apply a scan of the watched directory. Return the names that were not accepted.

        A name is refused if there are too many, if it is not valid, or if it is the model's name or an alias.

        Args:
            paths: path of each adapter, by name.
            changed: adapters whose content has changed.
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
        """Return the names of all adapters with this content digest."""
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
"""Maximum number of names in an error message."""


def _some_of(name: str, names: Collection[str]) -> str:
    """Return the number of names and the most similar one, or the first names if none is similar."""
    hint = nearest(name, names)
    return f"there {'is 1' if len(names) == 1 else f'are {len(names)}'}{hint}" if hint else _listed(names)


def _listed(names: Collection[str]) -> str:
    first, more = list(names)[:_LISTED], len(names) - _LISTED
    return f"known: {', '.join(first) or 'none'}{f' and {more} more' if more > 0 else ''}"


# Placement of LoRA adapters on engines.

LOADING = 4.0
"""Minimum score of loading an adapter: as much as a waiting request."""
MOST_LOADING = 64.0
EVICTING = 8.0
"""Additional score of loading if it evicts other adapters, because those will have to be loaded again later."""
CACHED = 0.5
"""Score of an adapter that is in memory but not in a slot: less than a running request."""
SLOTS_FULL = 16.0
"""Score of waiting for a free slot: as much as four waiting requests."""
MOST_HELD = 64
"""Number of adapters, the most recently sent ones, that an engine is assumed to hold if it does not report them."""
HINT_SECONDS = 1.0
"""Seconds for which a sent adapter counts as loaded on an engine that reports its adapters. A report is expected by
then.
"""
_WAITING = 4.0
"""Score of a waiting request."""


class Where(enum.Enum):
    """State of an adapter on an engine."""

    ACTIVE = "active"
    """The adapter has a slot, or a request that uses it was just sent."""
    CACHED = "cached"
    """The adapter is in memory, without a slot."""
    ABSENT = "absent"


class LoraPlaces:
    """Tracks which adapters each engine holds: those it reports, or, before a report, those of the requests that were
    last sent to it.

    Rendezvous hashing gives each adapter home engines, the same for all frontends. As a result, each adapter is on few
    engines, and an engine that joins or leaves changes few homes.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock`` returns monotonic seconds."""
        self._clock = clock
        self._told: dict[str, _Told] = {}
        self._sent: dict[str, OrderedDict[bytes, float]] = {}
        """Time at which each adapter was last sent, by engine."""
        self._most: dict[str, int] = {}

    def sent(self, engine: str, digest: bytes) -> None:
        """Record that a request with this adapter was sent to an engine."""
        sent = self._sent.setdefault(engine, OrderedDict())
        sent[digest] = self._clock()
        sent.move_to_end(digest)
        self._cut(engine)

    def lacks(self, engine: str, digest: bytes) -> None:
        """Record that an engine does not have this adapter."""
        self._sent.get(engine, OrderedDict()).pop(digest, None)

    def holds(self, engine: str, count: int) -> None:
        """Record how many adapters an engine reports to hold."""
        self._most[engine] = count
        self._cut(engine)

    def told(self, engine: str, held: LoraHeld) -> None:
        """Record which adapters an engine holds. Ignore reports older than the known one."""
        known = self._told.get(engine)
        if known is None or known.version < held.version:
            self._told[engine] = _Told(held)

    def forget(self, engine: str) -> None:
        """Forget an engine that is gone. After a restart it holds no adapters."""
        for known in (self._told, self._sent, self._most):
            known.pop(engine, None)

    def where(self, engine: str, digest: bytes) -> Where:
        """Return the state of an adapter on an engine, as far as known."""
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
        """Return the amount to add to an engine's score for a request with this adapter."""
        where = self.where(engine, digest)
        if where is Where.ACTIVE:
            return 0.0
        told = self._told.get(engine)
        if told is None:
            return LOADING
        cost = CACHED if where is Where.CACHED else told.loading
        return cost + SLOTS_FULL if told.full else cost

    def in_order(self, engines: Iterable[str], digest: bytes) -> list[str]:
        """Return the engines in order of rendezvous hash, with the adapter's home first."""
        return sorted(engines, key=lambda engine: _weight(engine, digest))

    def _cut(self, engine: str) -> None:
        sent = self._sent.get(engine, OrderedDict())
        while len(sent) > self._most.get(engine, MOST_HELD):
            sent.popitem(last=False)


class _Told:
    """Latest report of an engine about its adapters."""

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
