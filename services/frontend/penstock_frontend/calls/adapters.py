"""Calls that find, load, unload and pin LoRA adapters, and the watched directory of adapters."""

import asyncio
import hashlib
import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar

import msgspec

from penstock_common.errors import (
    LONGEST_PATH,
    AlreadyExists,
    ConfigError,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    RequestFailed,
    Unavailable,
    Unimplemented,
    quoted,
)
from penstock_common.lora_registry import LoraAdapter
from penstock_common.observability.logging import get_logger
from penstock_common.types.request import RequestContext
from penstock_frontend.config.models import MAX_PATH_LENGTH, LoraConfig
from penstock_frontend.dispatch.adapters import Adapters, LoraSource, NamedAdapter
from penstock_frontend.dispatch.pool import LORA, error_of_engine
from penstock_frontend.interfaces import EngineClient

P = ParamSpec("P")
T = TypeVar("T")
_HEARD_AFTER = 2.0
"""Number of seconds after which other frontends know that an adapter's name has new content. During this time, engines
keep the old content in memory.
"""
CHANGED = "LORA_CHANGED"
"""Error reason that an engine gives if the content of a request's LoRA adapter does not match the digest in the
request.
"""


class HeldAdapter(msgspec.Struct, frozen=True):
    """Report of an engine about a LoRA adapter that it has in memory.

    The engine's utility method ``add_lora`` returns one report, and ``list_loras`` returns a list of reports.
    """

    digest: bytes
    rank: int = 0
    modules: Sequence[str] = ()
    num_bytes: int = 0
    pinned: bool = False


class AdapterInfo(msgspec.Struct, frozen=True, kw_only=True):
    """State of a LoRA adapter, as operators see it."""

    adapter: LoraAdapter
    source: LoraSource
    pinned: bool
    held: HeldAdapter | None = None
    """Report of one engine that has the adapter in memory. None if no engine has the adapter in memory."""
    engine_ids: Sequence[str] = ()
    """Ids of all engines that have the adapter in memory."""


