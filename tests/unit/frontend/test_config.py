"""The frontend's configuration, and the model files that it reads."""

from pathlib import Path

import pytest

from penstock_common.config.loader import load
from penstock_common.errors import ConfigError
from penstock_frontend.config import FrontendConfig, ModelConfig
from penstock_frontend.processing.prompts.tokenizer import load_model_files
from tests.fakes.models import small_tokenizers

GOOD = {"model.path": "org/model", "engines": "[127.0.0.1:50052]"}


def load_config(**overrides: str) -> FrontendConfig:
    values = GOOD | {key.replace("__", "."): value for key, value in overrides.items()}
    return load(FrontendConfig, overrides=values, environ={})


def test_the_served_name_is_the_last_part_of_the_path_unless_given() -> None:
    assert load_config().model.name == "model"
    assert load_config(model__path="/models/demo/").model.name == "demo"
    assert load_config(model__served_model_name="mine").model.name == "mine"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"model__path": ""}, "model.path is required"),
        ({"engines": "[]"}, "coordinator.address or engines is required"),
        ({"engines": "[host]"}, "'host' must be host:port"),
        (
            {"engines": "['fd00::7:50052']"},
            "'fd00::7:50052' must have an IPv6 host in brackets, such as [fd00::7]:50052",
        ),
        ({"ready_without_engines": "true"}, "ready_without_engines is true, but coordinator.address is empty"),
        ({"http__port": "65536"}, "http.port is 65536"),
        ({"server__port": "-1"}, "server.port is -1"),
        ({"metrics__port": "65536"}, "metrics.port is 65536"),
        (
            {"metrics__port": "9100", "auth__metrics": "true", "auth__api_keys": "/keys"},
            "auth.metrics is true, but the listener on metrics.port 9100 requires no credentials",
        ),
        ({"tokenizer_threads": "0"}, "tokenizer_threads is 0"),
        ({"limits__max_requests": "0"}, "limits.max_requests is 0"),
        ({"engine_wait_timeout": "-1"}, "engine_wait_timeout is -1"),
        ({"drain_timeout": "nan"}, "drain_timeout is nan"),
        ({"coordinator__reconnect_max": "0"}, "coordinator.reconnect_max is 0"),
        ({"disaggregation__min_prefill_tokens": "0"}, "disaggregation.min_prefill_tokens is 0; it must be from 1"),
        (
            {"disaggregation__allowed_addresses": "[a, 'b:0']"},
            "disaggregation.allowed_addresses[1] is 'b:0'; it must be host:port",
        ),
        (
            {"disaggregation__connector": "ours"},
            "disaggregation.connector is 'ours', but disaggregation.gateway is false",
        ),
        ({"model__pth": "x"}, "did you mean 'model.path'"),
    ],
)
def test_a_wrong_value_is_named(overrides: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as e:
        load_config(**overrides)
    assert message in str(e.value)


@pytest.mark.parametrize("field", ["server.reuse_port", "http.reuse_port"])
def test_a_port_is_shared_only_where_the_system_can(monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    monkeypatch.delattr("socket.SO_REUSEPORT")
    with pytest.raises(ConfigError, match=f"{field} is true, but this system has no SO_REUSEPORT; set it to false"):
        load_config(**{field: "true"})


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (None, "no such directory"),
        ({"tokenizer.json": "{}"}, "its tokenizer.json cannot be read"),
        ({"generation_config.json": "["}, "generation_config.json cannot be read"),
        ({"generation_config.json": "[]"}, "must contain a JSON object"),
    ],
)
def test_a_model_that_cannot_be_read_is_named(tmp_path: Path, files: dict[str, str] | None, message: str) -> None:
    folder = tmp_path / "model"
    if files is not None:
        small_tokenizers.save_model(folder)
        for name, text in files.items():
            (folder / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_model_files(ModelConfig(path=str(folder)), num_threads=1)


def test_a_model_without_a_generation_config_has_no_defaults(tmp_path: Path) -> None:
    files = load_model_files(ModelConfig(path=str(small_tokenizers.save_model(tmp_path))), num_threads=1)
    assert files.generation_config == {}
    assert files.tokenizer.vocab_size == small_tokenizers.byte_level().get_vocab_size()
