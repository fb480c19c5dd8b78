"""Engine features whose pairs are tested."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Self

Sections = Mapping[str, Mapping[str, Any]]


class Feature(StrEnum):
    """A feature: name in tests, title and setting for the page, and engine configuration.

    The configuration is empty if the feature depends on the model or the request. The features are in the page's order.
    """

    title: str
    setting: str
    sections: Sections

    def __new__(cls, name: str, title: str, setting: str, sections: Sections = {}) -> Self:  # noqa: B006 - nobody changes it
        """Return a member whose value is its name."""
        feature = str.__new__(cls, name)
        feature._value_ = name
        feature.title, feature.setting, feature.sections = title, setting, sections
        return feature

    ASYNC = (
        "async",
        "Asynchronous scheduling",
        "`scheduler.async_scheduling`",
        {"scheduler": {"async_scheduling": True}},
    )
    CHUNKS = (
        "chunks",
        "Chunked prefill",
        "`scheduler.max_num_batched_tokens`",
        {"scheduler": {"max_num_batched_tokens": 24}},
    )
    TENSOR = "tensor", "Tensor parallel", "`executor.tensor_parallel_size`", {"executor": {"tensor_parallel_size": 2}}
    PIPELINE = (
        "pipeline",
        "Pipeline parallel",
        "`executor.pipeline_parallel_size`",
        {"executor": {"pipeline_parallel_size": 2}},
    )
    NODES = "nodes", "Several nodes", "`executor.nodes.size`", {"executor": {"pipeline_parallel_size": 2}}
    GROUP = (
        "group",
        "Data-parallel group",
        "`data_parallel.size`",
        {"data_parallel": {"size": 2, "min_size": 1}, "coordinator": {"address": "127.0.0.1:1"}},
    )
    EXPERTS = (
        "experts",
        "Shared experts",
        "`expert_parallel.enabled`",
        {
            "data_parallel": {"size": 2, "min_size": 1},
            "coordinator": {"address": "127.0.0.1:1"},
            "expert_parallel": {"enabled": True},
        },
    )
    NGRAM = (
        "ngram",
        "Drafts by n-gram",
        "`speculative.method` ngram",
        {"speculative": {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}},
    )
    SUFFIX = (
        "suffix",
        "Drafts by suffix",
        "`speculative.method` suffix",
        {"speculative": {"method": "suffix", "num_speculative_tokens": 3, "adaptive": False}},
    )
    DRAFT_MODEL = (
        "draft_model",
        "Draft model",
        "`speculative.method` draft_model",
        {"speculative": {"method": "draft_model", "num_speculative_tokens": 3, "adaptive": False}},
    )
    HEAD = (
        "head",
        "EAGLE head",
        "`speculative.method` eagle, eagle3",
        {"speculative": {"method": "eagle", "num_speculative_tokens": 3, "adaptive": False}},
    )
    MTP = (
        "mtp",
        "Multi-token-prediction layer",
        "`speculative.method` mtp",
        {"speculative": {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False}},
    )
    STRUCTURED = "structured", "Structured output", "`structured_output` of requests"
    LORA = "lora", "LoRA adapters", "`lora.max_loras`", {"lora": {"max_loras": 4}}
    MEDIA = "media", "Images", "a model with a vision encoder"
    TIERS = (
        "tiers",
        "KV cache offloading",
        "`cache.host_memory`",
        {"cache": {"host_memory": 16 << 20, "min_load_tokens": 1}},
    )
    TRANSFER = (
        "transfer",
        "KV transfer",
        "`kv_transfer.transport`",
        {"kv_transfer": {"transport": "grpc", "port": 0, "advertise": "127.0.0.1"}, "cache": {"min_load_tokens": 1}},
    )
    EVENTS = "events", "KV cache events", "`cache.enable_kv_events`", {"cache": {"enable_kv_events": True}}
    FP8_CACHE = (
        "fp8_cache",
        "fp8 KV cache",
        "`cache.dtype`",
        {"cache": {"dtype": "fp8"}, "model": {"attention_backend": "reference"}},
    )
    INT8 = "int8", "Weights rounded to int8", "`model.quantization`", {"model": {"quantization": "int8"}}
    QUANTIZED = "quantized", "Quantized checkpoints", "a checkpoint in fp8"
    WINDOWS = "windows", "Sliding windows", "a model with windows"
    POOLING = "pooling", "Pooling", "`model.task` embed"
    SLEEP = "sleep", "Sleep", "`Sleep` of the admin API"


PLAIN = frozenset(
    {
        Feature.STRUCTURED,
        Feature.LORA,
        Feature.MEDIA,
        Feature.FP8_CACHE,
        Feature.INT8,
        Feature.QUANTIZED,
        Feature.WINDOWS,
        Feature.POOLING,
    }
)
"""Features that change tokens, so that the plain engine has them as well."""
DRAFTS = frozenset({Feature.NGRAM, Feature.SUFFIX, Feature.DRAFT_MODEL, Feature.HEAD, Feature.MTP})
GROUPS = frozenset({Feature.GROUP, Feature.EXPERTS})
