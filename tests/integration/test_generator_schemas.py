"""JSON schemas written by schema generators: each is served, or refused with its path, and outputs are valid.

``tests/documents/generator_schemas`` contains the schemas by generator. ``REFUSED`` lists schemas that cannot be
enforced, with the path and the reason in the client's error.
"""

import json
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from tokenizers import Tokenizer

from penstock_common.errors import InvalidArgument
from penstock_common.types.outputs import FinishReason
from penstock_common.types.sampling import SamplingParams, StructuredOutput
from penstock_enginecore.core.engine_core import EngineCore
from penstock_enginecore.structured_output.constraints.source import check_constraint
from tests.fakes.engines.in_process import build_engine, generate

TESTS = Path(__file__).resolve().parents[1]
DEMO = TESTS.parent / "examples/demo_model/penstock-tiny"
TOKENIZER = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
SAMPLES = 8
MAX_TOKENS = 200
SCHEMAS: dict[str, Any] = {
    f"{path.stem}: {name}": schema
    for path in sorted((TESTS / "documents/generator_schemas").glob("*.json"))
    for name, schema in json.loads(path.read_text(encoding="utf-8")).items()
}
REFUSED = {
    "dotnet: NJsonSchema inheritance": "#/definitions/Animal/required names 'Legs', which the additionalProperties of #/allOf/1",
    "mcp: additional beside unevaluated": "#/unevaluatedProperties is only supported with the value false",
    "mcp: contains twice": "#/properties/a/minContains is 2; only 1",
    "mcp: oneOf that overlaps": "#/properties/a/oneOf/0 requires a number that is not an integer",
    "mcp: remote $ref": "#/properties/a/$ref is 'https://example.com/a.json'",
    "mcp: unique tags of free text": "#/properties/tags/uniqueItems is only supported where the items are values of an enum",
    "mcp: word boundary in a pattern": "#/properties/q/pattern cannot be enforced: a word boundary",
    "pydantic: v2 condecimal": "#/properties/k/anyOf/1/pattern cannot be enforced: a lookahead",
    "reported: required true inside (wrong, draft3)": "#/properties/k/required must be a list of strings",
    "reported: type upper case (Gemini)": "#/type is 'OBJECT'; write 'object'",
    "zod: v4 intersection of closed objects": "#/allOf/0/required names 'a', which the additionalProperties of #/allOf/1",
}
SERVED = sorted(SCHEMAS.keys() - REFUSED.keys())
QUICK = SERVED[::8]


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineCore]:
    torch.set_num_threads(1)
    built = build_engine(DEMO, cache={"num_blocks": 4096})
    yield built
    built.shutdown()


def _type(validator: Any, types: Any, instance: Any, schema: Any) -> Iterator[jsonschema.ValidationError]:
    """Validate ``type``, and accept null if OpenAPI's ``nullable`` is true."""
    if instance is not None or schema.get("nullable") is not True:
        yield from jsonschema.Draft202012Validator.VALIDATORS["type"](validator, types, instance, schema)


def validator(schema: Any) -> Any:
    """Return a validator for the schema's draft.

    ``$schema`` or a keyword that only an old draft has determines the draft.
    """
    text = json.dumps(schema)
    old = '"exclusiveM' in text and any(
        f'"exclusive{m}imum": {v}' in text for m in ("Min", "Max") for v in ("true", "false")
    )
    kind = jsonschema.Draft202012Validator
    if "draft-04" in text or old:
        kind = jsonschema.Draft4Validator
    elif "draft-07" in text or '"items": [' in text:
        kind = jsonschema.Draft7Validator
    return jsonschema.validators.extend(kind, {"type": _type})(json.loads(text, parse_float=Decimal))


def sampled(engine: EngineCore, names: list[str]) -> dict[str, int]:
    """Return the number of finished samples, and the number of invalid samples among the finished ones."""
    prompt = TOKENIZER.encode("JSON please", add_special_tokens=False).ids
    requests = [
        (
            f"{name} #{seed}",
            prompt,
            SamplingParams(
                temperature=1.5,
                seed=seed,
                max_tokens=MAX_TOKENS,
                structured_output=StructuredOutput(json_schema=json.dumps(SCHEMAS[name])),
            ),
        )
        for name in names
        for seed in range(SAMPLES)
    ]
    run = generate(engine, requests)
    invalid = []
    ended = [key for key, reason in run.finish_reasons.items() if reason is FinishReason.STOP]
    for key in ended:
        text = TOKENIZER.decode(run.tokens[key])
        try:
            validator(SCHEMAS[key.rpartition(" #")[0]]).validate(json.loads(text, parse_float=Decimal))
        except (ValueError, jsonschema.ValidationError) as e:
            invalid.append((key, text, str(e).split("\n", 1)[0]))
    assert not invalid
    return {"samples": len(requests), "stop": len(ended)}


def test_an_unenforceable_schema_is_refused_at_its_place_in_the_document() -> None:
    told = {}
    for name, schema in SCHEMAS.items():
        try:
            check_constraint(StructuredOutput(json_schema=json.dumps(schema)), 1 << 18)
        except InvalidArgument as e:
            told[name] = (
                e.message.removeprefix("sampling_params.structured_output.json_schema").removeprefix(":").lstrip()
            )
    assert told.keys() == REFUSED.keys()
    assert not [(name, told[name]) for name, reason in REFUSED.items() if not told[name].startswith(reason)]


@pytest.mark.parametrize("names", [QUICK, pytest.param(SERVED, marks=pytest.mark.slow)], ids=["some", "all"])
def test_outputs_under_a_generators_schema_are_valid(engine: EngineCore, names: list[str]) -> None:
    counts = sampled(engine, names)
    print(f"{len(names)} schemas served, {counts['samples']} samples, {counts['stop']} ended")
    assert counts["stop"] >= counts["samples"] / 2
