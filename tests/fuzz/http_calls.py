"""Hostile calls over HTTP: bodies that are almost valid, and malformed HTTP requests."""

import asyncio
import contextlib
import json
from random import Random
from typing import Any, NamedTuple

from tests.fuzz import values
from tests.fuzz.blame import Blame
from tests.fuzz.form_calls import make_form
from tests.fuzz.rpc_calls import TIMEOUT, End
from tests.fuzz.seeds import MODEL, SCHEMA

_HI = {"role": "user", "content": "hi"}
_TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": json.loads(SCHEMA)}}
SEEDS: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [
        {"prompt": "Once", "max_tokens": 2, "model": MODEL},
        {
            "prompt": ["a", "b"],
            "max_tokens": 2,
            "n": 2,
            "logprobs": 1,
            "echo": True,
            "stop": ["x"],
            "seed": 1,
            "top_p": 0.9,
        },
        {"prompt": "a", "max_tokens": 2, "n": 1, "best_of": 3, "suffix": "b"},
        {"prompt": [[5, 6], [7]], "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}},
        {"prompt": "a", "max_tokens": 2, "structured_outputs": {"regex": "[ab]+"}, "logit_bias": {"5": 1.0}},
        {
            "prompt": "a",
            "max_tokens": 2,
            "response_format": {"type": "json_schema", "json_schema": {"schema": json.loads(SCHEMA)}},
        },
        {
            "prompt": "a",
            "max_tokens": 2,
            "repetition_detection": {"max_pattern_size": 4},
            "bad_words": ["q"],
            "min_tokens": 1,
        },
    ],
    "/v1/chat/completions": [
        {"messages": [_HI], "max_tokens": 2},
        {"messages": [_HI], "max_tokens": 2, "stream": True, "tools": [_TOOL], "tool_choice": "auto", "n": 2},
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
            "max_tokens": 2,
            "logprobs": True,
            "top_logprobs": 2,
            "logprob_token_ids": [3, 4],
        },
        {
            "messages": [
                _HI,
                {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]},
                {"role": "tool", "content": "7", "tool_call_id": "1"},
            ],
            "tools": [_TOOL],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "max_completion_tokens": 2,
            "chat_template_kwargs": {"enable_thinking": True},
        },
    ],
    "/v1/embeddings": [
        {"input": "a", "model": MODEL},
        {"input": [[5, 6], [7]], "encoding_format": "base64", "dimensions": 4},
    ],
    "/v1/messages": [
        {"messages": [_HI], "max_tokens": 2, "system": "b", "stop_sequences": ["x"], "temperature": 0.5},
        {
            "messages": [
                _HI,
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "t", "signature": ""},
                        {"type": "tool_use", "id": "1", "name": "f", "input": {}},
                    ],
                },
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "7"}]},
            ],
            "max_tokens": 2,
            "stream": True,
            "tools": [{"name": "f", "input_schema": json.loads(SCHEMA)}],
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
            "thinking": {"type": "enabled", "budget_tokens": 1024},
        },
    ],
    "/v1/messages/count_tokens": [{"messages": [_HI], "system": [{"type": "text", "text": "b"}]}],
    "/v1/responses": [
        {"input": "a", "max_output_tokens": 2, "instructions": "b", "store": False},
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
                {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "y"}]},
                {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "1", "output": "7"},
            ],
            "max_output_tokens": 2,
            "stream": True,
            "tools": [{"type": "function", "name": "f", "parameters": json.loads(SCHEMA)}],
            "text": {"format": {"type": "json_schema", "name": "s", "schema": json.loads(SCHEMA)}},
            "include": ["message.output_text.logprobs"],
            "reasoning": {"effort": "low"},
        },
    ],
    "/v1/score": [{"queries": "a", "documents": ["b", "c"]}, {"text_1": ["a", "b"], "text_2": ["c", [5, 6]]}],
    "/v1/rerank": [{"query": "a", "documents": ["b", {"text": "c"}], "top_n": 1, "return_documents": False}],
    "/classify": [{"input": ["a", [5, 6]], "use_activation": False}],
    "/pooling": [{"input": "a", "task": "token_embed", "encoding_format": "base64"}, {"input": [[5, 6], [7]]}],
    "/embed": [{"inputs": ["a", [5, 6]], "normalize": False, "prompt_name": "query", "dimensions": 2}],
    "/v2/embed": [{"texts": ["a", "b"], "input_type": "search_query", "embedding_types": ["float", "base64"]}],
    "/embed_all": [{"inputs": "a", "truncate": True, "truncation_direction": "Left"}],
    "/embed_sparse": [{"inputs": ["a", [5, 6]], "input_type": "query"}],
    "/predict": [{"inputs": [["a", "b"], ["c", "d"]], "raw_scores": True}, {"inputs": "a"}],
    "/similarity": [{"inputs": {"source_sentence": "a", "sentences": ["b"]}}],
    "/tokenize": [{"prompt": "a"}, {"messages": [_HI], "tools": [_TOOL], "return_token_strs": True}],
    "/detokenize": [{"tokens": [5, 6, 7]}],
}
_KEYS = (
    "model",
    "n",
    "stop",
    "stream",
    "prompt",
    "messages",
    "temperature",
    "response_format",
    "structured_outputs",
    "json",
)
_HEADERS: tuple[tuple[str, str], ...] = (
    ("content-type", "text/plain"),
    ("content-type", "application/x-www-form-urlencoded"),
    ("content-type", "multipart/form-data; boundary=x"),
    ("content-type", "application/json; charset=utf-16"),
    ("content-encoding", "gzip"),
    ("x-request-timeout", "0.05"),
    ("x-request-timeout", "nan"),
    ("x-request-timeout", "1e400"),
    ("x-request-timeout", "-1"),
    ("x-request-id", "i" * 300),
    ("x-request-id", "\xff\xfe"),
    ("x-penstock-priority", "9" * 5000),
    ("x-penstock-data-parallel-rank", "7"),
    ("authorization", "Basic " + "=" * 2000),
    ("accept", "application/xml"),
    ("expect", "100-continue"),
    ("host", "évil"),
    ("host", "evil.example"),
    ("host", "[::1"),
    ("host", "localhost." + "a" * 5000),
    ("origin", "http://evil.example"),
    ("origin", "null"),
    ("origin", "http://[::1" + ":" * 5000),
    ("origin", "\xff\xfe://\x80"),
    ("sec-fetch-site", "cross-site"),
    ("sec-fetch-site", "\xff" * 300),
    ("traceparent", "00-zz"),
    ("cookie", "a=b; " * 500),
)
_PATHS = (
    "/",
    "/v1",
    "/v1/nothing",
    "/v1/models/",
    "/v1/models/none",
    "/v1/models/%ff%00",
    "/v1/responses/none",
    "/v1/responses/%ff%00/input_items?limit=x",
    "//",
    "/..%2f..%2fetc/passwd",
    "/metrics",
    "/health",
    "/cluster",
    "/openapi.json",
    "/" + "p" * 5000,
)
_METHODS = ("GET", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH", "TRACE", "BREW")
_MAX_DEPTH = 6
_MOST_SENT = 20_000_000
_MOST_REPEATED = 100_000_000
"""Maximum size of repeated content in bytes, because repeating it again could exceed the machine's memory."""
_MOST_TAKEN = 32 * 1024 * 1024
"""Default of http.max_body_bytes. Requests with larger bodies are answered and cut off while the client still sends."""
_MOST_TOKENS = 32
_COMPUTED = 20_000
"""Size in bytes of a body that the system computes within a second."""
_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens")


class HttpCase(NamedTuple):
    """A request to send.

    Attributes:
        cancel: Seconds until the client disconnects.
        slow: Seconds between pieces of the request.
        blame: Allowed answers, if known.
    """

    path: str
    raw: bytes
    may_time_out: bool = False
    cancel: float | None = None
    slow: float = 0.0
    valid: bool = False
    timeout: float = TIMEOUT
    blame: Blame | None = None


def request(method: str, path: str, body: bytes, headers: list[tuple[str, str]]) -> bytes:
    """Return an HTTP/1.1 request that closes its connection."""
    given = {name for name, _ in headers}
    lines = [f"{method} {path} HTTP/1.1"]
    lines += [f"{name}: {value}" for name, value in headers]
    lines += [] if "host" in given else ["host: localhost"]
    lines += [] if "content-type" in given else ["content-type: application/json"]
    lines += [f"content-length: {len(body)}", "connection: close", "", ""]
    return "\r\n".join(lines).encode("latin-1", "replace") + body


def make_case(rng: Random) -> HttpCase:
    """Return a hostile request."""
    how = rng.random()
    if how < 0.06:
        path = rng.choice(_PATHS)
        return HttpCase("(paths)", request(rng.choice(_METHODS), path, b"", []))
    if how < 0.1:
        form = make_form(rng)
        headers = [("content-type", form.content_type)]
        return HttpCase(form.path, request("POST", form.path, form.body, headers))
    path = rng.choice(list(SEEDS))
    body: Any = json.loads(json.dumps(rng.choice(SEEDS[path])))
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        body = _changed(body, rng)
    data = json.dumps(bounded(body)).encode()
    if rng.random() < 0.12:
        data = _damaged(data, rng)
    headers = [rng.choice(_HEADERS)] if rng.random() < 0.12 else []
    may = any(name == "x-request-timeout" for name, _ in headers)
    raw = request("POST", path, data, headers)
    if rng.random() < 0.03:
        raw = _chunked(path, data, rng)
        return HttpCase(path, raw, may, cancel=0.3)
    cancel = rng.choice((0.0, 0.005, 0.05)) if rng.random() < 0.06 else None
    return HttpCase(path, raw, may, cancel, timeout=TIMEOUT + len(raw) / _COMPUTED)


def bounded(body: Any) -> Any:
    """Return the body with a small number of output tokens instead of a large one, to keep requests cheap."""
    if not isinstance(body, dict):
        return body
    large = [name for name in _LIMITS if isinstance(body.get(name), int) and _MOST_TOKENS < body[name] < 2**31]
    return {**body, **dict.fromkeys(large, _MOST_TOKENS)}


def _changed(body: Any, rng: Random, depth: int = 0) -> Any:
    """Return the body with one change."""
    if depth < _MAX_DEPTH and isinstance(body, dict) and body and rng.random() < 0.9:
        body = dict(body)
        how = rng.random()
        if how < 0.08:
            del body[rng.choice(list(body))]
        elif how < 0.25:
            body[rng.choice((*_KEYS, "unknown", ""))] = _value(rng)
        else:
            key = rng.choice(list(body))
            body[key] = _changed(body[key], rng, depth + 1)
        return body
    if depth < _MAX_DEPTH and isinstance(body, list) and body and rng.random() < 0.6:
        index = rng.randrange(len(body))
        if rng.random() < 0.2:
            times = rng.choice((0, 2, 65, 1025))
            return body * times if len(repr(body)) * times < _MOST_REPEATED else body
        return [*body[:index], _changed(body[index], rng, depth + 1), *body[index + 1 :]]
    return _value(rng)


def _value(rng: Random) -> Any:
    return values.json_schema(rng) if rng.random() < 0.1 else values.json_value(rng)


def _damaged(data: bytes, rng: Random) -> bytes:
    how = rng.randrange(8)
    if how == 0:
        return data[: rng.randrange(len(data) + 1)]
    if how == 1:
        return data.replace(b'"', b'"\xff\xfe', 1)
    if how == 2:
        return b"[" * rng.choice((10, 1000, 100_000))
    if how == 3:
        return b'{"prompt":' * 5000
    if how == 4:
        return data.decode().encode("utf-16")
    if how == 5:
        return data.replace(b"2", b"NaN").replace(b"1", b"1e999999")
    if how == 6:
        return rng.randbytes(200)
    return b'{"prompt":"' + b"a" * rng.choice((100_000, 1_000_000)) + b'"}'


def _chunked(path: str, data: bytes, rng: Random) -> bytes:
    """Return a request with endless chunks, or with an incomplete last chunk."""
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n".encode()
    chunk = f"{len(data):x}\r\n".encode() + data + b"\r\n"
    return head + rng.choice(
        (
            chunk,
            chunk * max(1, min(50, _MOST_SENT // len(chunk))),
            b"zz\r\n",
            b"fffffffff\r\nabc",
            chunk[: len(chunk) // 2],
            b"",
        )
    )


def special_cases(rng: Random) -> list[HttpCase]:
    """Return expensive requests, which are sent once: too large, with too many headers, slow, or not HTTP."""
    big = b'{"prompt":"' + b"a" * (33 * 1024 * 1024) + b'"}'
    ids = b'{"prompt":[' + b"5," * 1_000_000 + b"5]}"
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
    return [
        HttpCase("(too large)", request("POST", "/v1/completions", big, [])),
        HttpCase("(many ids)", request("POST", "/v1/completions", ids, [])),
        HttpCase("(many ids)", request("POST", "/detokenize", ids.replace(b"prompt", b"tokens"), [])),
        HttpCase("(headers)", request("GET", "/health", b"", [(f"x-{i}", "v" * 50) for i in range(2000)])),
        HttpCase("(headers)", request("GET", "/health", b"", [("x-long", "v" * 200_000)])),
        HttpCase("(slow)", head, cancel=1.0),
        HttpCase("(slow)", request("GET", "/health", b"", []), slow=0.01),
        HttpCase("(slow)", head + b"content-length: 1000\r\n\r\n{", cancel=1.0),
        HttpCase("(not http)", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(200)),
        HttpCase("(not http)", b"GET / HTTP/9.9\r\n\r\n", cancel=1.0),
        HttpCase("(not http)", b"\r\n" * 1000, cancel=1.0),
        HttpCase("(not http)", b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-length: -5\r\n\r\n"),
        HttpCase(
            "(not http)",
            b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n{}",
        ),
        HttpCase("(not http)", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + rng.randbytes(100)),
    ]


async def call(port: int, case: HttpCase) -> End:
    """Send the request and read the complete answer."""
    try:
        async with asyncio.timeout(case.cancel if case.cancel is not None else case.timeout):
            return _judged(await _exchange(port, case), case)
    except TimeoutError:
        return End("(cancelled)") if case.cancel is not None else End("(no answer)", slow=True)
    except (ConnectionError, asyncio.IncompleteReadError) as e:
        expected = case.path.startswith("(") or len(case.raw) > _MOST_TAKEN
        return End("(closed)", "" if expected else f"the connection broke: {e!r}")


async def _exchange(port: int, case: HttpCase) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for start in range(0, len(case.raw), 4 if case.slow else 2**16):
            writer.write(case.raw[start : start + (4 if case.slow else 2**16)])
            await writer.drain()
            if case.slow:
                await asyncio.sleep(case.slow)
        return await reader.read()
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def _judged(answer: bytes, case: HttpCase) -> End:
    if answer.startswith(b"HTTP/1.1 100"):  # the client asked whether to continue
        answer = answer.partition(b"\r\n\r\n")[2]
    head, _, body = answer.partition(b"\r\n\r\n")
    words = head.split(b" ", 2)
    if len(words) < 3 or not words[1].isdigit():
        return End("(closed)", "" if case.path.startswith("(") else f"no answer but {answer[:100]!r}")
    status = int(words[1])
    code = str(status)
    if status >= 500 and not (status == 504 and case.may_time_out):
        return End(code, f"{status}: {body[:300]!r}")
    if case.blame is not None and status >= 400:
        return _blamed(status, body, case.blame)
    if case.valid and status != 200:
        return End(code, f"a valid request was answered {status}: {body[:300]!r}")
    if (
        b"text/event-stream" in head
        and b'"error"' in body
        and (b'"server_error"' in body or b'"api_error"' in body or b'"internal"' in body)
    ):
        return End(code, f"a stream ended with an error of ours: {body[-300:]!r}")
    return End(code, case.blame.of_answer() if case.blame is not None else "")


def _blamed(status: int, body: bytes, blame: Blame) -> End:
    try:
        error = json.loads(body)["error"]
        message, reason = error["message"], error.get("code") or ""
    except (ValueError, KeyError, TypeError) as e:
        return End(str(status), f"{status} with a body that is no error: {e!r}: {body[:300]!r}")
    # Anthropic's errors have neither codes nor fields: their messages begin with the field.
    field = (error["param"] or "") if "param" in error else message.partition(" ")[0].rstrip(":")
    return End(f"{status} {reason}".strip(), blame.of_http(status, reason, field, message))
