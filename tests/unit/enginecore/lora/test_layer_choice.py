"""Layers that a configuration selects, compared with PEFT."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key

from penstock_enginecore.lora.errors import LoraError, LoraReason
from penstock_enginecore.lora.layer_patterns import Patterns, choose_layers
from penstock_enginecore.lora.peft_format import PeftConfig

NAMES = [
    *(f"model.layers.{i}.self_attn.{each}_proj" for i in (0, 1, 10) for each in "qkvo"),
    *(f"model.layers.{i}.mlp.{each}_proj" for i in (0, 1, 10) for each in ("gate", "up", "down")),
    "encoder.h.2.attention.query",
    "query",
    "lm_head",
]
ENDS = st.sampled_from(
    [
        "q_proj",
        "v_proj",
        "self_attn.k_proj",
        "1.mlp.up_proj",
        "model.layers.0.mlp.gate_proj",
        "query",
        "proj",
        "lm_head",
    ]
)
EXPRESSIONS = st.sampled_from(
    [
        r".*_proj",
        r"model\.layers\.\d+\.self_attn\.(q|v)_proj",
        r"lm_head",
        r"(?!lm_head).*",
        r".*\.1\..*",
        r"[a-z_.0]*k_proj",
    ]
)
PATTERNS = st.sampled_from(
    [
        "q_proj",
        "q.proj",
        "^model.layers.0.*",
        "model.layers.0.*",
        "layers.1.self_attn.v_proj",
        "proj",
        r".*\.10\..*",
        "(up|down)_proj",
        "lm_head",
        "up_proj|gate_proj",
        ".query",
        "query$",
    ]
)
SETTINGS = st.fixed_dictionaries(
    {
        "target_modules": st.one_of(EXPRESSIONS, st.lists(ENDS, min_size=1, max_size=4)),
        "exclude_modules": st.one_of(st.none(), EXPRESSIONS, st.lists(ENDS, max_size=2)),
        "layers_to_transform": st.one_of(
            st.none(), st.sampled_from([0, 1, 10]), st.lists(st.sampled_from([0, 1, 2, 10]), max_size=3)
        ),
        "layers_pattern": st.one_of(st.none(), st.sampled_from(["layers", "h", "lay"]), st.just(["h", "layers"])),
    }
)


def config_of(settings: dict[str, Any], **more: Any) -> PeftConfig:
    targets, excluded = settings["target_modules"], settings.get("exclude_modules") or ()
    layers, patterns = settings.get("layers_to_transform"), settings.get("layers_pattern") or ()
    given = {
        "rank": 8,
        "alpha": 8.0,
        "use_rslora": False,
        "rank_pattern": {},
        "alpha_pattern": {},
        "target_modules": targets if isinstance(targets, str) else frozenset(targets),
        "exclude_modules": excluded if isinstance(excluded, str) else frozenset(excluded),
        "layers": None if layers in (None, []) else frozenset([layers] if isinstance(layers, int) else layers),
        "layers_patterns": (patterns,) if isinstance(patterns, str) else tuple(patterns),
        "task_type": "",
        "base_model": "",
    }
    return PeftConfig(**given | more)


@given(SETTINGS)
def test_layers_are_those_that_peft_means(settings: dict[str, Any]) -> None:
    if isinstance(settings["target_modules"], str):
        settings |= {"layers_to_transform": None, "layers_pattern": None}
    if settings["layers_to_transform"] is None:
        settings["layers_pattern"] = None
    theirs = LoraConfig(**settings)
    wanted = [name for name in NAMES if check_target_module_exists(theirs, name)]
    assert list(choose_layers(config_of(settings), NAMES, ())) == wanted


@pytest.mark.slow
@given(
    st.dictionaries(PATTERNS, st.integers(1, 9), max_size=5), st.dictionaries(PATTERNS, st.integers(1, 9), max_size=5)
)
def test_ranks_and_scales_are_those_that_peft_finds(ranks: dict[str, int], alphas: dict[str, int]) -> None:
    settings = {"target_modules": r".*"}
    chosen = choose_layers(config_of(settings, rank_pattern=ranks, alpha_pattern=alphas), NAMES, ())
    for name in NAMES:
        rank = ranks.get(get_pattern_key(list(ranks), name), 8)
        alpha = alphas.get(get_pattern_key(list(alphas), name), 8)
        assert (chosen[name].rank, chosen[name].scale) == (rank, alpha / rank)


@given(st.text("ab._1", min_size=1, max_size=6), st.text("ab._1", min_size=1, max_size=12))
def test_plain_names_end_as_the_expression_says(pattern: str, name: str) -> None:
    wanted = re.match(rf"(.*\.)?({pattern})$", name) is not None
    assert Patterns("file").ends("rank_pattern", pattern, name) == wanted


def test_all_linear_means_what_it_is_told_in_any_case_of_letters() -> None:
    for word in ("all-linear", "All-Linear"):
        assert list(choose_layers(config_of({"target_modules": word}), NAMES, NAMES[:3])) == NAMES[:3]


def test_hundreds_of_patterns_for_hundreds_of_layers_cost_no_expressions() -> None:
    names = [f"model.layers.{i}.mlp.up_proj" for i in range(300)]
    ranks = {name: i + 1 for i, name in enumerate(names)}
    chosen = choose_layers(config_of({"target_modules": ["up_proj"]}, rank_pattern=ranks), names, ())
    assert [layer.rank for layer in chosen.values()] == list(range(1, 301))


def test_time_is_shared_by_all_matches_of_an_adapter() -> None:
    patterns = Patterns("file")
    slow = r"(\w|\.|\w\.)*(\w|\.|\w\w)*(\w|\.|\w\w)*\d"
    with pytest.raises(LoraError, match="takes too long") as caught:
        for name in NAMES * 20:
            patterns.full("target_modules", slow, name)
    assert caught.value.reason == LoraReason.CONFIG
    with pytest.raises(LoraError, match="takes too long"):
        patterns.full("exclude_modules", slow, NAMES[0])


def test_nothing_is_matched_any_more_once_the_time_is_over() -> None:
    patterns = Patterns("file")
    assert patterns.full("exclude_modules", "[a]", "a")
    patterns._left = 0.01
    with pytest.raises(LoraError, match="takes too long"):
        patterns.full("target_modules", r"(\w|\.|\w\.)*(\w|\.|\w\w)*(\w|\.|\w\w)*\d", 3 * NAMES[0])
    with pytest.raises(LoraError, match="takes too long"):
        patterns.full("exclude_modules", "[a]", "a")


@pytest.mark.parametrize(
    "pattern",
    [
        "(q_proj",
        "[a",
        "a{99999999999999999999}",
        "(?P<index>x)",
        "(?R)",
        "(?1)",
        "(*FAIL)",
        r"\p{L}+",
        "(?:q_proj){e<=3}",
        "[[:alpha:]_]+",
        "[a--b]",
        "(?<=a+)b",
        "(" * 2000 + ")" * 2000,
        "(?V1)x",
        "(?f)x",
    ],
)
def test_what_is_no_expression_for_peft_is_none_here(pattern: str) -> None:
    patterns = Patterns("adapter_config.json")
    with pytest.raises(LoraError, match="layers_pattern") as caught:
        patterns.index("layers_pattern", pattern, NAMES[0])
    assert caught.value.reason == LoraReason.CONFIG


@pytest.mark.parametrize("pattern", ["\\", "*", "+q_proj"])
def test_what_is_an_expression_only_behind_others_is_none_on_its_own(pattern: str) -> None:
    with pytest.raises(LoraError, match="not a valid regular expression"):
        Patterns("adapter_config.json").full("target_modules", pattern, NAMES[0])


@pytest.mark.quick("(?>q)_proj")
@pytest.mark.parametrize("pattern", ["", "(|)", "a{,3}q_proj", "^$", "(?i)Q_PROJ$", "(?>q)_proj", "q_proj++"])
def test_unusual_expressions_mean_what_they_mean_for_peft(pattern: str) -> None:
    for name in NAMES:
        assert Patterns("file").full("target_modules", pattern, name) == bool(re.fullmatch(pattern, name))
        wanted = re.match(rf"(.*\.)?({pattern})$", name) if not pattern.startswith("(?i)") else None
        if wanted is not None:
            assert Patterns("file").ends("rank_pattern", pattern, name)
