"""List of request fields that are known but not supported. docs/reference/request-fields.md shows the same list as a
table.

Every field in this list would change the output, the answer or the handling of the request, so a request that sets
such a field is refused. Fields without effect are in ``ignored_fields.py``. The fields of the gRPC API are in the list
if the HTTP routes have them under another name.
"""

from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

from penstock_common.errors import Unimplemented
from penstock_common.types.sampling import FILTERS
from penstock_frontend.api.ignored_fields import ignored_in

CHAT, COMPLETIONS, RESPONSES = ("ChatCompletionRequest",), ("CompletionRequest",), ("ResponseBody",)
MESSAGES = ("MessagesBody", "ConversationBody")
GENERATING = CHAT + COMPLETIONS + RESPONSES + MESSAGES
"""Structs of the request bodies that generate text. ``UnsupportedField.structs`` has names of structs."""
SCORES, CLASSIFY, POOLING, RERANK = ("ScoreBody",), ("ClassificationBody",), ("PoolingBody",), ("RerankBody",)
EMBEDDINGS = ("EmbeddingRequest",)
COHERE = ("CohereEmbedBody",)
TEI = ("EmbedBody", "EmbedAllBody", "PredictBody", "SimilarityBody")
TRANSCRIPTIONS, TRANSLATIONS = ("TranscriptionBody",), ("TranslationBody",)
SPEECH = TRANSCRIPTIONS + TRANSLATIONS
"""Structs of the forms with an audio file."""
POOLING_ROUTES = EMBEDDINGS + POOLING + SCORES + CLASSIFY + RERANK + COHERE + TEI
"""Structs of the request bodies for embeddings, classes and scores."""
ROUTES: Mapping[str, str] = {
    "ChatCompletionRequest": "/v1/chat/completions",
    "CompletionRequest": "/v1/completions",
    "ResponseBody": "/v1/responses",
    "MessagesBody": "/v1/messages",
    "ConversationBody": "/v1/messages",
    "MessageBody": "/v1/chat/completions, messages[]",
    "FunctionBody": "/v1/chat/completions, tools[].function",
    "FunctionTool": "/v1/responses, tools[]",
    "ClientToolBody": "/v1/messages, tools[]",
    "EmbeddingRequest": "/v1/embeddings",
    "PoolingBody": "/pooling",
    "ScoreBody": "/v1/score",
    "ClassificationBody": "/classify",
    "RerankBody": "/rerank",
    "CohereEmbedBody": "/v2/embed",
    "EmbedBody": "/embed",
    "EmbedAllBody": "/embed_all",
    "PredictBody": "/predict",
    "SimilarityBody": "/similarity",
    "TranscriptionBody": "/v1/audio/transcriptions",
    "TranslationBody": "/v1/audio/translations",
}
"""Map from structs to the public names of the objects that the structs represent."""


class UnsupportedField(NamedTuple):
    """A request field that is not supported, or several such fields with the same effect.

    Attributes:
        names: Names of the fields.
        effect: Effect that the field would have, as a noun.
        instead: Alternative that clients can use. Empty if there is no alternative.
        structs: Structs of the objects in which clients send the field. A struct that declares the field supports it.
        neutral: Values that have no effect, in addition to null, false, 0 and empty values.
        strict: Whether false, 0 and empty values also have an effect.
        wraps: Whether the field is an object that contains other fields. Such a field has no effect if all fields in
            the object are ignored.
    """

    names: tuple[str, ...]
    effect: str
    instead: str = ""
    structs: tuple[str, ...] = GENERATING
    neutral: tuple[object, ...] = ()
    strict: bool = False
    wraps: bool = False

    def asks(self, value: object, struct: str) -> bool:
        """Return True if the field has an effect when it has the value ``value`` in an object of ``struct``."""
        if value is None or any(_same(value, each) for each in self.neutral):
            return False
        if self.wraps and isinstance(value, dict) and value.keys() <= ignored_in(struct):
            return False
        return self.strict or bool(value)

    def refusal(self, path: str) -> Unimplemented:
        """Return the error for a request that has the field. ``path`` is the path of the field in the body."""
        remedy = f"use {self.instead}" if self.instead else "leave it out"
        return Unimplemented(f"{path} is not supported; {remedy}", field=path)


