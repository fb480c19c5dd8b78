"""Whitespace in constrained JSON: enough for ``json.dumps``, never unlimited; compiled by the real library."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xgrammar
from tokenizers import Tokenizer

from penstock_common.types.sampling import JsonWhitespace, StructuredOutput
from penstock_enginecore.structured_output.backend import token_bytes
from penstock_enginecore.structured_output.constraints.json_grammar import INDENT, MAX_INDENT
from penstock_enginecore.structured_output.constraints.source import grammar_source
from penstock_enginecore.structured_output.core.base import bitmask_words
from penstock_enginecore.structured_output.matcher import XgrammarGrammar
from tests.fakes.models.random_schemas import random_schema
from tests.fakes.models.schema_values import random_value

MODEL = Path(__file__).resolve().parents[5] / "examples/demo_model/penstock-tiny"
VOCAB_SIZE, EOS = 2048, 1
LAYOUTS: list[dict[str, Any]] = [{}, {"indent": 2}, {"indent": 4}, {"indent": "\t"}, {"separators": (",", ":")}]
OBJECT = {
    "type": "object",
    "properties": {
        "legs": {"type": "integer"},
        "name": {"type": "string"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["legs"],
}
TAG = '{"type": "structural_tag", "format": {"type": "json_schema", "json_schema": %s}}'


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


class Compiled:
    """Constraints that the test compiles in its own process."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokens = token_bytes(tokenizer, VOCAB_SIZE)
        info = xgrammar.TokenizerInfo(self.tokens, xgrammar.VocabType.RAW, vocab_size=VOCAB_SIZE, stop_token_ids=[EOS])
        self.compiler = xgrammar.GrammarCompiler(info, max_threads=1)

    def grammar(self, **constraint: Any) -> XgrammarGrammar:
        source = grammar_source(StructuredOutput(**constraint), 1 << 20)
        tag = source.kind == "structural_tag"
        compile_source = self.compiler.compile_structural_tag if tag else self.compiler.compile_grammar
        return XgrammarGrammar(compile_source(source.text), VOCAB_SIZE)

    def admits(self, text: str, **constraint: Any) -> bool:
        """Return whether the constraint admits ``text``, one byte at a time."""
        single = {token: i for i, token in enumerate(self.tokens) if len(token) == 1}
        return self.grammar(**constraint).accept([*(single[bytes([byte])] for byte in text.encode()), EOS])


@pytest.fixture(scope="module")
def compiled(tokenizer: Tokenizer) -> Iterator[Compiled]:
    return Compiled(tokenizer)


def schema(value: Any) -> dict[str, Any]:
    return {"json_schema": json.dumps(value)}


@pytest.mark.parametrize("seed", range(40))
def test_output_of_json_dumps_is_admitted(compiled: Compiled, seed: int):
    described = random_schema(random.Random(seed))
    value = random_value(described, random.Random(seed))
    for options in LAYOUTS:
        text = json.dumps(value, ensure_ascii=False, **options)
        assert compiled.admits(text, **schema(described)), text


@pytest.mark.parametrize("options", LAYOUTS)
def test_an_object_of_any_form_may_be_laid_out_as_json_dumps_does(compiled: Compiled, options: dict[str, Any]):
    text = json.dumps({"a": [1, {"b": "ü", "c": [[], {}]}], "d": -0.5, "e": {}}, ensure_ascii=False, **options)
    assert compiled.admits(text, json_object=True)


@pytest.mark.parametrize("options", LAYOUTS)
def test_a_recursive_schema_may_be_laid_out_as_json_dumps_does(compiled: Compiled, options: dict[str, Any]):
    tree = {"type": "object", "properties": {"v": {"const": [1, {"x": []}]}, "t": {"$ref": "#"}}}
    assert compiled.admits(json.dumps({"v": [1, {"x": []}], "t": {"t": {}}}, **options), **schema(tree))


