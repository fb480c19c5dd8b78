"""Configuration of an engine process: a struct per section, all of them in ``EngineCoreConfig``."""

from penstock_enginecore.config.cache import CacheConfig
from penstock_enginecore.config.data_parallel import DataParallelConfig
from penstock_enginecore.config.engine import CoordinatorClientConfig, EngineCoreConfig, ErrorDumpConfig, ProfilerConfig
from penstock_enginecore.config.executor import ExecutorConfig, KernelsConfig
from penstock_enginecore.config.expert_parallel import ExpertParallelConfig
from penstock_enginecore.config.kv_transfer import KvTransferConfig
from penstock_enginecore.config.lora import LoraConfig
from penstock_enginecore.config.model import Device, Dtype, ModelConfig, Task
from penstock_enginecore.config.multimodal import MultimodalConfig
from penstock_enginecore.config.nodes import NodesConfig
from penstock_enginecore.config.parallel import ParallelConfig
from penstock_enginecore.config.scheduler import SchedulerConfig
from penstock_enginecore.config.sessions import SessionsConfig
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
