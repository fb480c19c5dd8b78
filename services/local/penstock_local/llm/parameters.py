"""Parameters of requests to an ``LLM``, and replacements for the names of vLLM and transformers."""

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, Self, TypeVar

import msgspec

from penstock_common.errors import nearest
from penstock_common.types import sampling

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
    "cpu_offload_gb": "nothing: weights are not offloaded; host_cache keeps evicted KV blocks in host memory",
    "enforce_eager": "nothing: torch.compile is not used",
    "compilation_config": "nothing: torch.compile is not used",
    "enable_sleep_mode": "nothing: only the engines of a server can sleep",
    "language_model_only": "media=False, which loads only the text model",
    "hf_token": "the environment variable HF_TOKEN",
    "download_dir": "the environment variable HF_HOME",
    "tokenizer_mode": "nothing: all tokenizers are fast tokenizers",
    "generation_config": "the model's own file; sampling parameters of a call override it",
    "hf_overrides": "nothing: the checkpoint's config defines the model",
    "chat_template": "chat_template of the method chat",
    "disable_log_stats": "Python's logging, e.g. logging.getLogger('penstock_enginecore').setLevel('WARNING')",
    "reasoning_parser": "nothing: texts contain everything that the model wrote",
}
"""Replacements for arguments of vLLM's ``LLM``."""

ARGUMENTS: Mapping[str, str] = {
    "lora_request": 'lora, the name of an adapter that LLM(lora={...}) has, e.g. lora="pirate"',
    "prompts": "texts",
    "params": "sampling_params",
    "prompt_token_ids": 'prompts: lists of token ids, or {"prompt_token_ids": [...]}',
    "pooling_params": "the keywords of the method: dimensions, normalize, use_activation",
    "tokenization_kwargs": "truncate_prompt_tokens, where the method has it",
    "truncate_prompt_tokens": "the sampling parameter truncate_prompt_tokens",
    "mm_processor_kwargs": 'the key "mm_processor_kwargs" of a prompt',
    "chat_template_content_format": "nothing: message parts are read as in OpenAI's API",
    "guided_options_request": "sampling_params with structured_output",
    "concurrency_limit": "nothing: the engine schedules requests itself",
    "data_1": "queries",
    "data_2": "documents",
    "text_1": "queries",
    "text_2": "documents",
}
"""Replacements for arguments of methods of vLLM's ``LLM``."""


_NO_LORA = "nothing: only LLM supports LoRA adapters"
ENGINE_ARGUMENTS: Mapping[str, str] = {
    **ARGUMENTS,
    "sampling_params": "params",
    "prompts": "prompt",
    "lora_request": _NO_LORA,
    "lora": _NO_LORA,
    "arrival_time": "nothing: a request arrives when it is added",
    "trace_headers": "nothing: only servers write traces",
    "prompt_text": 'prompt, e.g. {"prompt": "text"}',
}
"""Replacements for arguments of methods of vLLM's ``LLMEngine`` and ``AsyncLLM``."""

_BEAMS = "LLM.beam_search with BeamSearchParams(beam_width=..., max_tokens=...)"
_SCHEMA = "structured_output, e.g. structured_output=StructuredOutput(json_schema=schema)"
SAMPLING: Mapping[str, str] = {
    "structured_outputs": _SCHEMA,
    "guided_decoding": _SCHEMA,
    "guided_json": _SCHEMA,
    "json_schema": _SCHEMA,
    "response_format": _SCHEMA,
    "guided_regex": "structured_output=StructuredOutput(regex=...)",
    "regex": "structured_output=StructuredOutput(regex=...)",
    "guided_choice": "structured_output=StructuredOutput(choice=(...))",
    "guided_grammar": "structured_output=StructuredOutput(grammar=...)",
    "grammar": "structured_output=StructuredOutput(grammar=...)",
    "best_of": "n with logprobs=0, and keep the output with the highest cumulative_logprob",
    "use_beam_search": _BEAMS,
    "beam_width": _BEAMS,
    "num_beams": _BEAMS,
    "length_penalty": _BEAMS,
    "early_stopping": _BEAMS,
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "max_length": "max_tokens, which counts the output without the prompt",
    "min_new_tokens": "min_tokens",
    "min_length": "min_tokens, which counts the output without the prompt",
    "do_sample": "temperature; 0 is greedy",
    "num_return_sequences": "n",
    "random_seed": "seed",
    "eos_token_id": "stop_token_ids",
    "stop_strings": "stop",
    "stop_sequences": "stop",
    "bad_words_ids": "bad_words, as texts",
    "suppress_tokens": "logit_bias, e.g. logit_bias={7: -100.0}",
    "no_repeat_ngram_size": "repetition_penalty, or repetition_detection to end the output",
    "top_logprobs": "logprobs",
    "num_logprobs": "logprobs",
    "flat_logprobs": "nothing: log-probabilities have only one form",
    "typical_p": sampling.FILTERS,
    "logits_processors": "nothing: logit_bias, allowed_token_ids and bad_words change logits",
    "logits_processor": "nothing: logit_bias, allowed_token_ids and bad_words change logits",
    "stream": "output_kind of LLMEngine.add_request or AsyncLLMEngine.generate",
    "lora_request": "the keyword lora of the method, e.g. generate(prompts, lora='pirate')",
    "extra_args": "nothing: no plugin uses it",
    "skip_clone": "nothing: parameters are always copied",
    "reasoning_effort": "chat_template_kwargs of the method chat",
    "prediction": 'the key "prediction" of a prompt',
}
"""Replacements for sampling parameters of vLLM and transformers."""

