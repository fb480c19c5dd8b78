"""Constraints compiled by the real backend, in its real process, with the demo model's tokenizer."""

import datetime as dt
import ipaddress
import json
import os
import random
import re
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer

from penstock_common.errors import Internal, InvalidArgument, Unavailable, Unimplemented
from penstock_common.types.sampling import StructuredOutput
from penstock_enginecore.config import EngineCoreConfig, ModelConfig, StructuredOutputConfig
from penstock_enginecore.structured_output.backend import XgrammarBackend, token_bytes
from penstock_enginecore.structured_output.core.base import bitmask_words
from penstock_enginecore.structured_output.factory import make_grammar_backend
from tests.fakes.engines.followed import TIMEOUT, Followed, Walk, follow, follow_here
from tests.fakes.engines.followed import allowed as allowed_by
from tests.fakes.models.random_schemas import RandomModel, random_schema
from tests.fakes.patience import deadlines

pytestmark = pytest.mark.usefixtures("warm_processes")
MODEL = Path(__file__).resolve().parents[4] / "examples/demo_model/penstock-tiny"
VOCAB_SIZE = 2100
"""Larger than the tokenizer's 2048 tokens, and no multiple of 32."""
EOS = frozenset({1, 5})
CHECKER = jsonschema.Draft202012Validator.FORMAT_CHECKER


def backend_with(**settings: Any) -> XgrammarBackend:
    model = ModelConfig(path=str(settings.pop("path", MODEL)))
    eos = settings.pop("eos", EOS)
    config = EngineCoreConfig(model=model, structured_output=StructuredOutputConfig(**settings))
    made = make_grammar_backend(config, vocab_size=VOCAB_SIZE, eos_token_ids=eos)
    assert isinstance(made, XgrammarBackend)
    return made


@pytest.fixture(scope="module")
def backend() -> Iterator[XgrammarBackend]:
    shared = backend_with()
    yield shared
    shared.shutdown()


@pytest.fixture(scope="module")
def model() -> RandomModel:
    return RandomModel(token_bytes(Tokenizer.from_file(str(MODEL / "tokenizer.json")), VOCAB_SIZE), set(EOS))


def outputs(backend: XgrammarBackend, model: RandomModel, count: int = 10, **constraint: Any) -> list[str]:
    return [model.run(follow_here(backend, **constraint), random.Random(seed)).decode() for seed in range(count)]


def allowed(grammar: Followed) -> set[int]:
    return allowed_by(grammar.grammar.mask)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(10))
def test_whatever_a_model_samples_its_schema_accepts_it(backend: XgrammarBackend, model: RandomModel, block: int):
    for seed in range(20 * block, 20 * block + 20):
        schema = random_schema(random.Random(seed))
        validator = jsonschema.Draft202012Validator(schema, format_checker=CHECKER)
        for output in outputs(backend, model, 1, json_schema=json.dumps(schema)):
            validator.validate(json.loads(output))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("date-time", dt.datetime.fromisoformat),
        ("date", dt.date.fromisoformat),
        ("time", dt.time.fromisoformat),
        ("uuid", uuid.UUID),
        ("ipv4", ipaddress.IPv4Address),
        ("ipv6", ipaddress.IPv6Address),
        ("uri", lambda text: urlsplit(text).port),
    ],
)
def test_a_format_is_what_its_readers_read(
    backend: XgrammarBackend, model: RandomModel, name: str, read: Callable[[str], object]
):
    for text in outputs(backend, model, json_schema=json.dumps({"type": "string", "format": name})):
        read(json.loads(text))


def test_a_recursive_schema_is_followed(backend: XgrammarBackend, model: RandomModel):
    tree = {
        "type": "object",
        "properties": {"left": {"$ref": "#/$defs/t"}, "v": {"type": "integer"}},
        "required": ["v"],
    }
    schema = {"$ref": "#/$defs/t", "$defs": {"t": tree}}
    texts = outputs(backend, model, json_schema=json.dumps(schema))
    for text in texts:
        jsonschema.validate(json.loads(text), schema)
    assert any("left" in text for text in texts)


