"""Every drafter on real models: the same tokens as without a drafter, and fewer steps if the drafts are good."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock_common.types.request import EngineCoreRequest
from penstock_common.types.sampling import SamplingParams, StructuredOutput
from penstock_enginecore.core.engine_core import EngineCore
from penstock_enginecore.models.errors import ModelLoadError
from tests.fakes.engines.in_process import Run, build_engine, generate
from tests.fakes.models.tiny_models import VOCAB_SIZE, save_tiny_model

DEMO = Path("examples/demo_model/penstock-tiny")
DRAFTER = Path("examples/demo_model/penstock-tiny-draft")
CACHE = {"block_size": 16, "num_blocks": 256}
SIZES = {"hidden_size": 64, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    torch.set_num_threads(1)
    paths = {}
    for name, architecture, seed in (("model", "llama", 0), ("other", "llama", 1), ("windows", "gemma3", 2)):
        paths[name] = tmp_path_factory.mktemp(name)
        save_tiny_model(architecture, paths[name], seed=seed, **SIZES)
    return paths


def requests(temperature: float) -> list[tuple[str, list[int], SamplingParams]]:
    generator = torch.Generator().manual_seed(5)
    made = []
    for number, length in enumerate((1, 5, 17, 40, 90, 33)):
        prompt = torch.randint(1, VOCAB_SIZE, (length,), generator=generator).tolist()
        params = SamplingParams(temperature=temperature, seed=number, max_tokens=30, top_k=40 if number == 3 else 0)
        made.append((f"r{number}", prompt, params))
    return made


def engine_of(path: Path, speculative: dict[str, Any] | None = None, **sections: Any) -> EngineCore:
    return build_engine(path, cache={**CACHE, **sections.pop("cache", {})}, speculative=speculative, **sections)


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"scheduler": {"max_num_batched_tokens": 24}},
    "few blocks": {"cache": {"num_blocks": 16, "enable_prefix_caching": False}, "model": {"max_model_len": 128}},
    "asynchronous": {"scheduler": {"async_scheduling": True}},
}


@pytest.mark.each_value
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("method", ["ngram", "suffix", "itself", "other", "windows"])
def test_tokens_are_those_without(models: dict[str, Path], method: str, setting: str, temperature: float) -> None:
    speculative: dict[str, Any] = {"method": method, "adaptive": False, "num_speculative_tokens": 4}
    if method in ("itself", "other", "windows"):
        path = models["model" if method == "itself" else method]
        speculative |= {"method": "draft_model", "model": str(path), "draft_sampling": "coupled"}
    if (method, setting) == ("windows", "few blocks"):
        pytest.skip("two groups of layers need more blocks")
    sections = SETTINGS[setting]
    expected = generate(engine_of(models["model"], **sections), requests(temperature)).tokens
    engine = engine_of(models["model"], speculative, **sections)
    for _ in range(2):  # the second run has cached prefixes and earlier outputs to draft from
        run = generate(engine, requests(temperature))
        assert run.tokens == expected
    assert not engine.scheduler.drafter_failure
    counts = run.stats.spec_decoding_stats
    if method == "itself":
        # The drafter samples as the model does. Only filters and the ends of requests cause rejected drafts.
        assert counts.num_accepted_tokens > 0.9 * counts.num_draft_tokens
    if setting == "few blocks":
        assert run.stats.num_preemptions > 0


def expect_the_same_behind_sleep(engine: EngineCore) -> None:
    """Check that tokens are the same after sleep at either level, once weights and cache are restored."""
    expected = generate(engine, requests(0.0)).tokens
    for level in (1, 2):
        engine.finish_steps()
        engine.scheduler.preempt_all()
        engine.scheduler.reset_prefix_cache()
        engine.executor.collective_rpc("sleep", [level])
        engine.executor.collective_rpc("wake_up", [["weights", "kv_cache"]])
        assert generate(engine, requests(0.0)).tokens == expected


def test_a_draft_model_is_slept_on_and_woken(models: dict[str, Path]) -> None:
    engine = engine_of(models["model"], {"method": "draft_model", "model": str(models["model"])})
    expect_the_same_behind_sleep(engine)


@pytest.mark.slow
def test_workers_in_processes_draft_as_one_does(models: dict[str, Path]) -> None:
    expected = generate(engine_of(models["model"]), requests(0.8)).tokens
    engine = engine_of(
        models["model"],
        {"method": "draft_model", "model": str(models["model"]), "adaptive": False},
        executor={"kind": "multiproc", "tensor_parallel_size": 2},
    )
    try:
        run = generate(engine, requests(0.8))
        assert run.tokens == expected
        assert run.stats.spec_decoding_stats.num_accepted_tokens > 20
    finally:
        engine.shutdown()


def test_another_vocabulary_is_refused_with_the_first_token_that_differs(tmp_path: Path) -> None:
    shutil.copytree(DRAFTER, tmp_path, dirs_exist_ok=True)
    described = json.loads((tmp_path / "tokenizer.json").read_text())
    text = next(text for text, token_id in described["model"]["vocab"].items() if token_id == 700)
    del described["model"]["vocab"][text]
    described["model"]["vocab"][f"{text}?"] = 700
    described["model"]["merges"] = []
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    with pytest.raises(
        ModelLoadError, match=r"speculative.model is .*, but its token 700 is '.*\?' and the model's is"
    ):
        engine_of(DEMO, {"method": "draft_model", "model": str(tmp_path)})


def test_what_cannot_be_read_is_refused_by_the_settings_name(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"speculative.model .* cannot draft for this model"):
        engine_of(DEMO, {"method": "draft_model", "model": str(tmp_path)})


SCHEMAS = (
    '{"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99}},'
    ' "required": ["name", "age"], "additionalProperties": false}',
    '{"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 3, "maxItems": 3}',
    '{"type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"], "additionalProperties": false}',
)


def constrained(temperature: float) -> list[tuple[str, list[int], SamplingParams]]:
    return [
        (
            f"r{number}",
            [10 + number, 20, 30],
            SamplingParams(
                temperature=temperature,
                seed=number,
                max_tokens=48,
                structured_output=StructuredOutput(json_schema=SCHEMAS[number % len(SCHEMAS)]),
            ),
        )
        for number in range(9)
    ]


@pytest.fixture(scope="module")
def without() -> dict[float, Run]:
    """Return runs of constrained requests without drafts, by temperature.

    The fixture has module scope because grammar processes take seconds to start.
    """
    engine = engine_of(DEMO)
    try:
        return {temperature: generate(engine, constrained(temperature)) for temperature in (0.0, 0.9)}
    finally:
        engine.shutdown()


@pytest.mark.quick("ngram")
@pytest.mark.parametrize("method", ["prediction", "ngram", "draft_model"])
def test_constrained_requests_get_the_tokens_that_they_get_without(method: str, without: dict[float, Run]) -> None:
    engine = engine_of(
        DEMO,
        {"method": method, "num_speculative_tokens": 6} | ({"model": str(DRAFTER)} if method == "draft_model" else {}),
    )
    num_accepted = 0
    try:
        for temperature, expected in without.items():
            found = generate(engine, constrained(temperature))
            assert found.tokens == expected.tokens
            assert found.finish_reasons == expected.finish_reasons
            assert found.stats.spec_decoding_stats.num_accepted_tokens > num_accepted
            num_accepted = found.stats.spec_decoding_stats.num_accepted_tokens
    finally:
        engine.shutdown()


def test_a_prediction_is_drafted_and_counted() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    expected = generate(engine_of(DEMO), [("r", [10, 20, 30], params)]).tokens["r"]
    engine = engine_of(DEMO, {"method": "prediction", "adaptive": False})
    request = EngineCoreRequest(
        request_id="r", prompt_token_ids=[10, 20, 30], sampling_params=params, prediction_token_ids=expected
    )
    engine.add(engine.preprocess("c", request))
    tokens: list[int] = []
    while engine.has_requests:
        for outputs in engine.step(lambda: None).values():
            for output in outputs.outputs:
                tokens += output.new_token_ids
                stats = output.spec_decoding_stats
    assert tokens == expected
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 40
