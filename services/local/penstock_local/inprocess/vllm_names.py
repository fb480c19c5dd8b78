"""Arguments of vLLM's ``LLM``, and what this one has for them."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

OPTIONS: Mapping[str, str] = {
    "runner": 'task, e.g. task="embed"',
    "convert": 'task, e.g. task="embed"',
    "gpu_memory_utilization": "memory_utilization",
    "kv_cache_memory_bytes": 'kv_cache_memory, also as "2GiB"',
    "num_gpu_blocks_override": "num_blocks",
    "scheduling_policy": "policy",
    "scheduler_cls": "scheduler, the name of a registered one",
    "max_num_queued_reqs": "max_waiting_requests",
    "max_num_queued_tokens": "max_waiting_tokens",
    "distributed_executor_backend": "kind",
    "device_ids": "devices",
    "numa_bind": "numa",
    "enable_lora": 'lora, the adapters by name: lora={"pirate": "./adapters/pirate"}',
    "lora_modules": 'lora, the adapters by name: lora={"pirate": "./adapters/pirate"}',
    "max_cpu_loras": "lora_cpu_memory, in bytes",
    "kv_events_config": "enable_kv_events",
    "structured_outputs_config": "its fields backend and enable_in_reasoning",
    "swap_space": "host_cache, host memory for KV blocks",
    "cpu_offload_gb": "nothing: weights stay where they are; host_cache is host memory for KV blocks",
    "enforce_eager": "nothing: no model is compiled by torch, so leave it out",
    "compilation_config": "nothing: no model is compiled by torch, so leave it out",
    "enable_sleep_mode": "nothing: engines of a server sleep, an LLM does not",
    "hf_token": "the environment variable HF_TOKEN",
    "download_dir": "the environment variable HF_HOME",
    "tokenizer_mode": "nothing: all tokenizers are fast ones",
    "generation_config": "the model's own; sampling parameters of a call override it",
    "hf_overrides": "nothing: the checkpoint's config says what the model is",
    "chat_template": "chat_template of the method chat",
    "disable_log_stats": "Python's logging, e.g. logging.getLogger('penstock_enginecore').setLevel('WARNING')",
    "reasoning_parser": "nothing: texts have all that the model wrote",
}
"""Keywords of vLLM's ``LLM``, and what to use."""

ARGUMENTS: Mapping[str, str] = {
    "lora_request": 'lora, the name of an adapter that LLM(lora={...}) has, e.g. lora="pirate"',
    "prompts": "texts",
    "prompt_token_ids": 'prompts: lists of token ids, or {"prompt_token_ids": [...]}',
    "pooling_params": "the keywords of the method: dimensions, normalize, use_activation",
    "tokenization_kwargs": "truncate_prompt_tokens, where the method has it",
    "truncate_prompt_tokens": "the sampling parameter truncate_prompt_tokens",
    "mm_processor_kwargs": 'the key "mm_processor_kwargs" of a prompt',
    "chat_template_content_format": "nothing: parts of messages are read as OpenAI has them",
    "guided_options_request": "sampling_params with structured_output",
    "concurrency_limit": "nothing: the engine schedules by itself",
    "data_1": "queries",
    "data_2": "documents",
    "text_1": "queries",
    "text_2": "documents",
}
"""Keywords of methods of vLLM's ``LLM``, and what to use."""


def replacement(name: str, known: Mapping[str, str]) -> str:
    """The end of an error message about an unknown argument: what to use in its place, or nothing."""
    return f"; vLLM's {name} is here {known[name]}" if name in known else ""


def names_replacements(method: Callable[P, R]) -> Callable[P, R]:
    """Decorates a method so that an argument that only vLLM's has is refused with what to use in its place."""

    @functools.wraps(method)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs.keys() & ARGUMENTS.keys():
            if name not in _keywords(method):
                raise TypeError(f"{method.__name__}() has no argument {name!r}{replacement(name, ARGUMENTS)}")
        return method(*args, **kwargs)

    return called


@functools.cache
def _keywords(method: Callable[..., Any]) -> frozenset[str]:
    return frozenset(method.__code__.co_varnames[: method.__code__.co_argcount + method.__code__.co_kwonlyargcount])