def test_an_additional_key_is_never_a_declared_one(backend: XgrammarBackend):
    schema = {"type": "object", "properties": {"ab": {"type": "null"}}, "additionalProperties": {"type": "integer"}}
    text = json.dumps(schema)
    assert accepts(follow_here(backend, json_schema=text), '{"ab":null,"abc":1,"a":2}')
    for wrong in ('{"ab":1}', '{"a":2,"ab":1}', '{"\\u0061b":1}'):
        assert not accepts(follow_here(backend, json_schema=text), wrong)


def accepts(grammar: Walk, text: str) -> bool:
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    return grammar.accept([*tokenizer.encode(text, add_special_tokens=False).ids, 1])


@pytest.mark.parametrize("indent", [None, 2, 8])
def test_usual_layouts_of_json_are_allowed(backend: XgrammarBackend, indent: int | None):
    value = {"a": [1, {"b": "ü", "c": [[], {}]}], "d": -0.5e-3}
    assert accepts(follow_here(backend, json_object=True), json.dumps(value, indent=indent, ensure_ascii=False))


def test_a_json_object_is_one(backend: XgrammarBackend, model: RandomModel):
    assert all(isinstance(json.loads(text), dict) for text in outputs(backend, model, json_object=True))


@pytest.mark.parametrize(
    "pattern", [r"a{2,3}|b+c?", r"[A-Fa-f\d]{4}(-\w{1,3})*", r"(?:x|yé)\.\{\}|\"\\", "[ -~]{5}", "^(x|y)$"]
)
def test_the_whole_output_matches_a_regex(backend: XgrammarBackend, model: RandomModel, pattern: str):
    for text in outputs(backend, model, regex=pattern):
        assert re.fullmatch(pattern, text, re.ASCII)


def test_the_output_is_exactly_one_of_the_choices(backend: XgrammarBackend, model: RandomModel):
    options = ("yes", 'quo"te', "back\\slash", "two\nlines", "ünïcode 😀", "yes, but", "[a-z]{2}")
    assert set(outputs(backend, model, 80, choice=options)) == set(options)


def test_the_output_is_a_sentence_of_the_grammar(backend: XgrammarBackend, model: RandomModel):
    grammar = 'root ::= sum\nsum ::= term ("+" term){0,3}\nterm ::= [0-9]{1,2} | "(" sum ")"\n'
    for text in outputs(backend, model, grammar=grammar):
        assert re.fullmatch(r"[0-9+()]+", text)
        assert text.count("(") == text.count(")")


