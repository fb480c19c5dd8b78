"""Requests for both servers, by the task of the model."""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

Does = Literal["generate", "embed", "classify", "score"]
MODEL = "m"
"""Name of the model on both servers."""

_CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "What is 12 + 30?"}],
    "max_tokens": 8,
    "temperature": 0,
}
_TEXT: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 4, "temperature": 0}
_ITEMS: dict[str, Any] = {"input": "What is 12 + 30?", "max_output_tokens": 8, "temperature": 0}
_MESSAGE: dict[str, Any] = {"messages": _CHAT["messages"], "max_tokens": 8, "temperature": 0}
_SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "maximum": 9}},
    "required": ["n"],
    "additionalProperties": False,
}
_TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": _SCHEMA}}
_MUST_CALL = {"tools": [_TOOL], "tool_choice": {"type": "function", "function": {"name": "add"}}, "max_tokens": 40}
_WITH_USAGE = {"stream": True, "stream_options": {"include_usage": True}}
_LONG = "word " * 5000
_LONG_CHAT = {"messages": [{"role": "user", "content": _LONG}]}


class Case(msgspec.Struct, frozen=True):
    """A request. If ``body`` is None, the request is a GET. A body of bytes is sent unchanged."""

    path: str
    name: str
    body: Mapping[str, Any] | bytes | None = None

    @property
    def streams(self) -> bool:
        """Whether a successful answer is a stream."""
        return isinstance(self.body, Mapping) and bool(self.body.get("stream"))


def cases(does: Does) -> list[Case]:
    """Return all requests for a model with this task."""
    found = {"generate": _generation, "embed": _embedding, "classify": _classification, "score": _scoring}[does]()
    return [*_of_any_model(), *found]


def _of_any_model() -> list[Case]:
    return [
        Case("/v1/models", "all"),
        Case(f"/v1/models/{MODEL}", "one"),
        Case("/version", "version"),
        Case("/health", "health"),
        Case("/ping", "ping"),
        Case("/load", "load"),
        Case("/v1/nothing", "unknown path"),
        _case("/tokenize", "text", {"prompt": "hi there"}),
        _case("/tokenize", "token strings", {"prompt": "hi there", "return_token_strs": True}),
        _case("/tokenize", "missing field", {}),
        _case("/detokenize", "tokens", {"tokens": [5, 6]}),
        _case("/detokenize", "unknown token", {"tokens": [10**6]}),
        _case("/detokenize", "negative token", {"tokens": [-1]}),
    ]


def _generation() -> list[Case]:
    return [*_completions(), *_chat(), *_responses(), *_messages()]


def _completions() -> list[Case]:
    path = "/v1/completions"
    return [
        _case(path, "plain", _TEXT),
        _case(path, "stream", {**_TEXT, **_WITH_USAGE}),
        _case(
            path, "stream, usage in each", {**_TEXT, "stream": True, "stream_options": {"continuous_usage_stats": True}}
        ),
        _case(path, "logprobs", {**_TEXT, "logprobs": 2}),
        _case(path, "stream, logprobs", {**_TEXT, **_WITH_USAGE, "logprobs": 2}),
        _case(path, "echo, logprobs", {**_TEXT, "echo": True, "logprobs": 1}),
        _case(path, "echo alone", {**_TEXT, "echo": True, "logprobs": 1, "max_tokens": 0}),
        _case(path, "n, two prompts", {**_TEXT, "prompt": ["a", "b"], "n": 2, "temperature": 1, "seed": 1}),
        _case(path, "token ids returned", {**_TEXT, "return_token_ids": True, "prompt_logprobs": 1}),
        _case(path, "stop string", {**_TEXT, "max_tokens": 30, "stop": ["a", "e"]}),
        _case(path, "schema", {**_TEXT, "max_tokens": 40, "structured_outputs": {"json": _SCHEMA}}),
        _case(path, "what is not asked for", {**_TEXT, "use_beam_search": False, "logit_bias": {}, "suffix": None}),
        _case(path, "tokens as ids", {**_TEXT, "logprobs": 1, "return_tokens_as_token_ids": True}),
        *_wrong_sampling(path, _TEXT),
        _case(path, "prompt too long", {**_TEXT, "prompt": _LONG}),
        _case(path, "prompt cut", {**_TEXT, "prompt": _LONG, "truncate_prompt_tokens": 5}),
        _case(path, "prompt cut to fit", {**_TEXT, "prompt": _LONG, "truncate_prompt_tokens": -1}),
        _case(path, "prompt and tokens too long", {**_TEXT, "max_tokens": 4000}),
        _case(path, "missing prompt", {"max_tokens": 4}),
        _case(path, "empty prompt", {**_TEXT, "prompt": ""}),
        _case(path, "no prompts", {**_TEXT, "prompt": []}),
        _case(path, "token out of the vocabulary", {**_TEXT, "prompt": [10**6]}),
        _case(path, "logprobs out of range", {**_TEXT, "logprobs": 1000}),
    ]


