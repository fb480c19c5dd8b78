"""Request fields that clients of other servers send, 120 for each protocol that generates text.

Each entry has a field, a value with an effect, and whether it constrains the output. Fields that constrain the output
must be supported or refused. Other fields may be listed as ignored.
"""

from typing import Any, NamedTuple


class UnusualField(NamedTuple):
    """A field with a value. ``constrains``: whether the field would change the output on a server that supports it."""

    name: str
    value: Any
    constrains: bool


SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
GRAMMAR = 'root ::= "yes" | "no"'
_CONSTRAINING: dict[str, Any] = {
    # samplers
    "min_p": 0.1,
    "top_k": 5,
    "typical_p": 0.9,
    "tfs_z": 0.9,
    "top_a": 0.2,
    "top_n_sigma": 1.0,
    "min_keep": 2,
    "mirostat": 2,
    "xtc_probability": 0.5,
    "dry_multiplier": 0.8,
    "dynatemp_range": 0.5,
    "smoothing_factor": 0.3,
    "temperature_last": True,
    "samplers": ["top_k", "temperature"],
    "sampler_order": [6, 0, 1],
    "epsilon_cutoff": 3.0,
    "eta_cutoff": 3.0,
    "repetition_penalty": 1.1,
    "repeat_penalty": 1.1,
    "rep_pen": 1.1,
    "repetition_context_size": 20,
    "encoder_repetition_penalty": 1.2,
    "no_repeat_ngram_size": 3,
    "penalize_nl": True,
    "penalty_alpha": 0.6,
    "guidance_scale": 1.5,
    "do_sample": False,
    "seed": 7,
    "random_seed": 7,
    "logit_bias": {"5": 5},
    "num_beams": 4,
    "use_beam_search": True,
    "length_penalty": 2.0,
    "early_stopping": True,
    "allowed_token_ids": [5, 6],
    "logprob_token_ids": [5, 6],
    "bad_words": ["x"],
    "bad_words_ids": [[5]],
    "banned_tokens": ["x"],
    "banned_strings": ["x"],
    "custom_token_bans": "5,6",
    "suppress_tokens": [5],
    "force_words_ids": [[5]],
    "logits_processors": ["a"],
    "custom_logit_processor": "x",
    "vllm_xargs": {"a": 1},
    "watermark": True,
    # the end
    "max_completion_tokens": 4,
    "max_output_tokens": 4,
    "max_new_tokens": 4,
    "n_predict": 4,
    "num_predict": 4,
    "max_length": 40,
    "max_time": 2.0,
    "t_max_predict_ms": 500,
    "timeout": 5,
    "min_tokens": 2,
    "min_new_tokens": 2,
    "ignore_eos": True,
    "ban_eos_token": True,
    "eos_token_id": 5,
    "stop_token_ids": [5],
    "stop_sequences": ["x"],
    "stop_strings": ["x"],
    "stop_regex": "x+",
    "antiprompt": ["x"],
    "no_stop_trim": True,
    "include_stop_str_in_output": True,
    "repetition_detection": {"max_pattern_size": 4},
    # the form
    "response_format": {"type": "json_object", "schema": SCHEMA},
    "structured_outputs": {"regex": "[ab]{2}"},
    "guided_json": SCHEMA,
    "guided_regex": "[ab]{2}",
    "guided_choice": ["yes", "no"],
    "guided_grammar": GRAMMAR,
    "guided_whitespace_pattern": " ?",
    "json_schema": SCHEMA,
    "grammar": GRAMMAR,
    "format": "json",
    "regex": "[ab]{2}",
    "ebnf": GRAMMAR,
    "structural_tag": {"type": "structural_tag"},
    "response_schema": SCHEMA,
    "response_mime_type": "application/json",
    "json_mode": True,
    "output_schema": SCHEMA,
    "output_format": {"type": "json_schema", "schema": SCHEMA},
    # reasoning, prompts, groups
    "enable_thinking": False,
    "think": False,
    "thinking_budget": 0,
    "truncate": 5,
    "transforms": ["middle-out"],
    "safe_prompt": True,
    "template": "{{ x }}",
    "inputs": "hi",
    "options": {"temperature": 0.0},
    "parameters": {"max_new_tokens": 4},
    "sampling_params": {"temperature": 0.0},
    "extra_body": {"top_k": 1},
    "web_search_options": {"search_context_size": "low"},
    "plugins": [{"id": "web"}],
}
_HINTS: dict[str, Any] = {
    "cache_prompt": True,
    "id_slot": 3,
    "keep_alive": "5m",
    "num_ctx": 4096,
    "guided_decoding_backend": "outlines",
    "session_id": "s",
    "provider": {"order": ["x"]},
    "mirostat_tau": 5.0,
    "dry_base": 1.75,
    "repeat_last_n": 64,
}
COMMON = (
    *(UnusualField(name, value, constrains=True) for name, value in _CONSTRAINING.items()),
    *(UnusualField(name, value, constrains=False) for name, value in _HINTS.items()),
)
"""Fields with the same meaning on all routes."""
_OF_CHAT: dict[str, Any] = {
    "functions": [{"name": "f"}],
    "function_call": {"name": "f"},
    "audio": {"voice": "a"},
    "documents": [{"text": "a"}],
    "echo": True,
    "suffix": "x",
    "best_of": 3,
    "prompt": "hi",
    "system": "be brief",
    "reasoning": {"effort": "low"},
}
_OF_COMPLETIONS: dict[str, Any] = {
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "messages": [{"role": "user", "content": "hi"}],
    "chat_template": "{{ x }}",
    "chat_template_kwargs": {"enable_thinking": False},
    "reasoning_effort": "low",
    "top_logprobs": 3,
    "system": "be brief",
    "continue_final_message": True,
    "thinking": {"type": "disabled"},
    "raw": True,
}
_OF_RESPONSES: dict[str, Any] = {
    "n": 2,
    "functions": [{"name": "f"}],
    "conversation": "c",
    "prompt": {"id": "p"},
    "max_tool_calls": 3,
    "background": True,
    "truncation": "auto",
    "logprobs": True,
    "reasoning_effort": "low",
    "thinking": {"type": "disabled"},
}
_OF_MESSAGES: dict[str, Any] = {
    "n": 2,
    "stop": ["x"],
    "logprobs": True,
    "mcp_servers": [{"name": "a"}],
    "container": "c",
    "best_of": 3,
    "reasoning_effort": "low",
    "instructions": "be brief",
    "parallel_tool_calls": False,
    "include_reasoning": False,
}
_OWN = {
    "/v1/chat/completions": _OF_CHAT,
    "/v1/completions": _OF_COMPLETIONS,
    "/v1/responses": _OF_RESPONSES,
    "/v1/messages": _OF_MESSAGES,
}
UNUSUAL: dict[str, tuple[UnusualField, ...]] = {
    route: (*COMMON, *(UnusualField(name, value, constrains=True) for name, value in own.items()))
    for route, own in _OWN.items()
}
"""The fields of each route."""
