"""The features of engines whose pairs are tested."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import msgspec


class Feature(StrEnum):
    """A feature, by its name in tests. The order is that of the table."""

    ASYNC = "async"
    CHUNKS = "chunks"
    TENSOR = "tensor"
    PIPELINE = "pipeline"
    NODES = "nodes"
    GROUP = "group"
    EXPERTS = "experts"
    NGRAM = "ngram"
    SUFFIX = "suffix"
    DRAFT_MODEL = "draft_model"
    HEAD = "head"
    STRUCTURED = "structured"
    LORA = "lora"
    MEDIA = "media"
    TIERS = "tiers"
    TRANSFER = "transfer"
    EVENTS = "events"
    FP8_CACHE = "fp8_cache"
    INT8 = "int8"
    QUANTIZED = "quantized"
    WINDOWS = "windows"
    POOLING = "pooling"
    SLEEP = "sleep"


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What a feature is. ``setting``: what turns it on, for the page. ``sections``: the engine's configuration; empty where the
    model or the request makes the difference. ``is_plain``: it changes tokens, so the plain engine has it as well.
    """

    title: str
    setting: str
    sections: Mapping[str, Mapping[str, Any]] = {}
    is_plain: bool = False


FACTS: Mapping[Feature, Facts] = {
    Feature.ASYNC: Facts(
        title="Asynchronous scheduling",
        setting="`scheduler.async_scheduling`",
        sections={"scheduler": {"async_scheduling": True}},
    ),
    Feature.CHUNKS: Facts(
        title="Chunked prefill",
        setting="`scheduler.max_num_batched_tokens`",
        sections={"scheduler": {"max_num_batched_tokens": 24}},
    ),
    Feature.TENSOR: Facts(
        title="Tensor parallel",
        setting="`executor.tensor_parallel_size`",
        sections={"executor": {"tensor_parallel_size": 2}},
    ),
    Feature.PIPELINE: Facts(
        title="Pipeline parallel",
        setting="`executor.pipeline_parallel_size`",
        sections={"executor": {"pipeline_parallel_size": 2}},
    ),
    Feature.NODES: Facts(
        title="Several nodes",
        setting="`executor.nodes.size`",
        sections={"executor": {"pipeline_parallel_size": 2}},
    ),
    Feature.GROUP: Facts(
        title="Data-parallel group",
        setting="`data_parallel.size`",
        sections={"data_parallel": {"size": 2, "min_size": 1}, "coordinator": {"address": "127.0.0.1:1"}},
    ),
    Feature.EXPERTS: Facts(
        title="Shared experts",
        setting="`expert_parallel.enabled`",
        sections={
            "data_parallel": {"size": 2, "min_size": 1},
            "coordinator": {"address": "127.0.0.1:1"},
            "expert_parallel": {"enabled": True},
        },
    ),
    Feature.NGRAM: Facts(
        title="Drafts by n-gram",
        setting="`speculative.method` ngram",
        sections={"speculative": {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}},
    ),
    Feature.SUFFIX: Facts(
        title="Drafts by suffix",
        setting="`speculative.method` suffix",
        sections={"speculative": {"method": "suffix", "num_speculative_tokens": 3, "adaptive": False}},
    ),
    Feature.DRAFT_MODEL: Facts(
        title="Draft model",
        setting="`speculative.method` draft_model",
        sections={"speculative": {"method": "draft_model", "num_speculative_tokens": 3, "adaptive": False}},
    ),
    Feature.HEAD: Facts(
        title="EAGLE head",
        setting="`speculative.method` eagle, eagle3",
        sections={"speculative": {"method": "eagle", "num_speculative_tokens": 3, "adaptive": False}},
    ),
    Feature.STRUCTURED: Facts(title="Structured output", setting="`structured_output` of requests", is_plain=True),
    Feature.LORA: Facts(
        title="LoRA adapters", setting="`lora.max_loras`", sections={"lora": {"max_loras": 4}}, is_plain=True
    ),
    Feature.MEDIA: Facts(title="Images", setting="a model with a vision encoder", is_plain=True),
    Feature.TIERS: Facts(
        title="KV cache offloading",
        setting="`cache.host_memory`",
        sections={"cache": {"host_memory": 16 << 20, "min_load_tokens": 1}},
    ),
    Feature.TRANSFER: Facts(
        title="KV transfer",
        setting="`kv_transfer.transport`",
        sections={
            "kv_transfer": {"transport": "grpc", "port": 0, "advertise": "127.0.0.1"},
            "cache": {"min_load_tokens": 1},
        },
    ),
    Feature.EVENTS: Facts(
        title="KV cache events",
        setting="`cache.enable_kv_events`",
        sections={"cache": {"enable_kv_events": True}},
    ),
    Feature.FP8_CACHE: Facts(
        title="fp8 KV cache",
        setting="`cache.dtype`",
        sections={"cache": {"dtype": "fp8"}, "model": {"attention_backend": "reference"}},
        is_plain=True,
    ),
    Feature.INT8: Facts(
        title="Weights rounded to int8",
        setting="`model.quantization`",
        sections={"model": {"quantization": "int8"}},
        is_plain=True,
    ),
    Feature.QUANTIZED: Facts(title="Quantized checkpoints", setting="a checkpoint in fp8", is_plain=True),
    Feature.WINDOWS: Facts(title="Sliding windows", setting="a model with windows", is_plain=True),
    Feature.POOLING: Facts(title="Pooling", setting="`model.task` embed", is_plain=True),
    Feature.SLEEP: Facts(title="Sleep", setting="`Sleep` of the admin API"),
}

DRAFTS = frozenset({Feature.NGRAM, Feature.SUFFIX, Feature.DRAFT_MODEL, Feature.HEAD})
GROUPS = frozenset({Feature.GROUP, Feature.EXPERTS})