def _chat() -> list[Case]:
    path = "/v1/chat/completions"
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": _SCHEMA}}
    bad_form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "nonsense"}}}
    return [
        _case(path, "plain", _CHAT),
        _case(path, "stream", {**_CHAT, "stream": True}),
        _case(path, "stream, usage", {**_CHAT, **_WITH_USAGE}),
        _case(
            path, "stream, usage in each", {**_CHAT, "stream": True, "stream_options": {"continuous_usage_stats": True}}
        ),
        _case(path, "logprobs", {**_CHAT, "logprobs": True, "top_logprobs": 2}),
        _case(path, "stream, logprobs", {**_CHAT, "stream": True, "logprobs": True, "top_logprobs": 2}),
        _case(path, "n", {**_CHAT, "n": 2, "temperature": 1, "seed": 1}),
        _case(path, "stream, n", {**_CHAT, "n": 2, "temperature": 1, "seed": 1, "stream": True}),
        _case(path, "a tool that must be called", {**_CHAT, **_MUST_CALL}),
        _case(path, "stream, a tool that must be called", {**_CHAT, **_MUST_CALL, "stream": True}),
        _case(path, "some tool must be called", {**_CHAT, **_MUST_CALL, "tool_choice": "required"}),
        _case(path, "schema", {**_CHAT, "response_format": form, "max_tokens": 40}),
        _case(path, "JSON", {**_CHAT, "response_format": {"type": "json_object"}, "max_tokens": 60}),
        _case(path, "token ids returned", {**_CHAT, "return_token_ids": True, "prompt_logprobs": 1}),
        _case(path, "stream, token ids returned", {**_CHAT, "return_token_ids": True, "stream": True}),
        _case(path, "prompt returned", {**_CHAT, "return_prompt_text": True}),
        _case(path, "what is not asked for", {**_CHAT, "echo": False, "use_beam_search": False, "top_logprobs": 0}),
        _case(path, "tools to choose from, none wanted", {**_CHAT, "tools": [_TOOL], "tool_choice": "none"}),
        _case(path, "no tools", {**_CHAT, "tools": []}),
        _case(path, "a role that the template refuses", {**_CHAT, "messages": [{"role": "tool", "content": "x"}]}),
        *_wrong_sampling(path, _CHAT),
        _case(path, "prompt too long", {**_CHAT, **_LONG_CHAT}),
        _case(path, "prompt and tokens too long", {**_CHAT, "max_tokens": 4000}),
        _case(path, "missing messages", {"max_tokens": 4}),
        _case(path, "no messages", {**_CHAT, "messages": []}),
        _case(path, "bad schema", {**_CHAT, "response_format": bad_form}),
        _case(path, "format without a schema", {**_CHAT, "response_format": {"type": "json_schema"}}),
        _case(path, "unknown format", {**_CHAT, "response_format": {"type": "xml"}}),
        _case(path, "top_logprobs without logprobs", {**_CHAT, "top_logprobs": 2}),
        _case(path, "tool that is not there", {**_CHAT, "tools": [_TOOL], "tool_choice": _named("sub")}),
        _case(path, "tool choice without tools", {**_CHAT, "tool_choice": "required"}),
    ]


