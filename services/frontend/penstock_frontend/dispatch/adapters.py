"""LoRA adapters that requests can name, and the engines that have loaded these adapters. Does no I/O."""

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
from penstock_frontend.config.models import LoraConfig, name_refusal


class LoraSource(enum.IntEnum):
    """Source of an adapter's name.

    If several sources define the same name, the source that is first in this list has priority. The values equal
    ``penstock.admin.v1.LoraSource``.
    """

    CONFIG = 1
    DIRECTORY = 2
    RUN_TIME = 3


class NamedAdapter(msgspec.Struct, frozen=True):
    """An adapter, and the source that defines its name."""

    adapter: LoraAdapter
    source: LoraSource
    pinned: bool = False

    @property
    def name(self) -> str:
        """Name of the LoRA adapter."""
        return self.adapter.name


class Adapters:
    """Resolves adapter names from the configuration, the watched directory and run-time registration, in this order of
    precedence.

    Names registered at run time are shared with other frontends. Another component merges the names that other
    frontends registered into ``registry``. ``on_change`` is called for each registration on this frontend. For adapters
    that were not registered at run time, this class stores the content digests that engines report. A stored digest is
    valid until the adapter's path changes.
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
        model: the base model's name. A request with this name uses no adapter.
        frontend_id: id of this frontend. The frontend adds the id to each name that it registers.
        aliases: additional names of the base model or of adapters. Each value is the name that the alias stands for.
        on_change: called when this frontend has registered or removed a name.
        """
        self._aliases = {name: target or model for name, target in aliases.items()}
        self.registry = LoraRegistry()
        self.on_change = on_change
        self.other_owner: Callable[[str], str] = lambda _: ""
        """Returns the other model of this frontend for which a name stands, or an empty string."""
        self._config = config
        self._model = model
        self._frontend_id = frontend_id
        self._paths: dict[LoraSource, Mapping[str, str]] = {
            LoraSource.CONFIG: config.adapters,
            LoraSource.DIRECTORY: {},
        }
        self._digests: dict[tuple[str, str], bytes] = {}
        """Content digests that engines reported for adapters that were not registered at run time. The keys are name
        and path of the adapter.
        """
        self._pinned: set[tuple[str, str]] = set()
        """Name and path of each pinned adapter that was not registered at run time."""

    @property
    def model(self) -> str:
        """Name of the base model."""
        return self._model

    @property
    def serves(self) -> bool:
        """True if requests may name LoRA adapters."""
        return self._config.serves

    def is_fixed(self, name: str) -> bool:
        """Return True if the configuration gives this name to the base model or to an alias."""
        return name == self._model or name in self._aliases

    def count(self) -> dict[str, int]:
        """Return the number of adapter names by source of the name."""
        counts = Counter(named.source for named in self.all())
        return {source.name.lower(): counts[source] for source in LoraSource}

    @property
    def names(self) -> list[str]:
        """Names of all adapters in alphabetical order."""
        known = {each.name for each in self.registry.loaded()}.union(*self._paths.values())
        return sorted(known - {self._model, *self._aliases})

    @property
    def aliases(self) -> Mapping[str, str]:
        """Aliases in alphabetical order, each with the name that it stands for. An alias may name an adapter that does
        not exist yet.
        """
        return dict(sorted(self._aliases.items()))

    def all(self) -> list[NamedAdapter]:
        """Return all adapters in alphabetical order of their names."""
        return [named for name in self.names if (named := self.get(name)) is not None]

    def get(self, name: str) -> NamedAdapter | None:
        """Return the adapter with this name or alias, or None if there is none."""
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
        """Return the adapter with this name or alias. Raises NotFound if there is none."""
        if (named := self.get(name)) is None:
            names = self.names
            raise NotFound(
                f"{field} is {quoted(name)}, which is not a LoRA adapter; {_some_of(name, names)}",
                field=field,
                reason="LORA_NOT_FOUND",
            )
        return named

    def asked_for(self, model: str, lora: str, *, field: str = "model") -> str:
        """Return the name of the adapter that a request names in ``model`` or ``lora``. The result is empty for the
        base model.

        Raises:
            NotFound: no model or adapter has the requested name.
            InvalidArgument: ``model`` and ``lora`` name two different adapters.
            Unimplemented: ``lora`` is set, but this frontend serves no adapters.
        """
        asked, (model, lora) = model, (self._aliases.get(name, name) for name in (model, lora))
        model, lora = ("" if name == self._model else name for name in (model, lora))
        if lora and not self.serves:
            raise Unimplemented(
                "lora is not supported: this frontend has no LoRA adapters; set lora.enabled to serve adapters",
                field="lora",
            )
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
        """Check that an adapter can be registered under this name at run time.

        Raises RequestFailed, with the reason, if the name cannot be used.
        """
        if refusal := name_refusal(name):
            raise InvalidArgument(f"name {refusal}", field="name")
        if name == self._model:
            raise InvalidArgument(f"name is {quoted(name)}, which is the base model's name", field="name")
        if name in self._aliases:
            stands = quoted(self._aliases[name])
            raise InvalidArgument(
                f"name is {quoted(name)}, which is an alias for {stands} in model.aliases", field="name"
            )
        if owner := self.other_owner(name):
            raise InvalidArgument(
                f"name is {quoted(name)}, which already stands for the model {quoted(owner)} or one of its adapters",
                field="name",
            )
        named = self.get(name)
        if named is not None and named.source is not LoraSource.RUN_TIME:
            raise AlreadyExists(
                f"name is {quoted(name)}, which the {_WORDS[named.source]} defines; choose another name", field="name"
            )
        if named is None and (count := len(self.names)) >= self._config.max_registered:
            raise ResourceExhausted(
                f"{count} LoRA adapters have names; the limit lora.max_registered is {self._config.max_registered}",
                reason="LORA_NAMES_FULL",
            )

    def register(self, adapter: LoraAdapter, *, pinned: bool) -> NamedAdapter:
        """Register an adapter at run time, for this frontend and for all frontends with which it exchanges names."""
        self._say(adapter.name, path=adapter.path, digest=adapter.digest, pinned=pinned)
        return NamedAdapter(adapter, LoraSource.RUN_TIME, pinned)

    def unregister(self, name: str) -> NamedAdapter:
        """Remove a name that was registered at run time.

        Raises NotFound if no adapter has this name, and FailedPrecondition if its name was not registered at run time.
        """
        named = self.named(name)
        if named.source is not LoraSource.RUN_TIME:
            raise FailedPrecondition(
                f"name is {quoted(name)}, which the {_WORDS[named.source]} defines; remove the adapter there",
                field="name",
            )
        self._say(named.name, unloaded=True)
        return named

    def pin(self, named: NamedAdapter, *, pinned: bool) -> NamedAdapter:
        """Record whether an adapter is pinned, which means that engines always keep it in memory."""
        adapter = named.adapter
        if named.source is LoraSource.RUN_TIME:
            return self.register(adapter, pinned=pinned)
        (self._pinned.add if pinned else self._pinned.discard)((adapter.name, adapter.path))
        return NamedAdapter(adapter, named.source, pinned)

    def learned(self, adapter: LoraAdapter) -> None:
        """Record the content digest that an engine reported for an adapter. Used for adapters that were not registered
        at run time.
        """
        self._digests[adapter.name, adapter.path] = adapter.digest

    def forget(self, adapter: LoraAdapter) -> None:
        """Drop the recorded content digest of an adapter, because the adapter's content has changed."""
        if self._digests.get(key := (adapter.name, adapter.path)) == adapter.digest:
            del self._digests[key]

    def follow_directory(self, paths: Mapping[str, str], changed: Mapping[str, str]) -> list[str]:
        """Replace the adapters of the watched directory by the adapters of a new scan. Return the names that were
        refused.

        A name is refused if it is not valid, or if it is the model's name or an alias. If there are more names than
        ``lora.max_registered`` allows, the last names are refused.

        Args:
            paths: path of each adapter in the directory, by adapter name.
            changed: path of each adapter whose content has changed since the last scan, by adapter name.
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
        """Return the names of all adapters whose content has this digest."""
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
"""Maximum number of adapter names that an error message lists."""


def _some_of(name: str, names: Collection[str]) -> str:
    """Return text for an error message: the number of adapter names, and the name that is most similar to ``name``.

    If no name is similar to ``name``, the text lists the first ``_LISTED`` names instead.
    """
    hint = nearest(name, names)
    return f"there {'is 1' if len(names) == 1 else f'are {len(names)}'}{hint}" if hint else _listed(names)


def _listed(names: Collection[str]) -> str:
    first, more = list(names)[:_LISTED], len(names) - _LISTED
    return f"known: {', '.join(first) or 'none'}{f' and {more} more' if more > 0 else ''}"


# The code below decides which engine should load which LoRA adapter.

LOADING = 4.0
"""Minimum score that an engine gets if it must load the adapter first. The score equals the score of one waiting
request.
"""
MOST_LOADING = 64.0
EVICTING = 8.0
"""Additional score if the engine must evict other adapters to load this adapter, because it must load the evicted
adapters again later.
"""
CACHED = 0.5
"""Score that an engine gets if the adapter is in its host memory but has no slot. The score is lower than the score of
one running request.
"""
SLOTS_FULL = 16.0
"""Additional score that an engine gets if all its slots are in use. The score equals the score of four waiting
requests.
"""
MOST_HELD = 64
"""Maximum number of adapters that an engine is assumed to have loaded, if the engine has not reported how many it has.
The frontend assumes that the engine has the adapters of the latest requests that it sent to the engine.
"""
HINT_SECONDS = 1.0
"""Number of seconds for which the adapter of a sent request counts as loaded, on an engine that reports its adapters.
The engine's next report is expected within this time.
"""
_WAITING = 4.0
"""Score of a waiting request."""


class Where(enum.Enum):
    """State of a LoRA adapter on an engine."""

    ACTIVE = "active"
    """The adapter has a slot on the engine, or the frontend has just sent a request with this adapter to the engine."""
    CACHED = "cached"
    """The adapter is in the engine's host memory, but has no slot."""
    ABSENT = "absent"