STRUCTURED_OUTPUT: Mapping[str, str] = {
    "json": "json_schema, as a dict or as JSON",
    "schema": "json_schema, as a dict or as JSON",
    "disable_any_whitespace": "json_whitespace=JsonWhitespace.COMPACT",
    "disable_fallback": "nothing: there is no fallback",
    "disable_additional_properties": 'the schema\'s own "additionalProperties": false',
    "whitespace_pattern": "json_whitespace, a JsonWhitespace",
    "backend": "the option backend of LLM",
}
"""Replacements for fields of vLLM's ``StructuredOutputsParams``."""

BEAM_SEARCH: Mapping[str, str] = {
    "n": "beam_width: all beams are returned",
    "num_beams": "beam_width",
    "max_new_tokens": "max_tokens",
    "temperature": "nothing: beams are ordered by the model's log-probabilities",
    "include_stop_str_in_output": "nothing: stop strings do not apply to beams",
    "stop": "nothing: stop strings do not apply to beams",
    "structured_outputs": "nothing: beams are not constrained",
    "skip_special_tokens": "nothing: texts of beams never contain special tokens",
}
"""Replacements for fields of vLLM's ``BeamSearchParams``."""

TYPES: Mapping[str, str] = {
    "PoolingParams": "the keywords of embed, classify, score and encode: dimensions, normalize, use_activation",
    "StructuredOutputsParams": "StructuredOutput",
    "GuidedDecodingParams": "StructuredOutput",
    "RequestOutputKind": "OutputKind",
    "LoRARequest": 'LLM(lora={"pirate": "./adapters/pirate"}) and lora="pirate" of a method',
    "EngineArgs": "keywords of LLM or LLMEngine",
    "AsyncEngineArgs": "keywords of AsyncLLMEngine",
    "AsyncLLM": "AsyncLLMEngine",
    "TextPrompt": 'a text, or {"prompt": "text"}',
    "TokensPrompt": 'a list of token ids, or {"prompt_token_ids": [...]}',
    "EmbeddingRequestOutput": "EmbeddingOutput",
    "ClassificationRequestOutput": "ClassificationOutput",
    "ScoringRequestOutput": "ScoringOutput",
    "PoolingRequestOutput": "PoolingOutput",
}
"""Replacements for names of the package vllm."""

_NOTHING = "nothing: "


def replacement(name: str, known: Mapping[str, str]) -> str:
    """Return the end of an error message about a name of vLLM or transformers: its replacement. Empty if unknown."""
    if name not in known:
        return ""
    if known[name].startswith(_NOTHING):
        return f"; leave it out: {known[name].removeprefix(_NOTHING)}"
    return f"; use {known[name]}"


class NamesReplacements(type(msgspec.Struct)):  # type: ignore[misc]  # its metaclass has no public name
    """Metaclass of parameter classes that refuse unknown fields and name the replacement."""

    replacements: Mapping[str, str]

    def __call__(cls, *args: Any, **fields: Any) -> Any:
        """Return an object of the class. Raises TypeError for an unknown field."""
        for name in fields:
            if refusal := cls.refusal(name):
                raise TypeError(refusal)
        return super().__call__(*args, **fields)

    def refusal(cls, name: str) -> str:
        """Return an error for an unknown field, with the replacement of the field. Empty for a field of the class."""
        fields = cls.__struct_fields__
        if name in fields:
            return ""
        return f"{cls.__name__} has no {name!r}{replacement(name, cls.replacements) or nearest(name, fields)}"


def names_replacements(known: Mapping[str, str] = ARGUMENTS) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a method so that it refuses unknown arguments and names their replacements.

    Args:
        known: Replacements by name of the foreign argument.
    """

    def decorated(method: Callable[P, R]) -> Callable[P, R]:
        code = method.__code__
        keywords = frozenset(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])

        @functools.wraps(method)
        def called(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in kwargs.keys() - keywords:
                hint = replacement(name, known) or _in_parameters(name, keywords) or nearest(name, keywords)
                raise TypeError(f"{method.__name__}() has no argument {name!r}{hint}")
            return method(*args, **kwargs)

        return called

    return decorated


def _in_parameters(name: str, keywords: frozenset[str]) -> str:
    """Return the hint for a sampling parameter that is given as an argument of a method that has sampling parameters."""
    argument = next((each for each in ("sampling_params", "params") if each in keywords), None)
    if argument is None or name not in {*sampling.SamplingParams.__struct_fields__, *SAMPLING}:
        return ""
    ours = SAMPLING.get(name, "")
    return f"; use {argument}={{{name!r}: ...}}" if not ours else replacement(name, SAMPLING)


class SamplingParams(  # type: ignore[misc]  # dataclasses cannot thaw fields, structs can  # noqa: D101
    sampling.SamplingParams, frozen=False, kw_only=True, omit_defaults=True, metaclass=NamesReplacements
):
    __doc__ = sampling.SamplingParams.__doc__
    replacements = SAMPLING

    def clone(self, **changes: Any) -> Self:
        """Return a copy with some fields changed."""
        for name in changes:
            if refusal := type(self).refusal(name):
                raise TypeError(refusal)
        cloned = copy.deepcopy(self)
        for name, value in changes.items():
            setattr(cloned, name, value)
        return cloned


class StructuredOutput(  # noqa: D101
    sampling.StructuredOutput, frozen=True, kw_only=True, metaclass=NamesReplacements
):
    __doc__ = sampling.StructuredOutput.__doc__
    replacements = STRUCTURED_OUTPUT