def test_a_structural_tag_constrains_what_is_between_its_tags(backend: XgrammarBackend):
    call = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 9}}, "required": ["city"]}
    tag = {"type": "tag", "begin": "<call>", "content": {"type": "json_schema", "json_schema": call}, "end": "</call>"}
    text = json.dumps(
        {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<c"], "tags": [tag]}}
    )
    assert accepts(follow_here(backend, structural_tag=text), 'free text <call>{"city": "Bern"}</call> and more')
    assert accepts(follow_here(backend, structural_tag=text), "nothing but text")
    assert not accepts(follow_here(backend, structural_tag=text), '<call>{"town": "Bern"}</call>')
    assert not accepts(follow_here(backend, structural_tag=text), '<call>{"city": "much too long"}</call>')


def test_the_end_is_allowed_exactly_where_the_constraint_is_fulfilled(backend: XgrammarBackend):
    grammar = follow(backend, regex="ab?")
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    assert not allowed(grammar) & EOS
    assert not grammar.accept([1])
    assert grammar.accept([tokenizer.token_to_id("a")])
    assert allowed(grammar) == EOS | {tokenizer.token_to_id("b")}
    assert grammar.accept([tokenizer.token_to_id("b")])
    assert allowed(grammar) == EOS
    assert not grammar.terminated
    assert grammar.accept([5])
    assert grammar.terminated
    assert allowed(grammar) == set()
    assert not grammar.accept([1])


def test_tokens_up_to_the_first_refused_one_are_taken_in(backend: XgrammarBackend):
    grammar = follow(backend, regex="aab")
    a, b = (Tokenizer.from_file(str(MODEL / "tokenizer.json")).token_to_id(c) for c in "ab")
    assert not grammar.accept([a, b, a])
    assert grammar.accept([a, b, 1])


def test_padding_and_special_tokens_are_never_allowed(backend: XgrammarBackend):
    tag = '{"type": "structural_tag", "format": {"type": "any_text"}}'
    free = allowed(follow(backend, structural_tag=tag))
    assert max(free) < 2048
    assert free & set(range(6)) == EOS
    assert allowed(follow(backend, regex="(.|\n)*")) & set(range(6)) == EOS


def test_bits_behind_the_vocabulary_are_cleared_in_wider_rows(backend: XgrammarBackend):
    row = np.full(bitmask_words(VOCAB_SIZE) + 3, -1, np.int32)
    follow(backend, regex=".*").fill(row)
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    assert bits[:2048].any()
    assert not bits[2048:].any()


def test_requests_with_the_same_constraint_share_one_compilation(backend: XgrammarBackend):
    first, second = (backend.compile(StructuredOutput(regex="shared{1,3}")) for _ in range(2))
    assert first is second
    one, other = (follow(backend, regex="shared{1,3}") for _ in range(2))
    assert one.accept([Tokenizer.from_file(str(MODEL / "tokenizer.json")).token_to_id("s")])
    assert allowed(one) != allowed(other)
    assert not first.cancel()


def test_constraints_unreadable_for_the_library_are_refused_with_its_reason(backend: XgrammarBackend):
    with pytest.raises(
        InvalidArgument, match='structured_output.grammar cannot be compiled: EBNF .* "gone" is not defined'
    ) as e:
        follow(backend, grammar="root ::= gone")
    assert e.value.field == "sampling_params.structured_output.grammar"


def test_a_constraint_that_allows_no_output_is_refused(backend: XgrammarBackend):
    with pytest.raises(InvalidArgument, match="structured_output.grammar allows no output"):
        follow(backend, grammar='root ::= again\nagain ::= again "a"\n')


def test_compile_refuses_everything_that_check_refuses(backend: XgrammarBackend):
    with pytest.raises(InvalidArgument, match="#/not allows no value"):
        backend.check(StructuredOutput(json_schema='{"not": {}}'))
    with pytest.raises(InvalidArgument, match="#/not allows no value"):
        follow(backend, json_schema='{"not": {}}')


@pytest.mark.slow
def test_too_much_time_ends_one_constraint_and_no_other():
    slow = StructuredOutput(choice=("a" * 250_000,))
    for seconds in deadlines(0.5):
        with_little_time = backend_with(compile_timeout=seconds)
        try:
            futures = [with_little_time.compile(c) for c in (slow, StructuredOutput(regex="after"))]
            error = futures[0].exception(TIMEOUT)
            assert isinstance(error, InvalidArgument)
            assert error.field == "sampling_params.structured_output.choice"
            assert f"the limit is {seconds} seconds (structured_output.compile_timeout)" in error.message
            if "takes too long to compile" in str(futures[1].exception(TIMEOUT)):
                continue  # on a busy machine, the other request may also time out
            assert allowed(follow(with_little_time, regex="after"))
            assert with_little_time.compile(slow) is not futures[0]
            break
        finally:
            with_little_time.shutdown()


@pytest.mark.slow
def test_a_process_that_has_to_wait_for_a_core_does_not_use_up_its_time():
    seconds = 1.0
    waiting = backend_with(compile_timeout=seconds)
    try:
        waiting.warm_up().result(TIMEOUT)
        pid = waiting.compiler_pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        future = waiting.compile(StructuredOutput(regex="ab"))
        time.sleep(1.5 * seconds)
        os.kill(pid, signal.SIGCONT)
        assert future.exception(TIMEOUT) is None
        assert waiting.compiler_pid == pid
    finally:
        waiting.shutdown()


@pytest.mark.slow
def test_too_much_memory_ends_one_constraint_and_no_other(capfd: pytest.CaptureFixture[str]):
    rules = "".join(f'r{i} ::= [a-z]* | [b-y]{{1,50}} | ([^a] "x"){{3,90}}\n' for i in range(1500))
    large = StructuredOutput(grammar="root ::= " + " ".join(f"r{i}" for i in range(1500)) + "\n" + rules)
    with_little_memory = backend_with(compile_memory=64 * 1024**2, compile_timeout=60)
    try:
        futures = [with_little_memory.compile(c) for c in (large, StructuredOutput(regex="after"))]
        error = futures[0].exception(TIMEOUT)
        assert isinstance(error, InvalidArgument)
        assert "the limit is 67108864 bytes (structured_output.compile_memory)" in error.message
        assert allowed(follow(with_little_memory, regex="after"))
    finally:
        with_little_memory.shutdown()
    assert capfd.readouterr() == ("", "")


def test_shutdown_ends_the_process_and_what_waits():
    backend = backend_with()
    assert allowed(follow(backend, regex="a"))
    pid = backend.compiler_pid
    assert pid is not None
    waiting = [backend.compile(StructuredOutput(choice=("a" * 250_000 + str(i),))) for i in range(3)]
    backend.shutdown()
    backend.shutdown()
    assert [type(f.exception(TIMEOUT)) for f in waiting] == [Unavailable] * 3
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert isinstance(backend.compile(StructuredOutput(regex="b")).exception(TIMEOUT), Unavailable)


def test_a_process_that_was_killed_while_idle_costs_no_constraint_an_error(backend: XgrammarBackend):
    """The exit code comes from the parent process, which notices the end after a moment."""
    assert allowed(follow(backend, regex="idle"))
    for number in range(20):
        assert backend.compiler_pid is not None
        os.kill(backend.compiler_pid, signal.SIGKILL)
        backend.compile(StructuredOutput(regex=f"killed{number}")).result(TIMEOUT)


def test_the_least_recently_used_constraint_is_forgotten():
    backend = backend_with(cache_size=2)
    a, b, c = (StructuredOutput(regex=f"{name}++") for name in "abc")  # the backend also caches refusals
    try:
        futures = {a: backend.compile(a), b: backend.compile(b)}
        assert backend.compile(a) is futures[a]
        futures[c] = backend.compile(c)
        assert backend.compile(a) is futures[a]
        assert backend.compile(b) is not futures[b]
        assert isinstance(futures[b].exception(TIMEOUT), InvalidArgument)
    finally:
        backend.shutdown()


def test_an_engine_without_an_end_token_says_so():
    backend = backend_with(eos=frozenset())
    with pytest.raises(Unimplemented, match="this engine's model has no end-of-sequence token"):
        backend.check(StructuredOutput(regex="a"))
    backend.shutdown()


def test_an_engine_without_a_tokenizer_says_so(tmp_path: Path):
    backend = backend_with(path=tmp_path)
    with pytest.raises(
        Unimplemented, match=f"this engine has no tokenizer: '{tmp_path}' does not contain tokenizer.json"
    ):
        backend.check(StructuredOutput(regex="a"))
    (tmp_path / "tokenizer.json").write_text("{}")
    backend.check(StructuredOutput(regex="a"))
    error = backend.compile(StructuredOutput(regex="a")).exception(TIMEOUT)
    assert isinstance(error, Unimplemented)
    assert "no usable tokenizer" in error.message
    assert not isinstance(error, Internal)
    backend.shutdown()
