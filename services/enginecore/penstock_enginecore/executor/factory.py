"""Registry of executors by name, and creation of the executor that the configuration names."""

from collections.abc import Callable

from penstock_common.config.class_paths import load_target
from penstock_enginecore.config import EngineCoreConfig
from penstock_enginecore.core.executor import Executor

_KNOWN: dict[str, str] = {
    "uniproc": "penstock_enginecore.executor.uniproc:UniprocExecutor",
    "multiproc": "penstock_enginecore.executor.multiproc.executor:MultiprocExecutor",
}


def register_executor(name: str, target: str) -> None:
    """Register the class at ``target``, written ``package.module:Class``, as the executor for the setting
    ``executor.kind: name``.
    """
    _KNOWN[name] = target


def make_executor(config: EngineCoreConfig) -> Executor:
    """Create the executor that the setting ``executor.kind`` names: a registered name, or ``package.module:Class``.
    Raises ConfigError if there is no such executor.
    """
    factory: Callable[[EngineCoreConfig], Executor] = load_target(
        "executor.kind", config.executor.resolved_kind, _KNOWN, others=("auto",)
    )
    return factory(config)