class LoraPlaces:
    """Tracks which adapters each engine has loaded.

    Each engine reports its adapters. Before an engine's first report, the adapters of the latest requests that were
    sent to the engine count as loaded. Rendezvous hashing gives each adapter a home engine, which is the same for all
    frontends. As a result, few engines load the same adapter. If an engine joins or leaves, few adapters get another
    home engine.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Create the tracker. ``clock`` returns monotonic seconds."""
        self._clock = clock
        self._told: dict[str, _Told] = {}
        self._sent: dict[str, OrderedDict[bytes, float]] = {}
        """Time at which the frontend last sent a request with this adapter to this engine. The keys are the engine and
        the adapter's digest.
        """
        self._most: dict[str, int] = {}

    def sent(self, engine: str, digest: bytes) -> None:
        """Record that a request with this adapter was sent to an engine."""
        sent = self._sent.setdefault(engine, OrderedDict())
        sent[digest] = self._clock()
        sent.move_to_end(digest)
        self._cut(engine)

    def lacks(self, engine: str, digest: bytes) -> None:
        """Record that an engine has not loaded this adapter, although the frontend assumed it."""
        self._sent.get(engine, OrderedDict()).pop(digest, None)

    def holds(self, engine: str, count: int) -> None:
        """Record how many adapters an engine has in memory or is loading, according to the engine's report."""
        self._most[engine] = count
        self._cut(engine)

    def told(self, engine: str, held: LoraHeld) -> None:
        """Record an engine's report of its adapters. Ignore a report that is older than the report recorded before."""
        known = self._told.get(engine)
        if known is None or known.version < held.version:
            self._told[engine] = _Told(held)

    def forget(self, engine: str) -> None:
        """Forget a lost engine's adapters. After a restart, the engine has no adapters."""
        for known in (self._told, self._sent, self._most):
            known.pop(engine, None)

    def where(self, engine: str, digest: bytes) -> Where:
        """Return the state of an adapter on an engine, as far as the frontend knows it."""
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
        """Return the number to add to an engine's score for a request with this adapter. The router prefers low scores."""
        where = self.where(engine, digest)
        if where is Where.ACTIVE:
            return 0.0
        told = self._told.get(engine)
        if told is None:
            return LOADING
        cost = CACHED if where is Where.CACHED else told.loading
        return cost + SLOTS_FULL if told.full else cost

    def in_order(self, engines: Iterable[str], digest: bytes) -> list[str]:
        """Return the engines, ordered by the rendezvous hash of engine and adapter.

        The adapter's home engine comes first.
        """
        return sorted(engines, key=lambda engine: _weight(engine, digest))

    def _cut(self, engine: str) -> None:
        sent = self._sent.get(engine, OrderedDict())
        while len(sent) > self._most.get(engine, MOST_HELD):
            sent.popitem(last=False)


class _Told:
    """Latest report of an engine about its LoRA adapters."""

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