def _to_its_end(
    change: Callable[Concatenate["AdapterCalls", P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate["AdapterCalls", P], Coroutine[Any, Any, T]]:
    """Decorate a method that changes LoRA adapters, so that the method runs to its end even if its caller is cancelled.

    If the method stopped in the middle, engines could keep adapters that no name refers to.
    """

    async def changed(self: "AdapterCalls", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.shield(self._do_beside(change(self, *args, **kwargs)))

    return changed


class AdapterCalls:
    """Loads, unloads and pins LoRA adapters on engines, and finds the adapter of each request.

    Engines have these utility methods:

    - ``add_lora(name, path, digest, pinned)``: loads the adapter into memory, and returns a HeldAdapter. ``digest`` is
      empty if the digest is not known yet. If the adapter's content does not match the digest, the call fails.
    - ``remove_lora(digest)``: frees the adapter once no request uses the adapter.
    - ``pin_lora(digest, pinned)``: pins or unpins the adapter in memory.
    - ``list_loras()``: returns a report for each adapter in memory.

    Only one change of adapter names runs at a time.
    """

    def __init__(self, adapters: Adapters, config: LoraConfig, engines: EngineClient) -> None:
        self.adapters = adapters
        self._config = config
        self._engines = engines
        self._changing = asyncio.Lock()
        self._serving: frozenset[str] = frozenset()
        self._background: set[asyncio.Task[Any]] = set()
        self._reading: dict[LoraAdapter, asyncio.Task[LoraAdapter]] = {}

    async def of_request(self, context: RequestContext) -> LoraAdapter | None:
        """Return the LoRA adapter that a request names, with the adapter's digest. Return None if the request names no
        adapter.

        If the digest is not known yet, an engine must read the adapter first, so at least one engine must accept
        requests. Raises RequestFailed if no adapter has this name or no engine can read the adapter.
        """
        name = self.adapters.asked_for(context.model, context.lora)
        if not name:
            return None
        adapter = self.adapters.named(name).adapter
        self._check_served("lora" if context.lora else "model")
        return adapter if adapter.digest else await self._read(adapter)

    def refused(self, adapter: LoraAdapter | None, error: RequestFailed) -> None:
        """Handle an engine's refusal of a request that uses a LoRA adapter.

        If the engine refused the request because the adapter's content has changed, the next request makes an engine
        read the adapter again. This does not apply to adapters registered at run time: an operator must load them
        again.
        """
        if adapter is not None and error.reason == CHANGED:
            self.adapters.forget(adapter)

    @_to_its_end
    async def load(self, name: str, path: str, *, load_inplace: bool, pinned: bool) -> AdapterInfo:
        """Load a LoRA adapter on every engine, and register the adapter's name.

        If this method raises RequestFailed, neither the names nor the engines' adapters have changed.
        """
        self._check_enabled()
        self._check_path(path)
        async with self._changing:
            self.adapters.check_registrable(name)
            before = self.adapters.get(name)
            held = await self._add_everywhere(LoraAdapter(name, path), pinned=pinned)
            digest = next(iter(held.values())).digest
            if before is not None and before.adapter.digest != digest and not load_inplace:
                await self._remove(digest)
                raise AlreadyExists(
                    f"name is {quoted(name)}, which is already the name of an adapter with other content, loaded "
                    f"from {before.adapter.path}; set load_inplace to replace that adapter",
                    field="name",
                    reason="LORA_NAME_TAKEN",
                )
            named = self.adapters.register(LoraAdapter(name, path, digest), pinned=pinned)
            if before is not None:
                asyncio.get_running_loop().call_later(_HEARD_AFTER, self._remove_soon, before.adapter.digest)
            get_logger().info("LoRA adapter loaded", name=name, path=path, digest=digest.hex(), engines=len(held))
            return _info(named, held)

    @_to_its_end
    async def unload(self, name: str) -> AdapterInfo:
        """Remove an adapter's name. If no other name refers to the same adapter, the engines free it. Raises
        RequestFailed.
        """
        self._check_enabled()
        async with self._changing:
            named = self.adapters.unregister(name)
            get_logger().info("LoRA adapter unloaded", name=name, path=named.adapter.path)
            await self._remove(named.adapter.digest)
            return _info(named, {})

    async def list(self) -> list[AdapterInfo]:
        """Return all adapters that requests can name, sorted by name.

        If an engine fails to list its adapters, this method raises the engine's error.
        """
        self._check_enabled()
        named = self.adapters.all()
        held = await self._held() if named else {}
        return [
            _info(
                each,
                {engine: held[engine][digest] for engine in held if (digest := each.adapter.digest) in held[engine]},
            )
            for each in named
        ]

    @_to_its_end
    async def pin(self, name: str, *, pinned: bool) -> AdapterInfo:
        """Pin a LoRA adapter in the memory of every engine, or unpin it. Raises RequestFailed if the name is unknown or
        an engine fails to pin the adapter.
        """
        self._check_enabled()
        async with self._changing:
            named = self.adapters.named(name)
            held: Mapping[str, HeldAdapter] = {}
            if pinned:
                held = await self._add_everywhere(named.adapter, pinned=True)
                if not named.adapter.digest:
                    digest = next(iter(held.values())).digest
                    named = NamedAdapter(self._learned(named.adapter, digest), named.source)
            elif named.adapter.digest and not self._is_pinned(named.adapter.digest, but=name):
                await self._unpin(named.adapter.digest)
            return _info(self.adapters.pin(named, pinned=pinned), held)

    def engines_changed(self) -> None:
        """Load the pinned LoRA adapters on the engines that have joined since the last call of this method."""
        serving = frozenset(self._engines.view.serving(LORA)) if self.adapters.serves else frozenset()
        come, self._serving = serving - self._serving, serving
        for named in self.adapters.all() if come else ():
            if named.pinned:
                for engine in sorted(come):
                    self._do_beside(self._pin_on(engine, named))

    def _check_enabled(self) -> None:
        if not self.adapters.serves:
            raise Unimplemented("LoRA adapters are not supported: lora.enabled is false; set lora.enabled to true")

    def _check_served(self, field: str) -> None:
        """Check that at least one connected engine supports LoRA adapters.

        Raises Unimplemented if engines are connected, but none of them supports LoRA adapters.
        """
        if not self._engines.view.serving(LORA) and self._engines.view.capabilities:
            raise Unimplemented(
                f"{field} names a LoRA adapter, but no connected engine supports adapters; set lora.max_loras of the "
                "engines to at least 1 (penstock serve does so with --lora and --lora-directory)",
                field=field,
            )

    def _check_path(self, path: str) -> None:
        if not path or len(path) > MAX_PATH_LENGTH:
            raise InvalidArgument(
                f"path has {len(path)} characters; it must have from 1 to {MAX_PATH_LENGTH}", field="path"
            )
        if not self._config.allows(path):
            limit = (
                f"it must be an absolute path below one of lora.roots, and not a root itself: {', '.join(roots)}"
                if (roots := self._config.roots)
                else "lora.roots is empty, so no adapter may be loaded while requests are served; add a directory to lora.roots"
            )
            raise PermissionDenied(
                f"path is {quoted(path, LONGEST_PATH)}; {limit}",
                field="path",
                reason="LORA_PATH",
            )

    async def _read(self, adapter: LoraAdapter) -> LoraAdapter:
        """Let an engine read a LoRA adapter, and return the adapter with its digest.

        If several calls ask for the same adapter at once, an engine reads it only once.
        """
        task = self._reading.get(adapter)
        if task is None:
            task = self._reading[adapter] = asyncio.create_task(self._read_once(adapter))
            task.add_done_callback(lambda done: self._has_read(adapter, done))
        return await asyncio.shield(task)

    def _has_read(self, adapter: LoraAdapter, task: asyncio.Task[LoraAdapter]) -> None:
        self._reading.pop(adapter, None)
        if not task.cancelled():
            task.exception()  # mark the exception as retrieved; the callers that still wait for the task receive it

    async def _read_once(self, adapter: LoraAdapter) -> LoraAdapter:
        """Ask one engine after the other to read a LoRA adapter, until one of them succeeds.

        If no engine can read the adapter, this method raises the error of the first engine.
        """
        failed: RequestFailed | None = None
        for engine in _in_turn(adapter.name, self._engines.view.serving(LORA)):
            arguments = [adapter.name, adapter.path, b"", False]
            answer = (await self._engines.call_utility("add_lora", arguments, engine=engine)).get(engine)
            if answer is None:  # the engine has disconnected since the list of engines was read
                continue
            if not isinstance(answer, RequestFailed):
                return self._learned(adapter, _held_of(engine, answer).digest)
            failed = failed or error_of_engine(engine, answer)
        raise failed or Unavailable("none of the engines that could read the adapter is connected", retry_after=1.0)

    def _learned(self, adapter: LoraAdapter, digest: bytes) -> LoraAdapter:
        known = LoraAdapter(adapter.name, adapter.path, digest)
        self.adapters.learned(known)
        return known

    async def _add_everywhere(self, adapter: LoraAdapter, *, pinned: bool) -> dict[str, HeldAdapter]:
        """Load a LoRA adapter on every engine. Return the engines' reports about the adapter.

        If an engine fails to load the adapter, this method raises the error of the first such engine. Raises
        FailedPrecondition if engines find different content at the path. After either error, the engines free the
        adapter again.
        """
        self._check_served("name")
        answers = await self._call("add_lora", adapter.name, adapter.path, adapter.digest, pinned)
        if not answers:
            raise Unavailable("no engine is connected", retry_after=1.0)
        held = {engine: _held_of(engine, a) for engine, a in answers.items() if not isinstance(a, RequestFailed)}
        digests = {each.digest: engine for engine, each in held.items()}
        failed = next(
            (error_of_engine(e, answer) for e, answer in answers.items() if isinstance(answer, RequestFailed)), None
        )
        if failed is not None:
            # drop the error's field, because it names a field of the engine's request, not of the client's request
            failed.field = ""
        elif len(digests) > 1:
            failed = FailedPrecondition(
                f"path is {quoted(adapter.path, LONGEST_PATH)}, but engines find different adapters at this path: "
                + ", ".join(f"{engine} {digest.hex()}" for digest, engine in digests.items()),
                field="path",
                reason="LORA_DIFFERS",
            )
        if failed is not None:
            for digest in digests:
                await self._remove(digest)
            raise failed
        return held

    async def _held(self) -> dict[str, dict[bytes, HeldAdapter]]:
        """Return the reports about all LoRA adapters in the engines' memory, by engine and digest."""
        held: dict[str, dict[bytes, HeldAdapter]] = {}
        for engine, answer in (await self._call("list_loras")).items():
            if isinstance(answer, RequestFailed):
                raise error_of_engine(engine, answer)
            entries = [_held_of(engine, entry) for entry in answer]
            held[engine] = {entry.digest: entry for entry in entries}
        return held

    def _remove_soon(self, digest: bytes) -> None:
        self._do_beside(self._remove(digest))

    def _do_beside(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def _pin_on(self, engine: str, named: NamedAdapter) -> None:
        """Load a pinned LoRA adapter on an engine that has joined.

        If the engine fails to load the adapter, the frontend only logs the error, because a later request makes the
        engine load the adapter.
        """
        adapter = named.adapter
        arguments = [adapter.name, adapter.path, adapter.digest, True]
        answer = (await self._engines.call_utility("add_lora", arguments, engine=engine)).get(engine)
        if isinstance(answer, RequestFailed):
            get_logger().warning(
                "engine failed to load a pinned LoRA adapter", engine=engine, name=named.name, error=answer.message
            )

    def _is_pinned(self, digest: bytes, *, but: str = "") -> bool:
        """Return True if a pinned name other than ``but`` refers to the LoRA adapter with this content digest."""
        pinned = (each for each in self.adapters.all() if each.pinned and each.name != but)
        return any(each.adapter.digest == digest for each in pinned)

    async def _unpin(self, digest: bytes) -> None:
        """Unpin a LoRA adapter on all engines that have it in memory. Raises the first error of an engine that is not
        NotFound.
        """
        for engine, answer in (await self._call("pin_lora", digest, False)).items():
            if isinstance(answer, RequestFailed) and not isinstance(answer, NotFound):
                raise error_of_engine(engine, answer)

    async def _remove(self, digest: bytes) -> None:
        """Free the content of a LoRA adapter on all engines, if no name refers to the content any more.

        If only names that are not pinned refer to the content, unpin the content.

        If an engine fails to free the content, the frontend only logs the error, because engines can still evict
        unpinned adapters.
        """
        if not digest or self._is_pinned(digest):
            return
        if self.adapters.others_with(digest):
            answers = await self._call("pin_lora", digest, False)
        else:
            answers = await self._call("remove_lora", digest)
        for engine, answer in answers.items():
            if isinstance(answer, RequestFailed) and not isinstance(answer, NotFound):
                get_logger().warning(
                    "an engine failed to free a LoRA adapter that was unloaded", engine=engine, error=answer.message
                )

    async def _call(self, method: str, *arguments: object) -> dict[str, Any]:
        """Call a utility method on the engines that support LoRA adapters. Return, by engine id, the result or the
        RequestFailed error.
        """
        engines = self._engines.view.serving(LORA)
        calls = (self._engines.call_utility(method, list(arguments), engine=engine) for engine in engines)
        answers: dict[str, Any] = {}
        for answer in await asyncio.gather(*calls):
            answers |= answer
        return answers


def _held_of(engine: str, answer: object) -> HeldAdapter:
    """Decode an engine's report about a LoRA adapter. Raises Internal if the report is not valid."""
    try:
        held = msgspec.convert(answer, HeldAdapter)
    except msgspec.ValidationError as e:
        raise Internal(f"engine {engine} sent an invalid report about a LoRA adapter: {e}") from None
    return held


def _in_turn(name: str, engines: Sequence[str]) -> list[str]:
    """Return the engines in a fixed pseudo-random order that depends on the adapter's name."""
    return sorted(engines, key=lambda engine: hashlib.blake2b(f"{name}\0{engine}".encode(), digest_size=8).digest())


def _info(named: NamedAdapter, held: Mapping[str, HeldAdapter]) -> AdapterInfo:
    return AdapterInfo(
        adapter=named.adapter,
        source=named.source,
        pinned=named.pinned,
        held=next(iter(held.values()), None),
        engine_ids=sorted(held),
    )


# The code below watches a directory in which each subdirectory is a LoRA adapter.

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_SHOWN = 8
"""Maximum number of adapter names in a log line."""

Stamp: TypeAlias = "tuple[tuple[int, int, int] | None, ...]"
"""Identity of an adapter's files, by which a scan detects replaced files. Each item is the inode, size and modification
time of a file, or None if the file is missing.
"""


class AdapterDirectory:
    """Registers each subdirectory of the watched directory as a LoRA adapter.

    Call ``begin`` before requests are served, then ``run``.

    If the directory cannot be read, the names of all its adapters stay unchanged. If a subdirectory cannot be read,
    only the name of this subdirectory stays unchanged.
    """

    def __init__(self, path: str, interval: float, adapters: Adapters) -> None:
        """Create the watcher. ``interval`` is the number of seconds between two scans of the directory."""
        self._path = Path(path)
        self._interval = interval
        self._adapters = adapters
        self._found: Mapping[str, Stamp] = {}
        self._unreadable = False
        self._problems: Mapping[str, str] = {}

    async def run(self) -> None:
        """Scan the directory again and again, with ``interval`` seconds between two scans."""
        while True:
            await asyncio.sleep(self._interval)
            await self.look()

    async def begin(self) -> None:
        """Scan the directory for the first time.

        Raises ConfigError if an adapter's name is also in ``model.aliases``.
        """
        await self.look()
        for name, target in self._adapters.aliases.items():
            if name in self._found:
                raise ConfigError(
                    f"model.aliases has the alias {name!r} for {target!r}, but lora.directory has an adapter of the same "
                    f"name: {self._at(name)}"
                )

    async def look(self) -> None:
        """Scan the directory, and apply the changes of its adapters since the last scan."""
        try:
            found, problems = await asyncio.to_thread(adapters_in, self._path)
        except OSError as e:
            if not self._unreadable:
                self._warn(f"cannot be read, so the names stay unchanged: {e.strerror or e}")
            self._unreadable = True
            return
        self._unreadable = False
        found |= {name: self._found[name] for name in problems if name in self._found}
        if found != self._found:
            self._follow(found)
        if problems != self._problems:
            self._problems = problems
            self._warn_of(problems)

    def _follow(self, found: Mapping[str, Stamp]) -> None:
        changed = {name for name, stamp in self._found.items() if found.get(name, stamp) != stamp}
        come, gone = sorted(found.keys() - self._found.keys()), sorted(self._found.keys() - found.keys())
        self._found = found
        left_out = self._adapters.follow_directory(
            {name: self._at(name) for name in found}, {name: self._at(name) for name in changed}
        )
        get_logger().info("LoRA adapters in lora.directory changed", added=come, removed=gone, changed=sorted(changed))
        if left_out:
            self._warn(f"has names that were refused (taken, not valid, or too many): {', '.join(left_out[:_SHOWN])}")

    def _at(self, name: str) -> str:
        return str(self._path / name)

    def _warn_of(self, problems: Mapping[str, str]) -> None:
        if problems:
            shown = "; ".join(f"{name}: {problems[name]}" for name in sorted(problems)[:_SHOWN])
            self._warn(f"has {len(problems)} subdirectories that cannot be read: {shown}")

    def _warn(self, problem: str) -> None:
        get_logger().warning(f"lora.directory {problem}", directory=str(self._path))


def adapters_in(path: Path) -> tuple[dict[str, Stamp], dict[str, str]]:
    """Return the LoRA adapters in the directory ``path`` by name. Also return, by name, the errors of subdirectories
    that cannot be read.

    Subdirectories whose names begin with a dot are ignored. Raises OSError if ``path`` itself cannot be read.
    """
    with os.scandir(path) as entries:
        names = [entry.name for entry in entries if not entry.name.startswith(".")]
    found: dict[str, Stamp] = {}
    problems: dict[str, str] = {}
    for name in names:
        try:
            config, weights = (_stamp(path / name / file) for file in (_CONFIG, _WEIGHTS))
        except OSError as e:
            problems[name] = f"{e.strerror}: {e.filename}"
        else:
            if config is not None:
                found[name] = config, weights
    return found, problems


def _stamp(file: Path) -> tuple[int, int, int] | None:
    try:
        found = file.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