@pytest.mark.parametrize("options", LAYOUTS)
def test_a_schema_in_a_structural_tag_may_be_laid_out_as_json_dumps_does(compiled: Compiled, options: dict[str, Any]):
    text = json.dumps({"legs": 4, "tags": ["a", "b"]}, **options)
    assert compiled.admits(text, structural_tag=TAG % json.dumps(OBJECT))


@pytest.mark.parametrize(
    "text",
    [
        '{ "legs": 4}',
        '{"legs" : 4}',
        '{"legs":  4}',
        '{"legs": 4 }',
        '{"legs": 4 , "name": ""}',
        '{"legs": 4,  "name": ""}',
        '{\n\n"legs": 4}',
        '{\r\n"legs": 4}',
        '{\n     "legs": 4\n}',
        '{"legs":\n4}',
        ' {"legs": 4}',
        '{"legs": 4}\n',
        '{"legs": 4, "tags": [ ]}',
    ],
)
def test_other_blanks_are_not_admitted(compiled: Compiled, text: str):
    assert json.loads(text)
    assert not compiled.admits(text, **schema(OBJECT))
    assert not compiled.admits(text, structural_tag=TAG % json.dumps(OBJECT))


@pytest.mark.parametrize("blank", [" ", "\n", "\t", "\r"])
@pytest.mark.parametrize("whitespace", JsonWhitespace)
@pytest.mark.parametrize("constraint", [schema(OBJECT), {"json_object": True}])
def test_blanks_without_end_are_never_admitted(
    compiled: Compiled, whitespace: JsonWhitespace, constraint: dict[str, Any], blank: str
):
    for text in ("{", '{"legs"', '{"legs":', '{"legs":4', '{"legs":4,', '{"legs":4}'):
        many = text + "\n" + blank * (MAX_INDENT + INDENT + 1)
        single = {token: i for i, token in enumerate(compiled.tokens) if len(token) == 1}
        grammar = compiled.grammar(**constraint, json_whitespace=whitespace)
        assert not grammar.accept([single[bytes([byte])] for byte in many.encode()])


@pytest.mark.parametrize(
    "constraint", [schema(OBJECT), {"json_object": True}, {"structural_tag": TAG % json.dumps(OBJECT)}]
)
def test_compact_json_has_no_blanks(compiled: Compiled, constraint: dict[str, Any]):
    compact = {"json_whitespace": JsonWhitespace.COMPACT, **constraint}
    value = {"legs": 4, "name": "a b", "tags": ["c", "d"]}
    assert compiled.admits(json.dumps(value, separators=(",", ":")), **compact)
    for options in LAYOUTS[:-1]:
        assert not compiled.admits(json.dumps(value, **options), **compact)


def test_any_blanks_may_stand_where_json_allows_some(compiled: Compiled):
    text = '{ "legs"\n : 4 , "tags": [ ] }'
    assert compiled.admits(text, **schema(OBJECT), json_whitespace=JsonWhitespace.ANY)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("blank", [b" ", b"\n", b"\t"])
def test_a_model_that_likes_blanks_comes_to_an_end(compiled: Compiled, blank: bytes, seed: int):
    """The model takes its favourite whitespace token wherever allowed, else another one, and other tokens only if there
    is none.
    """
    rng, row = random.Random(seed), np.zeros(bitmask_words(VOCAB_SIZE), np.int32)
    grammar, text = compiled.grammar(**schema({**OBJECT, "properties": {"legs": {"type": "boolean"}}})), b""
    blanks = [i for i, token in enumerate(compiled.tokens) if token and not token.strip(b" \n\t")]
    while not grammar.terminated:
        grammar.fill(row)
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
        liked = [i for i in allowed if i in blanks]
        preferred = [i for i in liked if compiled.tokens[i] == blank] or liked or allowed
        token = rng.choice(preferred)
        assert grammar.accept([token])
        text += compiled.tokens[token]
        assert len(text) < 40, text
    assert json.loads(text)["legs"] in (True, False)