def _same(value: object, other: object) -> bool:
    # True equals 1 in Python, but not in JSON.
    return value == other and isinstance(value, bool) == isinstance(other, bool)


_F = UnsupportedField
_AT_CHAT, _AT_COMPLETIONS, _AT_RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
_THINK = "chat_template_kwargs.enable_thinking"
_BEAMS, _CUT, _TEMPERATURE = (
    "beam search",
    "a filter that removes unlikely tokens",
    "a temperature that varies by token",
)
_PROMPT_FORM, _FORMAT = "a prompt in a form that this route does not use", "an output format"
_LOGPROBS, _TIME = "log-probabilities in a form that this route does not use", "a time limit"
_BANNED, _PENALTY = "a ban on tokens", "a penalty on repeated tokens"
_MEMBERS = "its members as fields of the body"
_NOT_CHAT = COMPLETIONS + RESPONSES + MESSAGES
_NOT_COMPLETIONS = CHAT + RESPONSES + MESSAGES
_NOT_RESPONSES = CHAT + COMPLETIONS + MESSAGES

_SPEECH_SAMPLING = "sampling parameters other than temperature and seed"

_SAMPLING = (
    _F(("typical_p", "typical", "tfs_z", "tfs"), _CUT, FILTERS, neutral=(1,)),
    _F(("top_a", "epsilon_cutoff", "eta_cutoff"), _CUT, FILTERS),
    _F(("top_n_sigma", "nsigma"), _CUT, FILTERS, neutral=(-1,)),
    _F(("min_keep",), "a minimum number of tokens that filters keep", neutral=(1,)),
    _F(("mirostat", "mirostat_mode"), "Mirostat sampling", "temperature and top_p"),
    _F(("xtc_probability",), "removal of the most likely tokens", "temperature"),
    _F(("dry_multiplier",), _PENALTY, "repetition_penalty or repetition_detection"),
    _F(("dynatemp_range", "dynamic_temperature", "dynatemp_low", "dynatemp_high"), _TEMPERATURE, "temperature"),
    _F(("smoothing_factor",), _TEMPERATURE, "temperature"),
    _F(("temperature_last",), "a different order of filters"),
    _F(("samplers", "sampler_order", "sampler_priority", "sampler_seq"), "a different order of filters"),
    _F(("repeat_penalty", "rep_pen"), _PENALTY, "repetition_penalty, which counts all tokens", neutral=(1,)),
    _F(("repetition_penalty_range", "repetition_context_size", "rep_pen_range"), "a window of tokens for penalties"),
    _F(("encoder_repetition_penalty",), _PENALTY, "repetition_penalty", neutral=(1,)),
    _F(("no_repeat_ngram_size",), "a ban on repeated n-grams", "repetition_detection"),
    _F(("penalize_nl",), "a penalty on line breaks", "logit_bias"),
    _F(("penalty_alpha",), "contrastive search"),
    _F(("guidance_scale", "cfg_scale"), "guidance by a second prompt", neutral=(1,)),
    _F(("do_sample",), "greedy decoding", "temperature 0", neutral=(True,), strict=True),
    _F(("use_beam_search", "early_stopping", "diversity_penalty"), _BEAMS, "n"),
    _F(("num_beams", "num_beam_groups", "beam_width", "length_penalty"), _BEAMS, "n", neutral=(1,)),
    _F(("best_of",), "the best of several generated outputs", _AT_COMPLETIONS, structs=_NOT_COMPLETIONS, neutral=(1,)),
    _F(("bad_words_ids", "banned_tokens", "banned_token_ids", "suppress_tokens"), _BANNED, "bad_words or logit_bias"),
    _F(("begin_suppress_tokens", "custom_token_bans", "banned_strings"), _BANNED, "bad_words or logit_bias"),
    _F(("bad_word_token_ids",), _BANNED, "bad_words or logit_bias"),
    _F(("ban_eos_token",), "an output that continues after the end-of-sequence token", "ignore_eos"),
    _F(
        ("force_words_ids", "forced_bos_token_id", "forced_eos_token_id"),
        "tokens that the output must contain",
        "structured_outputs",
    ),
    _F(("eos_token_id", "eos_token_ids"), "additional tokens that end the output", "stop_token_ids", strict=True),
    _F(("stop_regex",), "a stop condition as a regular expression", "stop or structured_outputs.regex"),
    _F(("stop_strings", "stop_words", "stop_sequence", "stopping_strings", "antiprompt"), "stop strings", "stop"),
    _F(("no_stop_trim",), "the stop string as part of the output", "include_stop_str_in_output"),
    _F(
        ("trim_stop",),
        "the stop string as part of the output",
        "include_stop_str_in_output",
        neutral=(True,),
        strict=True,
    ),
    _F(("max_length",), "a limit on the total length of prompt and output", "max_tokens"),
    _F(("max_time", "t_max_predict_ms", "timeout"), _TIME, "the header x-request-timeout"),
    _F(("n_indent",), "a minimum indentation"),
    _F(
        ("logits_processors", "logits_processor", "custom_logit_processor", "custom_params"),
        "custom code in the sampler",
    ),
    _F(("vllm_xargs", "extra_args"), "arguments for extensions"),
    _F(("watermarking", "watermark"), "a watermark"),
)
_PROBS = ("n_probs", "post_sampling_probs", "return_logprob", "top_n_tokens")
_PROMPT_PROBS = ("logprob_start_len", "decoder_input_details")
_TOKEN_IDS = ("return_tokens_as_token_ids", "return_tokens", "return_prompt_text")
_OUTPUT = (
    _F(("schema", "response_schema", "responseSchema", "output_schema", "response_model"), _FORMAT, "response_format"),
    _F(("json_mode", "response_mime_type", "responseMimeType"), _FORMAT, "response_format", neutral=("text/plain",)),
    _F(("structural_tag",), _FORMAT, "structured_outputs.structural_tag"),
    _F(("guided_decoding", "guided_options_request"), _FORMAT, "structured_outputs"),
    _F(
        ("structured_output",),
        _FORMAT,
        "response_format or structured_outputs, in which the field json_schema has the name json",
    ),
    _F(("choice",), _FORMAT, "structured_outputs.choice"),
    _F(("json_object",), _FORMAT, "structured_outputs.json_object"),
    _F(("guided_whitespace_pattern", "whitespace_pattern"), _FORMAT, "structured_outputs.json_whitespace"),
    _F(("json_whitespace", "disable_any_whitespace"), _FORMAT, "structured_outputs.json_whitespace"),
    _F(("grammar_lazy", "grammar_triggers"), _FORMAT, "structured_outputs.structural_tag"),
    _F(("reasoning_format",), "a different form of reasoning", neutral=("auto", "deepseek")),
    _F(("separate_reasoning", "stream_reasoning"), "a different form of reasoning", neutral=(True,), strict=True),
    _F(("parse_tool_calls",), "tool calls as text", neutral=(True,), strict=True),
    _F(
        ("include_reasoning",),
        "an answer without reasoning",
        "thinking.type",
        structs=MESSAGES,
        neutral=(True,),
        strict=True,
    ),
    _F(
        ("include_reasoning",),
        "an answer without reasoning",
        _AT_CHAT,
        structs=COMPLETIONS,
        neutral=(True,),
        strict=True,
    ),
    _F(_PROBS, _LOGPROBS, "logprobs", structs=CHAT + COMPLETIONS),
    _F(_PROBS, _LOGPROBS, "top_logprobs", structs=RESPONSES),
    _F(_PROBS, _LOGPROBS, _AT_CHAT, structs=MESSAGES),
    _F(("logprobs",), _LOGPROBS, "top_logprobs", structs=RESPONSES),
    _F(("logprobs", "top_logprobs"), _LOGPROBS, _AT_CHAT, structs=MESSAGES),
    _F(("top_logprobs", "top_logprobs_num"), _LOGPROBS, "logprobs", structs=COMPLETIONS),
    _F(("top_logprobs_num",), _LOGPROBS, "top_logprobs", structs=CHAT + RESPONSES),
    _F(("top_logprobs_num",), _LOGPROBS, _AT_CHAT, structs=MESSAGES),
    _F(("token_ids_logprob",), _LOGPROBS, "logprob_token_ids", structs=CHAT + COMPLETIONS + RESPONSES),
    _F(("logprob_token_ids", "token_ids_logprob"), _LOGPROBS, _AT_CHAT, structs=MESSAGES),
    _F(_PROMPT_PROBS, _LOGPROBS, "prompt_logprobs", structs=CHAT + COMPLETIONS, neutral=(-1,)),
    _F(_PROMPT_PROBS, _LOGPROBS, _AT_CHAT, structs=RESPONSES + MESSAGES, neutral=(-1,)),
    _F(("prompt_logprobs",), _LOGPROBS, _AT_CHAT, structs=RESPONSES + MESSAGES, strict=True),
    _F(_TOKEN_IDS, "token ids in the answer", "return_token_ids", structs=CHAT + COMPLETIONS),
    _F(("return_token_ids", *_TOKEN_IDS), "token ids in the answer", _AT_CHAT, structs=RESPONSES + MESSAGES),
    _F(("detokenize",), "an answer without text", neutral=(True,), strict=True),
    _F(("output_kind",), "the amount of output in each message of a stream", "stream"),
    _F(("return_full_text",), "the prompt as part of the output", f"echo of {_AT_COMPLETIONS}"),
    _F(
        ("echo", "suffix"),
        "the prompt as part of the output, or a text that follows the output",
        _AT_COMPLETIONS,
        structs=_NOT_COMPLETIONS,
    ),
    _F(("return_hidden_states", "return_routed_experts"), "internal values of the model"),
    _F(("audio", "modalities"), "audio output", structs=_NOT_CHAT, neutral=(["text"],)),
    _F(("audio",), "audio output", structs=CHAT),
)
_TEMPLATES = ("prompt_template", "template")
_CUTS = ("truncate", "transforms")
_PROMPT = (
    _F(("prompt", "input", "inputs", "message", "chat_history"), _PROMPT_FORM, "messages", structs=CHAT + MESSAGES),
    _F(("messages", "input", "inputs", "system", "instructions"), _PROMPT_FORM, _AT_CHAT, structs=COMPLETIONS),
    _F(("prompt", "messages", "inputs"), _PROMPT_FORM, "input", structs=RESPONSES),
    _F(("previous_input_messages",), _PROMPT_FORM, "input", structs=RESPONSES),
    _F(("system", "preamble"), "a system message", "instructions", structs=RESPONSES),
    _F(("instructions", "preamble"), "a system message", "system", structs=MESSAGES),
    _F(("system", "instructions", "preamble"), "a system message", "messages", structs=CHAT),
    _F(("prompt_embeds", "input_embeds", "embeds"), "a prompt that consists of embeddings", "the gRPC API"),
    _F(("token_ids", "mixed"), _PROMPT_FORM, "prompt", structs=COMPLETIONS),
    _F(("token_ids", "mixed"), _PROMPT_FORM, _AT_COMPLETIONS, structs=_NOT_COMPLETIONS),
    _F(_TEMPLATES, "a different chat template", "chat_template", structs=_NOT_COMPLETIONS),
    _F(("chat_template", *_TEMPLATES), "a different chat template", _AT_CHAT, structs=COMPLETIONS),
    _F(("raw", "context", "images"), _PROMPT_FORM, _AT_COMPLETIONS, structs=_NOT_COMPLETIONS),
    _F(("raw", "context", "images"), _PROMPT_FORM, "prompt", structs=COMPLETIONS),
    _F(("documents",), "documents for the chat template", "chat_template_kwargs", structs=_NOT_COMPLETIONS),
    _F(("documents", "chat_template_kwargs"), "variables of the chat template", _AT_CHAT, structs=COMPLETIONS),
    _F(("add_generation_prompt",), "a different end of the prompt", _AT_CHAT, structs=COMPLETIONS),
    _F(
        ("add_generation_prompt", "continue_final_message"),
        "a different end of the prompt",
        _AT_CHAT,
        structs=RESPONSES,
    ),
    _F(
        ("add_generation_prompt", "continue_final_message"),
        "a different end of the prompt",
        "a last turn of the assistant",
        structs=MESSAGES,
    ),
    _F(("continue_final_message",), "a different end of the prompt", _AT_CHAT, structs=COMPLETIONS),
    _F(
        ("add_special_tokens",), "special tokens around a prompt that a chat template renders", structs=_NOT_COMPLETIONS
    ),
    _F(("prefix", "partial"), "an answer that continues the message", "continue_final_message", ("MessageBody",)),
    _F(("images",), "images", "parts of content", structs=("MessageBody",)),
    _F(("parts",), "the parts of the message", "content", structs=("MessageBody",)),
    _F(_CUTS, "truncation of the prompt", "truncate_prompt_tokens", structs=CHAT + COMPLETIONS),
    _F(
        ("truncation",),
        "truncation of the prompt",
        "truncate_prompt_tokens",
        CHAT + COMPLETIONS,
        ("disabled",),
        strict=True,
    ),
    _F(("truncate_prompt_tokens",), "truncation of the prompt", _AT_CHAT, structs=RESPONSES + MESSAGES, strict=True),
    _F(_CUTS, "truncation of the prompt", _AT_CHAT, structs=RESPONSES + MESSAGES),
    _F(("truncation",), "truncation of the prompt", _AT_CHAT, structs=MESSAGES, neutral=("disabled",), strict=True),
    _F(("safe_prompt", "safety_mode", "safety_settings", "guardrails", "moderation"), "content filters"),
    _F(("mm_processor_kwargs", "media_io_kwargs"), "options for media", structs=COMPLETIONS + MESSAGES),
    _F(("lora_request", "lora_path", "adapter_id", "adapter"), "a LoRA adapter", "lora"),
    _F(("kv_transfer_params",), "a transfer of KV blocks", _AT_CHAT, structs=MESSAGES),
)
_REASONING = (
    _F(("reasoning",), "a reasoning effort", "reasoning_effort", structs=CHAT),
    _F(("reasoning_effort",), "a reasoning effort", "reasoning.effort", structs=RESPONSES),
    _F(("reasoning_effort", "reasoning", "effort"), "a reasoning effort", "output_config.effort", structs=MESSAGES),
    _F(("reasoning_effort", "reasoning"), "a reasoning effort", _AT_CHAT, structs=COMPLETIONS),
    _F(("effort",), "a reasoning effort", "reasoning_effort", structs=CHAT),
    _F(("enable_thinking", "think"), "turning reasoning on or off", _THINK, structs=_NOT_COMPLETIONS, strict=True),
    _F(
        ("enable_thinking", "think", "thinking"),
        "turning reasoning on or off",
        _AT_CHAT,
        structs=COMPLETIONS,
        strict=True,
    ),
    _F(
        ("thinking",),
        "turning reasoning on or off",
        f"{_THINK} and thinking_token_budget",
        structs=CHAT + RESPONSES,
        strict=True,
    ),
    _F(
        ("thinking_budget", "thinking_budget_tokens", "reasoning_budget", "max_thinking_tokens"),
        "a limit on reasoning tokens",
        "thinking_token_budget",
        neutral=(-1,),
        strict=True,
    ),
)
_SERVER_TOOLS = ("connectors", "plugins", "mcp_servers", "container")
_TOOLS = (
    _F(("parameters",), "a schema for the arguments of a tool", "input_schema", structs=("ClientToolBody",)),
    _F(
        ("input_schema",),
        "a schema for the arguments of a tool",
        "parameters",
        structs=("FunctionBody", "FunctionTool"),
    ),
    _F(("functions",), "tools in OpenAI's older form", "tools", structs=_NOT_COMPLETIONS),
    _F(
        ("function_call",),
        "a choice of tools in OpenAI's older form",
        "tool_choice",
        structs=_NOT_COMPLETIONS,
        neutral=("none", "auto"),
    ),
    _F(
        ("tools", "tool_choice", "functions", "function_call"),
        "tool calls",
        _AT_CHAT,
        structs=COMPLETIONS,
        neutral=("none", "auto"),
    ),
    _F(("parallel_tool_calls",), "tool calls", "tool_choice.disable_parallel_tool_use", MESSAGES, (True,), True),
    _F(("max_tool_calls",), "a limit on tool calls"),
    _F(("tool_config", "toolConfig"), "a choice of tools", "tool_choice", structs=_NOT_COMPLETIONS),
    _F(("tool_config", "toolConfig"), "a choice of tools", _AT_CHAT, structs=COMPLETIONS),
    _F(("web_search_options", "web_search", "search_parameters", "enable_search"), "web search"),
    _F(_SERVER_TOOLS, "tools that the server would run", "tools", structs=_NOT_COMPLETIONS),
    _F(_SERVER_TOOLS, "tools that the server would run", _AT_CHAT, structs=COMPLETIONS),
)
_ROUTING = "a priority, a tenant or an engine"
_HINTS = "the headers x-penstock-priority, x-penstock-tenant and x-penstock-data-parallel-rank"
_CONVERSATION = (
    _F(("routing",), _ROUTING, _HINTS),
    _F(("previous_response_id", "include"), "a stored response", _AT_RESPONSES, structs=_NOT_RESPONSES),
    _F(("conversation", "previous_response"), "a stored conversation", "previous_response_id", RESPONSES),
    _F(("conversation",), "a stored conversation", _AT_RESPONSES, structs=_NOT_RESPONSES),
    _F(("background",), "a call that continues after its client disconnects", structs=_NOT_RESPONSES),
    _F(("context_management",), "a truncated conversation", structs=CHAT + COMPLETIONS),
    _F(("text",), _FORMAT, "response_format", structs=_NOT_RESPONSES),
    _F(("output_config",), _FORMAT, "response_format", structs=CHAT + COMPLETIONS + RESPONSES),
    _F(("output_format",), _FORMAT, "output_config.format", structs=MESSAGES),
    _F(("output_format",), _FORMAT, "response_format", structs=CHAT + COMPLETIONS + RESPONSES),
    _F(
        ("options", "parameters", "sampling_params", "generation_config"),
        "several fields in one object",
        _MEMBERS,
        wraps=True,
    ),
    _F(("generationConfig", "extra_body", "model_kwargs"), "several fields in one object", _MEMBERS, wraps=True),
    _F(
        ("extra_headers", "extra_query"),
        "HTTP headers and query parameters",
        "the request's own headers and parameters",
    ),
)
_NOT_EMBEDDINGS = POOLING + SCORES + CLASSIFY + RERANK
_NOT_TEI = EMBEDDINGS + _NOT_EMBEDDINGS
_NOT_PAIRS = EMBEDDINGS + POOLING + CLASSIFY + COHERE + TEI
_VECTORS = EMBEDDINGS + POOLING
_POOLING = (
    _F(("pooling_params",), "several fields in one object", _MEMBERS, structs=POOLING_ROUTES),
    _F(("routing",), _ROUTING, _HINTS, structs=POOLING_ROUTES),
    _F(("chat_template",), "a different chat template", structs=POOLING_ROUTES),
    _F(("mm_processor_kwargs", "chat_template_kwargs"), "options for media and templates", structs=_NOT_EMBEDDINGS),
    _F(("instruction",), "a text before each input", structs=POOLING_ROUTES),
    _F(("max_tokens_per_doc", "max_tokens_per_query"), "truncation of inputs", "truncate_prompt_tokens", _NOT_PAIRS),
    _F(
        ("prompt", "task_type"),
        "a text before each input",
        "that text in the input itself",
        structs=POOLING_ROUTES,
    ),
    _F(
        ("prompt_name", "input_type"),
        "one of the model's own prompts before each input",
        "that text in the input itself",
        structs=CLASSIFY,
    ),
    _F(("input_type",), "one of the model's own prompts before the query", "prompt_name", structs=SCORES + RERANK),
    _F(("inputs", "texts", "sentences"), "inputs under another name", "input", structs=EMBEDDINGS + POOLING + CLASSIFY),
    _F(("images",), "images as inputs", "messages", structs=EMBEDDINGS),
    _F(("images", "inputs"), "images as inputs", "texts", structs=COHERE),
    _F(("dimensions",), "shorter embeddings", "output_dimension", structs=COHERE),
    _F(("encoding_format",), "a different number format", "embedding_types", COHERE, ("float",)),
    _F(("texts",), "documents under another name", "documents", structs=SCORES),
    _F(("raw_scores",), "scores without an activation", "use_activation", structs=CLASSIFY + SCORES),
    _F(("task", "late_chunking"), "an adapter of the model, or another mode", structs=EMBEDDINGS),
    _F(("task",), "a result for each token", "/pooling", structs=CLASSIFY, neutral=("classify",)),
    _F(("output_dimension", "output_dimensionality"), "shorter embeddings", "dimensions", structs=EMBEDDINGS + POOLING),
    _F(
        ("embedding_type", "output_dtype", "precision"),
        "a different number format",
        "encoding_format",
        _VECTORS,
        ("float",),
    ),
    _F(("embed_dtype",), "a different number format", "encoding_format", EMBEDDINGS, ("float32",)),
    _F(("normalized", "normalize_embeddings"), "normalized embeddings", "normalize", structs=_VECTORS, strict=True),
    _F(("pooling", "pooling_type"), "a different pooling mode", structs=POOLING_ROUTES),
    _F(("softmax", "activation"), "scores without an activation", "use_activation", _NOT_TEI, strict=True),
    _F(
        ("softmax", "activation", "use_activation"),
        "scores without an activation",
        "raw_scores",
        ("PredictBody",),
        strict=True,
    ),
    _F(("normalized", "normalize_embeddings"), "normalized embeddings", "normalize", ("EmbedBody",), strict=True),
    _F(("encoding_format",), "a different number format", "/v1/embeddings", ("EmbedBody",), ("float",)),
    _F(("messages",), "a conversation as input", "input", structs=POOLING + CLASSIFY),
    _F(("messages",), "a conversation as input", "queries and documents", structs=SCORES),
    _F(("messages",), "a conversation as input", "query and documents", structs=RERANK),
    _F(("data",), "inputs of plugins", "input", structs=POOLING),
    _F(("rank_fields",), "documents with several fields", "documents", structs=RERANK),
    _F(("max_chunks_per_doc",), "documents in parts", structs=RERANK),
    _F(("return_embeddings",), "embeddings of documents", "/v1/embeddings", structs=RERANK),
)
_SPEECH = (
    _F(("include",), "log-probabilities of tokens", "response_format=verbose_json, which has avg_logprob", SPEECH),
    _F(("chunking_strategy",), "a different division of long audio", structs=SPEECH, neutral=("auto",)),
    _F(("known_speaker_names", "known_speaker_references", "diarize"), "names of speakers", structs=SPEECH),
    _F(("keywords", "hotwords", "initial_prompt"), "words that are likely in the text", "prompt", SPEECH),
    _F(("languages",), "several possible languages", "language", SPEECH),
    _F(("to_language",), "a translation to another language", structs=SPEECH, neutral=("en", "english")),
    _F(("word_timestamps",), "words with timestamps", "timestamp_granularities", TRANSCRIPTIONS),
    _F(
        ("timestamp_granularities", "word_timestamps"),
        "words with timestamps",
        "/v1/audio/transcriptions",
        TRANSLATIONS,
        neutral=(["segment"],),
    ),
    _F(("vad_filter", "vad_parameters"), "a different detection of silence", structs=SPEECH),
    _F(
        ("no_speech_threshold", "compression_ratio_threshold", "logprob_threshold", "log_prob_threshold"),
        "different limits for plausible text",
        structs=SPEECH,
        strict=True,
    ),
    _F(("condition_on_previous_text",), "the text of earlier windows as a prompt", structs=SPEECH),
    _F(("stream_continuous_usage_stats",), "usage in each event", structs=SPEECH),
    _F(
        ("n", "best_of", "top_p", "repetition_penalty", "length_penalty"),
        _SPEECH_SAMPLING,
        structs=SPEECH,
        neutral=(1,),
    ),
    _F(("use_beam_search", "beam_size", "patience"), _SPEECH_SAMPLING, structs=SPEECH, neutral=(1,)),
    _F(("top_k", "min_p", "presence_penalty", "frequency_penalty"), _SPEECH_SAMPLING, structs=SPEECH, neutral=(-1,)),
    _F(("max_tokens", "max_completion_tokens"), "a limit on the length of the text", structs=SPEECH),
)
UNSUPPORTED: tuple[UnsupportedField, ...] = (
    *_SAMPLING,
    *_OUTPUT,
    *_PROMPT,
    *_REASONING,
    *_TOOLS,
    *_CONVERSATION,
    *_POOLING,
    *_SPEECH,
)


@cache
def unsupported_in(struct: str) -> Mapping[str, UnsupportedField]:
    """Return the fields that are refused in objects of a struct, by name of the field."""
    return {name: field for field in UNSUPPORTED if struct in field.structs for name in field.names}
