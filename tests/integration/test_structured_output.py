"""Constrained outputs of a real engine with random weights are valid, whatever tokens are sampled. Other requests are
unaffected.
"""

import json
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from tokenizers import Tokenizer

from penstock.common.v1.sampling_pb2 import SamplingParams as WireParams
from penstock_common.types.outputs import FinishReason
from penstock_common.types.sampling import SamplingParams, StructuredOutput
from penstock_enginecore.config import CacheConfig, EngineCoreConfig, ExecutorConfig, ModelConfig
from penstock_enginecore.core.engine_core import EngineCore
from penstock_enginecore.executor.uniproc import UniprocExecutor
from penstock_enginecore.structured_output.factory import make_grammar_backend
from tests.fakes.clients.session_client import connected
from tests.fakes.engines.engine_server import EngineServer
from tests.fakes.engines.in_process import build_engine, generate
from tests.fakes.models.random_schemas import random_schema
from tests.fakes.models.tiny_models import save_tiny_model

DEMO = Path(__file__).resolve().parents[2] / "examples/demo_model/penstock-tiny"
TOKENIZER = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
EOS = 1
MAX_TOKENS = 1500
CLOSING = {'"': 18.0, "]": 12.0, "}": 12.0, ".": 12.0}
"""Logit bias of characters that end strings, arrays and objects, and of the last character of a schema's pattern."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model with random weights and the demo model's tokenizer."""
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("random")
    save_tiny_model(
        "llama", directory, vocab_size=TOKENIZER.get_vocab_size(), eos_token_id=EOS, max_position_embeddings=2048
    )
    shutil.copy(DEMO / "tokenizer.json", directory)
    return directory


@pytest.fixture(scope="module")
def engine(path: Path) -> Iterator[EngineCore]:
    built = build_engine(path, cache={"num_blocks": 4096})
    yield built
    built.shutdown()


@pytest.fixture(scope="module")
def closing() -> dict[int, float]:
    """Return a logit bias towards the ends of strings, arrays and objects. Without the bias, a random model would write
    thousands of tokens.
    """
    texts = {i: TOKENIZER.decode([i], skip_special_tokens=False) for i in range(TOKENIZER.get_vocab_size())}
    return {i: CLOSING[text[0]] for i, text in texts.items() if text and set(text) <= set(CLOSING)}


def text_of(tokens: list[int]) -> str:
    return TOKENIZER.decode([token for token in tokens if token != EOS], skip_special_tokens=False)


def params(seed: int, bias: dict[int, float] | None = None, max_tokens: int = 80, **constraint: Any) -> SamplingParams:
    return SamplingParams(
        temperature=1.0,
        seed=seed,
        max_tokens=max_tokens,
        logit_bias=bias or {},
        structured_output=StructuredOutput(**constraint) if constraint else None,
    )


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(40), range(40, 200)], ids=["40", "160"])
def test_random_schemas_give_valid_json_at_temperature_one(
    engine: EngineCore, closing: dict[int, float], seeds: range
) -> None:
    schemas = {f"r{i}": random_schema(random.Random(i)) for i in seeds}
    requests = [
        (key, [5 + i % 90, 7, 11], params(i, closing, MAX_TOKENS, json_schema=json.dumps(schema)))
        for i, (key, schema) in zip(seeds, schemas.items(), strict=True)
    ]
    run = generate(engine, requests)
    unended = [key for key, reason in run.finish_reasons.items() if reason is not FinishReason.STOP]
    assert not unended, [text_of(run.tokens[key])[-80:] for key in unended]
    outputs = {key: text_of(run.tokens[key]) for key in schemas}
    for key, schema in schemas.items():
        jsonschema.validate(json.loads(outputs[key]), schema)
    assert len(set(outputs.values())) > len(seeds) // 2, "the outputs vary"


