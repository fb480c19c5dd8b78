"""Configuration of an engine process: one struct per section, combined in ``EngineCoreConfig``."""

from penstock_enginecore.config.engine import (
    CoordinatorClientConfig,
    EngineCoreConfig,
    ErrorDumpConfig,
    ProfilerConfig,
    SessionsConfig,
)
from penstock_enginecore.config.executor import ExecutorConfig, KernelsConfig, NodesConfig
from penstock_enginecore.config.kv_cache import CacheConfig, KvTransferConfig
from penstock_enginecore.config.model import Device, Dtype, LoraConfig, ModelConfig, MultimodalConfig, Task
from penstock_enginecore.config.parallel import DataParallelConfig, ExpertParallelConfig, ParallelConfig
from penstock_enginecore.config.scheduler import SchedulerConfig
from penstock_enginecore.config.speculative import SpeculativeConfig
from penstock_enginecore.config.structured_output import StructuredOutputConfig

__all__ = [
    "CacheConfig",
    "CoordinatorClientConfig",
    "DataParallelConfig",
    "Device",
    "Dtype",
    "EngineCoreConfig",
    "ErrorDumpConfig",
    "ExecutorConfig",
    "ExpertParallelConfig",
    "KernelsConfig",
    "KvTransferConfig",
    "LoraConfig",
    "ModelConfig",
    "MultimodalConfig",
    "NodesConfig",
    "ParallelConfig",
    "ProfilerConfig",
    "SchedulerConfig",
    "SessionsConfig",
    "SpeculativeConfig",
    "StructuredOutputConfig",
    "Task",
]