def _responses() -> list[Case]:
    path = "/v1/responses"
    tool = {"type": "function", **_TOOL["function"]}
    calls = {"tools": [tool], "tool_choice": {"type": "function", "name": "add"}, "max_output_tokens": 40}
    form = {"text": {"format": {"type": "json_schema", "name": "n", "schema": _SCHEMA}}, "max_output_tokens": 40}
    return [
        _case(path, "plain", _ITEMS),
        _case(path, "stream", {**_ITEMS, "stream": True}),
        _case(path, "items", {**_ITEMS, "input": _CHAT["messages"], "instructions": "Add."}),
        _case(path, "a tool that must be called", {**_ITEMS, **calls}),
        _case(path, "stream, a tool that must be called", {**_ITEMS, **calls, "stream": True}),
        _case(path, "schema", {**_ITEMS, **form}),
        _case(path, "cut off", {**_ITEMS, "max_output_tokens": 1}),
        _case(path, "logprobs", {**_ITEMS, "include": ["message.output_text.logprobs"], "top_logprobs": 2}),
        _case(path, "unknown model", {**_ITEMS, "model": "nobody"}),
        _case(path, "bad temperature", {**_ITEMS, "temperature": -1}),
        _case(path, "negative max_output_tokens", {**_ITEMS, "max_output_tokens": -1}),
        _case(path, "unknown field", {**_ITEMS, "nonsense": 1}),
        _case(path, "missing input", {"max_output_tokens": 8}),
        _case(path, "prompt too long", {**_ITEMS, "input": _LONG}),
        _case(path, "unknown earlier response", {**_ITEMS, "previous_response_id": "resp_nobody"}),
        Case(f"{path}/resp_nobody", "unknown response"),
    ]


def _messages() -> list[Case]:
    path = "/v1/messages"
    tool = {"name": "add", "description": "Adds.", "input_schema": _SCHEMA}
    calls = {"tools": [tool], "tool_choice": {"type": "tool", "name": "add"}, "max_tokens": 40}
    return [
        _case(path, "plain", _MESSAGE),
        _case(path, "stream", {**_MESSAGE, "stream": True}),
        _case(path, "system", {**_MESSAGE, "system": "Add."}),
        _case(path, "a tool that must be called", {**_MESSAGE, **calls}),
        _case(path, "stream, a tool that must be called", {**_MESSAGE, **calls, "stream": True}),
        _case(path, "stop sequence", {**_MESSAGE, "stop_sequences": ["2"]}),
        _case(path, "unknown model", {**_MESSAGE, "model": "nobody"}),
        _case(path, "bad temperature", {**_MESSAGE, "temperature": -1}),
        _case(path, "negative max_tokens", {**_MESSAGE, "max_tokens": -1}),
        _case(path, "missing max_tokens", {"messages": _CHAT["messages"]}),
        _case(path, "missing messages", {"max_tokens": 8}),
        _case(path, "unknown field", {**_MESSAGE, "nonsense": 1}),
        _case(path, "prompt too long", {**_MESSAGE, **_LONG_CHAT}),
        _case(f"{path}/count_tokens", "plain", {"messages": _CHAT["messages"]}),
        _case(f"{path}/count_tokens", "missing messages", {}),
    ]


def _wrong_sampling(path: str, body: Mapping[str, Any]) -> list[Case]:
    return [
        _case(path, "unknown model", {**body, "model": "nobody"}),
        _case(path, "temperature below 0", {**body, "temperature": -1}),
        _case(path, "temperature above 2", {**body, "temperature": 3}),
        _case(path, "temperature a text", {**body, "temperature": "hot"}),
        _case(path, "top_p 0", {**body, "top_p": 0}),
        _case(path, "n 0", {**body, "n": 0}),
        _case(path, "negative max_tokens", {**body, "max_tokens": -1}),
        _case(path, "max_tokens 0", {**body, "max_tokens": 0}),
        _case(path, "unknown field", {**body, "nonsense": 1}),
        _case(path, "stream options without stream", {**body, "stream_options": {"include_usage": True}}),
        _case(path, "bad logit_bias", {**body, "logit_bias": {"5": 1000}}),
        Case(path, "no JSON", b"{"),
        Case(path, "no object", b"[]"),
    ]


