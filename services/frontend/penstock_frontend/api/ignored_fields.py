"""List of request fields that are accepted but have no effect. docs/reference/ignored-fields.md shows the same list as a table.

A field that is in no struct and not in this list is unknown (``openai/unknown_fields.py``).
"""

from functools import cache
from typing import NamedTuple


class IgnoredField(NamedTuple):
    """A request field that has no effect.

    Attributes:
        protocol: The routes or RPCs that have the field.
        place: Path of the object that has the field, such as ``messages[].content[]``. Empty for the body itself.
        name: Name of the field.
        example: A value that clients send in the field.
        why: Reason why the field has no effect.
        structs: The structs of the objects that may have the field. Empty for fields in gRPC.
        repeated: Whether the answer repeats the value. The value has no other effect.
    """

    protocol: str
    place: str
    name: str
    example: object
    why: str
    structs: tuple[str, ...] = ()
    repeated: bool = False

    @property
    def path(self) -> str:
        """Path of the field, which consists of ``place`` and ``name``."""
        return f"{self.place}.{self.name}" if self.place else self.name


CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, EMBEDDINGS, POOLING, RERANK = "/v1/messages", "/v1/embeddings", "/pooling", "/rerank"
TRANSCRIPTIONS, TRANSLATIONS = "/v1/audio/transcriptions", "/v1/audio/translations"
SCORES, CLASSIFY, LORA = "/v1/score", "/classify", "/v1/unload_lora_adapter"
BATCH = "penstock batch, a line"
INFERENCE, VLLM = "gRPC penstock.inference.v1", "gRPC vllm.grpc.engine"

_NOT_STORED = "the server stores no completions"
_LABEL = "OpenAI identifies users by this field; Penstock takes the tenant from the API key or a header"
_CACHED = "prefix caching is always on, separately for each tenant"
_ONE_TIER = "there is one service tier; use priority"
_ALWAYS = "schemas are always enforced"
_REPEATED = "the response repeats it"
_NO_VARIABLE = "chat templates have no such variable; use chat_template_kwargs"
_WHOLE = "the model sees the whole conversation"
_ALL_TOOLS = "the model sees all tools that the client runs"
_OF_RUNS: tuple[tuple[str, object], ...] = (
    ("container_id", "c"),
    ("created_by", "x"),
    ("execution", "client"),
    ("environment", {"type": "local"}),
    ("max_output_length", 9),
    ("pending_safety_checks", [{"id": "x"}]),
    ("acknowledged_safety_checks", [{"id": "x"}]),
)
"""Fields of tool calls and results that only the program that runs the tools needs. Each item is a name and an example."""
_CHAT, _RESPONSE, _MESSAGES = ("ChatCompletionRequest",), ("ResponseBody",), ("MessagesBody", "ConversationBody")
_PARTS = ("PartBody",)


def _of_openai(protocol: str, structs: tuple[str, ...]) -> tuple[IgnoredField, ...]:
    """Return the fields that control OpenAI's own service. All of its routes that generate text have these fields."""
    return (
        IgnoredField(protocol, "", "safety_identifier", "u1", _LABEL, structs),
        IgnoredField(protocol, "", "prompt_cache_key", "k", _CACHED, structs),
        IgnoredField(protocol, "", "prompt_cache_retention", "24h", _CACHED, structs),
        IgnoredField(protocol, "", "service_tier", "auto", _ONE_TIER, structs),
    )


