"""Reload of a service's config file while the service runs."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, Generic, TypeVar

import msgspec

from penstock_common.config.loader import ConfigSource
from penstock_common.config.settings import differences, with_reread
from penstock_common.observability.logging import get_logger, incident
from penstock_common.security.reloaded_files import WatchedFiles

T = TypeVar("T", bound=msgspec.Struct)

LOOK_INTERVAL = 2.0
"""Seconds between two checks whether the file has changed."""


class ConfigFile(Generic[T]):
    """Current configuration of a service, updated when the config file changes.

    Changes in the sections of ``config.reread`` are applied. If other settings change, one log line says that these
    settings need a restart. The environment and flags override the new file in the same way as the old file. An invalid
    file has no effect.
    """

    def __init__(self, source: ConfigSource[T]) -> None:
        """Read the config file. Raises ConfigError if the file cannot be read or a setting is not valid."""
        self._watched = bool(source.file)
        self._files = WatchedFiles([source.file], source.load, what="config")
        self._given = self.running = self._files.current()
        self._waiting: dict[str, Any] = {}

    async def look(self, apply: Callable[[T], None]) -> None:
        """Check whether the file has changed. If so, call ``apply`` on the event loop with the new configuration."""
        # Use a thread, because slow file systems and YAML parsing would block the event loop.
        given = await asyncio.to_thread(self._files.current)
        if given == self._given:
            return
        self._given = given
        wanted = with_reread(self.running, given)
        if changed := differences(self.running, wanted):
            apply(wanted)
            self.running = wanted
            get_logger().info("applied the settings that changed in the configuration file", settings=list(changed))
        waiting = differences(self.running, given)
        if waiting and waiting != self._waiting:
            get_logger().warning(
                "settings changed in the configuration file, but take effect only after a restart of this service",
                settings=list(waiting),
            )
        self._waiting = waiting

    async def follow(self, apply: Callable[[T], None]) -> None:
        """Call ``look`` every few seconds until cancelled. Returns immediately if the service has no config file."""
        while self._watched:
            await asyncio.sleep(LOOK_INTERVAL)
            try:
                await self.look(apply)
            except Exception as e:  # keep the current configuration and continue
                incident(e, request="", doing="reading the changed configuration file")

    @contextlib.asynccontextmanager
    async def followed(self, apply: Callable[[T], None]) -> AsyncIterator[None]:
        """Run ``follow`` in a task while the ``with`` block runs."""
        task = asyncio.create_task(self.follow(apply), name="config file")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