def _embedding() -> list[Case]:
    path = "/v1/embeddings"
    return [
        _case(path, "plain", {"input": ["a", "b"]}),
        _case(path, "base64", {"input": "a", "encoding_format": "base64"}),
        _case(path, "token ids", {"input": [5, 6]}),
        _case(path, "cut", {"input": _LONG, "truncate_prompt_tokens": 5}),
        _case(path, "cut to fit", {"input": _LONG, "truncate_prompt_tokens": -1}),
        _case(path, "dimensions", {"input": "a", "dimensions": 8}),
        _case(path, "unknown model", {"input": "a", "model": "nobody"}),
        _case(path, "unknown field", {"input": "a", "nonsense": 1}),
        _case(path, "missing input", {}),
        _case(path, "empty input", {"input": ""}),
        _case(path, "no inputs", {"input": []}),
        _case(path, "too long", {"input": _LONG}),
        _case(path, "bad encoding", {"input": "a", "encoding_format": "hex"}),
        _case("/pooling", "tokens", {"input": "a", "task": "token_embed"}),
        _case("/pooling", "vector", {"input": "a", "task": "embed"}),
        _case("/pooling", "a task that is not served", {"input": "a", "task": "classify"}),
        *_pairs(),
        _case("/v1/completions", "of a model that embeds", _TEXT),
    ]


def _classification() -> list[Case]:
    path = "/classify"
    return [
        _case(path, "plain", {"input": ["a", "b"]}),
        _case(path, "bare", {"input": "a", "use_activation": False}),
        _case(path, "token ids", {"input": [[5, 6]]}),
        _case(path, "cut", {"input": _LONG, "truncate_prompt_tokens": 5}),
        _case(path, "unknown model", {"input": "a", "model": "nobody"}),
        _case(path, "missing input", {}),
        _case(path, "empty input", {"input": ""}),
        _case(path, "too long", {"input": _LONG}),
        _case("/pooling", "classes", {"input": "a", "task": "classify"}),
        _case("/v1/embeddings", "of a model that classifies", {"input": "a"}),
    ]


def _scoring() -> list[Case]:
    return [*_pairs(), _case("/pooling", "a pair's model", {"input": "a"})]


def _pairs() -> list[Case]:
    ranking = {"query": "a", "documents": ["b", "a"]}
    scores = [_case(path, "one to many", {"queries": "a", "documents": ["b", "a"]}) for path in ("/score", "/v1/score")]
    rankings = [_case(path, "plain", ranking) for path in ("/rerank", "/v1/rerank", "/v2/rerank")]
    return [
        *scores,
        _case("/v1/score", "older names", {"text_1": "a", "text_2": ["b"]}),
        _case("/v1/score", "each its own", {"queries": ["a", "b"], "documents": ["b", "a"]}),
        _case("/v1/score", "numbers that do not fit", {"queries": ["a", "b"], "documents": ["b", "a", "c"]}),
        _case("/v1/score", "missing documents", {"queries": "a"}),
        _case("/v1/score", "no documents", {"queries": "a", "documents": []}),
        _case("/v1/score", "unknown model", {"queries": "a", "documents": "b", "model": "nobody"}),
        _case("/v1/score", "too long", {"queries": "a", "documents": _LONG}),
        _case("/v1/score", "cut", {"queries": "a", "documents": _LONG, "truncate_prompt_tokens": 8}),
        *rankings,
        _case("/rerank", "the first", {**ranking, "top_n": 1}),
        _case("/rerank", "negative top_n", {**ranking, "top_n": -1}),
        _case("/rerank", "missing documents", {"query": "a"}),
        _case("/rerank", "no documents", {"query": "a", "documents": []}),
    ]


def _named(tool: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": tool}}


def _case(path: str, name: str, body: Mapping[str, Any]) -> Case:
    return Case(path, name, {"model": MODEL, **body})