_NO_SWITCH = "the field has an effect only together with a field that is refused"
_STARTED = "the server's configuration sets this for all requests"
_ROUTER = "`model` alone chooses the model, and the server chooses the engine itself"
_CLIENT = "the field is an option for the client library"
_COUNTS = "the usage object and the metrics have these counts"
_HINTS: tuple[tuple[str, object, str], ...] = (
    ("cache_prompt", True, _CACHED),
    ("session_id", "s", _CACHED),
    ("n_keep", 4, "Penstock does not shift the context; the output ends when the context is full"),
    ("num_keep", 4, "Penstock does not shift the context; the output ends when the context is full"),
    ("n_discard", 4, "Penstock does not shift the context; the output ends when the context is full"),
    *((name, 1, _STARTED) for name in ("num_ctx", "n_ctx", "num_gpu", "main_gpu", "num_thread", "num_batch")),
    *((name, True, _STARTED) for name in ("use_mmap", "use_mlock", "low_vram", "numa")),
    ("keep_alive", "5m", _STARTED),
    ("guided_decoding_backend", "xgrammar", "there is only one backend"),
    ("id_slot", 0, _ROUTER),
    ("provider", {"order": ["x"]}, _ROUTER),
    ("models", ["x"], _ROUTER),
    ("route", "fallback", _ROUTER),
    ("timings_per_token", True, _COUNTS),
    ("return_progress", True, _COUNTS),
    ("usage", {"include": True}, _COUNTS),
    *((name, 2, _NO_SWITCH) for name in ("mirostat_tau", "mirostat_eta", "dry_base", "dry_allowed_length")),
    *((name, 2, _NO_SWITCH) for name in ("dry_penalty_last_n", "xtc_threshold", "dynatemp_exponent", "repeat_last_n")),
    ("dry_sequence_breakers", ["x"], _NO_SWITCH),
    ("smoothing_curve", 2, _NO_SWITCH),
    ("negative_prompt", "x", _NO_SWITCH),
    ("max_retries", 2, _CLIENT),
    ("num_retries", 2, _CLIENT),
    ("drop_params", True, _CLIENT),
    ("api_key", "x", _CLIENT),
    ("api_base", "x", _CLIENT),
)
"""Fields of other servers and of clients that do not change the output. Each item is a name, an example and a reason."""


def _hints(protocol: str, structs: tuple[str, ...]) -> tuple[IgnoredField, ...]:
    """Return the fields of other servers and of clients that clients may send to every route that generates text."""
    return tuple(IgnoredField(protocol, "", name, example, why, structs) for name, example, why in _HINTS)


def _of_speech(protocol: str, struct: str) -> tuple[IgnoredField, ...]:
    """Return the fields that clients may send with an audio file."""
    return (
        IgnoredField(protocol, "", "user", "u1", _LABEL, (struct,)),
        IgnoredField(protocol, "", "stream_include_usage", True, "the last event always has the usage", (struct,)),
    )


