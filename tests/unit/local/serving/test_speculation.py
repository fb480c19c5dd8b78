"""Speculation flags: the resulting settings, and errors before anything loads."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock_common.errors import ConfigError
from penstock_common.types.sampling import MAX_SPECULATIVE_TOKENS
from penstock_enginecore.config.speculative import SpeculativeConfig
from penstock_local.llm.options import engine_config
from penstock_local.serving import speculation
from penstock_local.serving.plan import plan
from penstock_local.serving.serve_options import ServeOptions


def options(**given: Any) -> ServeOptions:
    return ServeOptions(model="m", **given)


def test_without_flags_nothing_is_drafted() -> None:
    assert options().speculation() == {}


def test_a_method_and_tokens_reach_every_engine() -> None:
    given = options(speculative="suffix", speculative_tokens=8, engines=2)
    engines = [spec for spec in plan(given, internal_ports=[1, 2, 3], cores=2) if spec.module == "penstock_enginecore"]
    assert [spec.config["speculative"] for spec in engines] == [{"method": "suffix", "num_speculative_tokens": 8}] * 2


def test_a_layer_of_the_models_own_checkpoint_needs_no_model() -> None:
    assert options(speculative="mtp", speculative_tokens=2).speculation() == {
        "method": "mtp",
        "num_speculative_tokens": 2,
    }


def test_a_single_setting_goes_over_a_flag() -> None:
    settings = {"engine": {"speculative.num_speculative_tokens": 2}}
    given = options(speculative="ngram", speculative_tokens=8, settings=settings)
    engine = plan(given, internal_ports=[1, 2], cores=1)[1]
    assert engine.config["speculative"] == {"method": "ngram", "num_speculative_tokens": 2}


def test_vllms_object_is_taken_as_it_is() -> None:
    text = json.dumps({"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "revision": None})
    assert options(speculative_config=text).speculation() == {
        "method": "ngram",
        "num_speculative_tokens": 5,
        "prompt_lookup_max": 4,
    }


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"speculative": "ngrm"}, r"--speculative is 'ngrm'; known: .*did you mean 'ngram'"),
        ({"speculative": "draft_model"}, "--speculative is draft_model, which needs --speculative-model"),
        ({"speculative": "eagle3"}, "--speculative is eagle3, which needs --speculative-model"),
        ({"speculative": "ngram", "speculative_model": "x"}, "--speculative-model is x with --speculative ngram"),
        ({"speculative": "mtp", "speculative_model": "x"}, "--speculative-model is x with --speculative mtp; only"),
        ({"speculative_model": "x"}, "--speculative-model is x, but --speculative is not given"),
        ({"speculative_tokens": 4}, "--speculative-tokens is 4, but --speculative is not given"),
        ({"speculative": "ngram", "speculative_tokens": 0}, "--speculative-tokens.*0.*1 to 32"),
        ({"speculative": "ngram", "speculative_tokens": 1000}, "--speculative-tokens.*1000.*1 to 32"),
        ({"speculative_config": "{"}, "--speculative-config is not valid JSON"),
        ({"speculative_config": "[]"}, "--speculative-config must be a JSON object"),
        ({"speculative_config": "{}"}, "--speculative-config.method is not set; it must be one of prediction, ngram"),
        ({"speculative_config": '{"method": "ngarm"}'}, r"method is 'ngarm'; known: .*did you mean 'ngram'"),
        (
            {"speculative_config": '{"method": "ngram", "prompt_lokup_max": 4}'},
            r"--speculative-config has no key 'prompt_lokup_max'.*did you mean 'prompt_lookup_max'.*supported "
            r"keys: method, model",
        ),
        (
            {"speculative_config": '{"method": "suffix", "suffix_decoding_max_cached_requests": 4}'},
            "'suffix_decoding_max_cached_requests': use suffix_decoding_cache_bytes to limit",
        ),
        (
            {"speculative_config": '{"method": "ngram", "num_speculative_tokens": 0}'},
            "speculative.num_speculative_tokens is 0",
        ),
        (
            {"speculative_config": '{"method": "ngram", "num_speculative_tokens": "5"}'},
            "speculative.num_speculative_tokens is '5'",
        ),
        (
            {"speculative_config": '{"method": "draft_model"}'},
            "speculative.method is draft_model, but speculative.model is empty",
        ),
        (
            {"speculative": "ngram", "speculative_config": '{"method": "ngram"}'},
            "--speculative and --speculative-config are both given",
        ),
    ],
)
def test_a_mistake_is_told_before_anything_starts(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        options(**given)


def test_a_model_that_is_not_there_gets_a_suggestion(tmp_path: Path) -> None:
    (tmp_path / "drafter").mkdir()
    with pytest.raises(ConfigError, match=r"speculative.model is .*/draftr: no such directory.*did you mean 'drafter'"):
        speculation.check_drafting_model({"model": str(tmp_path / "draftr")})


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="it has no config.json"):
        speculation.check_drafting_model({"model": str(tmp_path)})


def test_pickled_weights_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match="no weights in safetensors; pytorch_model.bin may contain code"):
        speculation.check_drafting_model({"model": str(tmp_path)})


def test_a_directory_with_both_passes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    speculation.check_drafting_model({"model": str(tmp_path)})


def test_a_program_gives_the_same_object() -> None:
    config = engine_config("m", {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}})
    assert config.speculative == SpeculativeConfig(method="ngram", num_speculative_tokens=3)
    assert engine_config("m", {"speculative_config": None}).speculative == SpeculativeConfig()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("ngram", "speculative_config is 'ngram'; it must be a mapping"),
        ({"method": "ngrams"}, "speculative_config.method is 'ngrams'; known: .*did you mean 'ngram'"),
        ({"method": "ngram", "k": 3}, "speculative_config has no key 'k'"),
        ({"method": "ngram", "num_speculative_tokens": 33}, "speculative.num_speculative_tokens is 33"),
        (
            {"method": "draft_model", "model": "/no/such/place"},
            "speculative.model is /no/such/place: no such directory",
        ),
    ],
)
def test_a_programs_mistake_is_told(given: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine_config("m", {"speculative_config": given})


def test_the_methods_are_those_of_the_engine() -> None:
    for method in speculation.METHODS:
        model = "x" if method in speculation.WITH_MODEL else ""
        config = SpeculativeConfig(method=method, model=model)  # type: ignore[arg-type]
        assert config.has_model == (bool(model) or method == "mtp")


def test_requests_and_engines_have_the_same_limit() -> None:
    SpeculativeConfig(num_speculative_tokens=MAX_SPECULATIVE_TOKENS)
    with pytest.raises(ConfigError, match=str(MAX_SPECULATIVE_TOKENS)):
        SpeculativeConfig(num_speculative_tokens=MAX_SPECULATIVE_TOKENS + 1)