@pytest.mark.parametrize(
    ("constraint", "check"),
    [
        ({"json_object": True}, lambda text: isinstance(json.loads(text), dict)),
        ({"regex": r"[a-z]{3,5}-\d{2}"}, lambda text: re.fullmatch(r"[a-z]{3,5}-\d{2}", text)),
        ({"choice": ("yes", "no", "may be")}, lambda text: text in ("yes", "no", "may be")),
        ({"grammar": 'root ::= ("a" | "b"){2,4} "."'}, lambda text: re.fullmatch(r"[ab]{2,4}\.", text)),
    ],
)
def test_each_kind_of_constraint_holds(
    engine: EngineCore, closing: dict[int, float], constraint: dict[str, Any], check: Any
) -> None:
    run = generate(engine, [(f"r{i}", [5, 6, 7], params(i, closing, MAX_TOKENS, **constraint)) for i in range(8)])
    assert set(run.finish_reasons.values()) == {FinishReason.STOP}
    assert all(check(text_of(tokens)) for tokens in run.tokens.values())


def test_a_structural_tag_constrains_what_stands_between_its_tags(engine: EngineCore) -> None:
    tag = {
        "type": "structural_tag",
        "format": {"type": "tag", "begin": "<n>", "content": {"type": "regex", "pattern": "[0-9]{2}"}, "end": "</n>"},
    }
    run = generate(engine, [("r", [5, 6, 7], params(3, structural_tag=json.dumps(tag)))])
    assert re.fullmatch(r"<n>\d{2}</n>", text_of(run.tokens["r"]))


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", [{"async_scheduling": True}, {"max_num_batched_tokens": 8}])
def test_tokens_are_the_same_however_steps_are_scheduled(
    path: Path, engine: EngineCore, scheduler: dict[str, Any]
) -> None:
    def requests() -> list[tuple[str, list[int], SamplingParams]]:
        constraint = {"regex": r"([a-z ]{1,9}[.,] ?){2,6}"}
        return [(f"r{i}", [9, 8, 7, 6, 5][: 1 + i % 5], params(i, **(constraint if i % 2 else {}))) for i in range(6)]

    expected = generate(engine, requests()).tokens
    other = build_engine(path, cache={"num_blocks": 4096}, scheduler=scheduler)
    assert generate(other, requests()).tokens == expected
    other.shutdown()


def test_neighbours_of_constrained_requests_get_the_tokens_they_get_alone(engine: EngineCore) -> None:
    free = params(1)
    alone = generate(engine, [("free", [5, 6, 7], free)]).tokens["free"]
    crowd = [(f"r{i}", [5, 6], params(i, regex="[a-z]{40,60}")) for i in range(6)]
    assert generate(engine, [("free", [5, 6, 7], free), *crowd]).tokens["free"] == alone


async def test_a_bad_constraint_is_refused_through_the_session_and_the_engine_goes_on(path: Path) -> None:
    config = EngineCoreConfig(
        model=ModelConfig(path=str(path), device="cpu"),
        cache=CacheConfig(num_blocks=512),
        executor=ExecutorConfig(num_threads=1),
    )
    server = EngineServer(config, UniprocExecutor(config), make_grammar_backend).start().load()

    def wire(**constraint: Any) -> WireParams:
        return WireParams(seed=1, max_tokens=50, structured_output=constraint)

    try:
        async with connected(server.address) as client:
            await client.add("keyword", sampling_params=wire(json_schema='{"type": "array", "uniqueItems": true}'))
            await client.add("syntax", sampling_params=wire(json_schema="{"))
            await client.add("grammar", sampling_params=wire(grammar="root ::= undefined_rule"))
            await client.add("good", sampling_params=wire(choice={"options": ["left", "right"]}))
            await client.until_ended("keyword", "syntax", "grammar", "good")
            for request_id in ("keyword", "syntax", "grammar"):
                assert client.ends[request_id].error.code == "INVALID_ARGUMENT"
                assert client.ends[request_id].error.field.startswith("sampling_params.structured_output")
            assert "uniqueItems" in client.ends["keyword"].error.message
            assert text_of(client.tokens["good"]) in ("left", "right")
    finally:
        server.stop()
