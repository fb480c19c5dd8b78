"""Settings that models with recurrent layers refuse: by name, with the value and a remedy that works."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from penstock_common.errors import ConfigError
from penstock_enginecore.config import (
    EngineCoreConfig,
    KvTransferConfig,
    ModelConfig,
    SpeculativeConfig,
)
from penstock_enginecore.core.model_info import ModelInfo
from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.states.core.refusals import check_states
from penstock_enginecore.states.core.spec import StateNeeds
from tests.fakes.engines.in_process import build_engine
from tests.fakes.models.tiny_models import save_tiny_model

CPU = torch.device("cpu")
NEEDS = StateNeeds(num_layers=1, slot_bytes=1, row_bytes=1)
RECURRENT = ModelInfo(max_len=100, vocab_size=10, eos_token_ids=frozenset(), states=NEEDS)
ATTENTION = msgspec.structs.replace(RECURRENT, states=None)


def config_of(**sections: Any) -> EngineCoreConfig:
    return EngineCoreConfig(**({"model": ModelConfig(path="m")} | sections))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "kv_transfer.connector is 'p'": ({"kv_transfer": KvTransferConfig(connector="p")}, "''"),
    "speculative.num_speculative_tokens is 16": (
        {"speculative": SpeculativeConfig(method="ngram", num_speculative_tokens=16)},
        "at most 15",
    ),
}


@pytest.mark.parametrize("setting", REFUSED)
def test_a_setting_is_refused_by_name_value_and_remedy(setting: str) -> None:
    sections, remedy = REFUSED[setting]
    config = config_of(**sections)
    with pytest.raises(ConfigError) as e:
        check_states(config, RECURRENT)
    assert str(e.value) == (f"{setting}, but models with recurrent layers do not support it yet; set it to {remedy}")
    check_states(config, ATTENTION)


def test_defaults_and_the_largest_allowed_settings_are_not_refused() -> None:
    check_states(config_of(), RECURRENT)
    check_states(config_of(speculative=SpeculativeConfig(method="ngram", num_speculative_tokens=15)), RECURRENT)
    check_states(config_of(speculative=SpeculativeConfig(num_speculative_tokens=32)), RECURRENT)


def test_every_refusal_is_tested() -> None:
    source = (Path(__file__).parents[4] / "services/enginecore/penstock_enginecore/states/core/refusals.py").read_text()
    named = set(re.findall(r'"((?:[a-z_]+\.)[a-z_]+) is ', source))
    tested = {setting.split(" ")[0] for setting in REFUSED}
    assert named == tested


def test_a_draft_model_with_recurrent_layers_is_refused(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path / "model")
    save_tiny_model("lfm2", tmp_path / "drafter")
    speculative = {"method": "draft_model", "model": str(tmp_path / "drafter")}
    with pytest.raises(
        ModelLoadError,
        match=r"speculative\.model '.*drafter' cannot draft for this model: the checkpoint's layers are recurrent",
    ):
        build_engine(tmp_path / "model", cache={"block_size": 16}, speculative=speculative)