IGNORED: tuple[IgnoredField, ...] = (
    *_hints(CHAT, _CHAT),
    *_hints(COMPLETIONS, ("CompletionRequest",)),
    *_hints(RESPONSES, _RESPONSE),
    *_hints(MESSAGES, _MESSAGES),
    *_of_speech(TRANSCRIPTIONS, "TranscriptionBody"),
    *_of_speech(TRANSLATIONS, "TranslationBody"),
    IgnoredField(COMPLETIONS, "", "safety_identifier", "u1", _LABEL, ("CompletionRequest",)),
    IgnoredField(COMPLETIONS, "", "prompt_cache_key", "k", _CACHED, ("CompletionRequest",)),
    IgnoredField(MESSAGES, "", "user", "u1", _LABEL, _MESSAGES),
    IgnoredField(MESSAGES, "", "safety_identifier", "u1", _LABEL, _MESSAGES),
    IgnoredField(MESSAGES, "", "prompt_cache_key", "k", _CACHED, _MESSAGES),
    *_of_openai(CHAT, _CHAT),
    IgnoredField(CHAT, "", "user", "u1", _LABEL, _CHAT),
    IgnoredField(CHAT, "", "metadata", {"a": "b"}, _NOT_STORED, _CHAT),
    IgnoredField(CHAT, "", "store", False, _NOT_STORED, _CHAT),
    IgnoredField(CHAT, "", "verbosity", "low", _NO_VARIABLE, _CHAT),
    IgnoredField(CHAT, "tools[].function", "strict", True, _ALWAYS, ("FunctionBody",)),
    IgnoredField(CHAT, "response_format.json_schema", "strict", True, _ALWAYS, ("JsonSchemaFormat",)),
    IgnoredField(
        CHAT, "response_format.json_schema", "name", "a", "only the schema is enforced", ("JsonSchemaFormat",)
    ),
    IgnoredField(
        CHAT, "response_format.json_schema", "description", "a", "only the schema is enforced", ("JsonSchemaFormat",)
    ),
    IgnoredField(CHAT, "stream_options", "include_obfuscation", False, "streams are not padded", ("StreamOptions",)),
    IgnoredField(
        CHAT, "messages[]", "refusal", "no", "clients send answers back, and answers have this field", ("MessageBody",)
    ),
    IgnoredField(
        CHAT,
        "messages[]",
        "annotations",
        [],
        "clients send answers back, and answers have this field",
        ("MessageBody",),
    ),
    IgnoredField(CHAT, "messages[].content[]", "cache_control", {"type": "ephemeral"}, _CACHED, _PARTS),
    IgnoredField(CHAT, "messages[].tool_calls[]", "index", 0, "calls are identified by their order", ("ToolCallBody",)),
    IgnoredField(
        CHAT, "messages[].content[].image_url", "detail", "low", "the model's processor chooses the size", ("UrlBody",)
    ),
    IgnoredField(COMPLETIONS, "", "user", "u1", _LABEL, ("CompletionRequest",)),
    *_of_openai(RESPONSES, _RESPONSE),
    IgnoredField(RESPONSES, "", "user", "u1", _REPEATED, _RESPONSE, True),
    IgnoredField(RESPONSES, "", "metadata", {"a": "b"}, _REPEATED, _RESPONSE, True),
    IgnoredField(RESPONSES, "tools[]", "strict", True, f"{_ALWAYS}; {_REPEATED}", ("FunctionTool",), True),
    IgnoredField(RESPONSES, "text.format", "strict", True, f"{_ALWAYS}; {_REPEATED}", ("FormatBody",), True),
    IgnoredField(
        RESPONSES, "text.format", "name", "a", f"only the schema is enforced; {_REPEATED}", ("FormatBody",), True
    ),
    IgnoredField(
        RESPONSES, "text.format", "description", "a", f"only the schema is enforced; {_REPEATED}", ("FormatBody",), True
    ),
    IgnoredField(
        RESPONSES, "stream_options", "include_obfuscation", False, "streams are not padded", ("StreamOptions",)
    ),
    IgnoredField(RESPONSES, "input[]", "id", "msg_1", "items are identified by their order", ("InputItem",)),
    IgnoredField(RESPONSES, "input[]", "status", "completed", "items are identified by their order", ("InputItem",)),
    IgnoredField(RESPONSES, "input[]", "encrypted_content", "x", "reasoning is returned as plain text", ("InputItem",)),
    IgnoredField(
        RESPONSES,
        "input[].content[]",
        "annotations",
        [],
        "clients send outputs back, and outputs have this field",
        ("InputPart",),
    ),
    IgnoredField(
        RESPONSES,
        "input[].content[]",
        "logprobs",
        [],
        "clients send outputs back, and outputs have this field",
        ("InputPart",),
    ),
    IgnoredField(RESPONSES, "", "client_metadata", {"a": "b"}, _LABEL, _RESPONSE),
    IgnoredField(RESPONSES, "", "context_management", [{"type": "compaction"}], _WHOLE, _RESPONSE),
    IgnoredField(RESPONSES, "text", "verbosity", "low", f"{_NO_VARIABLE}; {_REPEATED}", ("TextBody",), True),
    IgnoredField(RESPONSES, "tools[]", "defer_loading", True, _ALL_TOOLS, ("FunctionTool",)),
    *(
        IgnoredField(
            RESPONSES, "input[]", name, example, "only the program that ran the tool needs this field", ("InputItem",)
        )
        for name, example in _OF_RUNS
    ),
    IgnoredField(RESPONSES, "input[]", "phase", "final_answer", "chat templates do not use this field", ("InputItem",)),
    IgnoredField(MESSAGES, "", "context_management", {"edits": []}, _WHOLE, _MESSAGES),
    IgnoredField(MESSAGES, "", "betas", ["x"], "no opt-in is needed", _MESSAGES),
    IgnoredField(MESSAGES, "", "speed", "fast", _ONE_TIER, _MESSAGES),
    IgnoredField(MESSAGES, "", "inference_geo", "us", _ROUTER, _MESSAGES),
    IgnoredField(MESSAGES, "", "fallbacks", [{"model": "x"}], _ROUTER, _MESSAGES),
    IgnoredField(
        MESSAGES, "output_config", "task_budget", {"total": 9}, "max_tokens limits the output", ("OutputConfigBody",)
    ),
    IgnoredField(MESSAGES, "tools[]", "defer_loading", True, _ALL_TOOLS, ("ClientToolBody",)),
    IgnoredField(MESSAGES, "tools[]", "allowed_callers", ["direct"], _ALL_TOOLS, ("ClientToolBody",)),
    IgnoredField(
        MESSAGES, "tools[]", "input_examples", [{}], "chat templates do not use this field", ("ClientToolBody",)
    ),
    IgnoredField(
        MESSAGES,
        "messages[].content[]",
        "caller",
        {"type": "direct"},
        "all callers are treated the same",
        ("BlockBody",),
    ),
    IgnoredField(MESSAGES, "", "metadata", {"user_id": "u1"}, _LABEL, _MESSAGES),
    IgnoredField(MESSAGES, "", "service_tier", "auto", _ONE_TIER, _MESSAGES),
    IgnoredField(MESSAGES, "", "cache_control", {"type": "ephemeral"}, _CACHED, _MESSAGES),
    IgnoredField(MESSAGES, "messages[].content[]", "cache_control", {"type": "ephemeral"}, _CACHED, ("BlockBody",)),
    IgnoredField(MESSAGES, "system[]", "cache_control", {"type": "ephemeral"}, _CACHED, ("BlockBody",)),
    IgnoredField(MESSAGES, "tools[]", "cache_control", {"type": "ephemeral"}, _CACHED, ("ClientToolBody",)),
    IgnoredField(MESSAGES, "tools[]", "strict", True, _ALWAYS, ("ClientToolBody",)),
    IgnoredField(
        MESSAGES, "tools[]", "eager_input_streaming", True, "the input of calls is always streamed", ("ClientToolBody",)
    ),
    IgnoredField(MESSAGES, "messages[].content[]", "data", "x", "redacted thinking cannot be read", ("BlockBody",)),
    IgnoredField(
        MESSAGES, "messages[].content[]", "citations", [], "Penstock does not support citations", ("BlockBody",)
    ),
    IgnoredField(
        MESSAGES, "messages[].content[]", "is_error", True, "chat templates do not use this field", ("BlockBody",)
    ),
    IgnoredField(EMBEDDINGS, "", "user", "u1", _LABEL, ("EmbeddingRequest",)),
    IgnoredField(POOLING, "", "user", "u1", _LABEL, ("PoolingBody",)),
    IgnoredField(POOLING, "", "embed_dtype", "float32", "Penstock supports only float32", ("PoolingBody",)),
    IgnoredField(POOLING, "", "endianness", "little", "Penstock supports only little-endian", ("PoolingBody",)),
    IgnoredField(SCORES, "", "user", "u1", _LABEL, ("ScoreBody",)),
    IgnoredField(CLASSIFY, "", "user", "u1", _LABEL, ("ClassificationBody",)),
    IgnoredField(RERANK, "", "user", "u1", _LABEL, ("RerankBody",)),
    IgnoredField(RERANK, "documents[]", "any but text", "x", "only text is ranked", ("DocumentBody",)),
    IgnoredField(LORA, "", "lora_int_id", 1, "adapters are identified by name", ("UnloadLoraAdapterRequest",)),
    IgnoredField(BATCH, "", "any key but custom_id, method, url, body", "x", "only the body is processed"),
    IgnoredField(INFERENCE, "", "field numbers of later contracts", None, "protobuf ignores unknown field numbers"),
    IgnoredField(VLLM, "tokenized", "original_text", "a", "the prompt is token_ids"),
    IgnoredField(VLLM, "mm_inputs", "im_token_id", 1, "the placeholders determine the positions of media"),
    IgnoredField(VLLM, "mm_inputs", "mm_hashes", ["a"], "media are identified by their content"),
    IgnoredField(VLLM, "mm_inputs", "keep_on_cpu_keys", ["a"], "engines choose the device of tensors"),
    IgnoredField(
        VLLM, "sampling_params", "grammar_from_first_token", True, "constraints begin after the model's reasoning"
    ),
    IgnoredField(VLLM, "GetLoads", "include", ["all"], "all loads are returned"),
)


@cache
def ignored_in(struct: str) -> frozenset[str]:
    """Return the names of the fields without effect that an object of a struct may have."""
    return frozenset(field.name for field in IGNORED if struct in field.structs)
