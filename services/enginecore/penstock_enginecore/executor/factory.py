"""Executors by name."""

from penstock_enginecore.config import EngineCoreConfig
from penstock_enginecore.executor.base import Executor
from penstock_enginecore.executor.uniproc import UniprocExecutor

_EXECUTORS = {"uniproc": UniprocExecutor}


def make_executor(config: EngineCoreConfig) -> Executor:
    """The executor that ``executor.kind`` names."""
    return _EXECUTORS[config.executor.kind](config)
