"""Options and processes of ``penstock serve`` with several models."""

from pathlib import Path
from typing import Any

import pytest

from penstock_client import Model
from penstock_common.errors import ConfigError
from penstock_frontend.config import FrontendConfig
from penstock_local.cli import build_parser
from penstock_local.commands.serve_models import options_of_models
from penstock_local.serving.machine_resources import assign_all
from penstock_local.serving.plan import num_internal_ports, plan
from penstock_local.serving.serve import ready_block
from penstock_local.serving.serve_options import ServeOptions
from penstock_local.serving.supervisor import ProcessSpec
from tests.unit.local.serving.test_plan import read

FILE = """
models:
  - model: org/chat
    engines: 2
    threads_per_engine: 3
  - model: org/embedder
    served_model_name: [small, tiny]
    kv_cache_memory: 64MiB
    set: [engine.scheduler.max_num_seqs=8, frontend.model.tool_parser=hermes]
"""


def parsed(*words: str) -> ServeOptions:
    return options_of_models(build_parser().parse_args(["serve", *words]))


def specs(options: ServeOptions, cores: int = 8) -> dict[str, ProcessSpec]:
    ports = range(20_001, 20_001 + num_internal_ports(options))
    return {spec.name: spec for spec in plan(options, internal_ports=ports, cores=cores)}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "models.yaml"
    path.write_text(FILE, encoding="utf-8")
    return path


def test_each_model_gets_its_engines_and_all_share_the_cores(tmp_path: Path) -> None:
    found = specs(parsed("org/a", "org/b", "--engines", "2", "--device", "cpu"))
    assert list(found) == ["coordinator", "engine-0", "engine-1", "engine-2", "engine-3", "frontend"]
    models = [found[f"engine-{number}"].config["model"]["served_model_name"] for number in range(4)]
    assert models == ["a", "a", "b", "b"]
    assert {spec.env["OMP_NUM_THREADS"] for name, spec in found.items() if name.startswith("engine")} == {"2"}
    frontend = read(FrontendConfig, found["frontend"], tmp_path)
    assert [each.model.name for each in frontend.per_model()] == ["a", "b"]


def test_the_file_has_the_options_of_each_model(file: Path, tmp_path: Path) -> None:
    options = parsed("--models", str(file), "--dtype", "float32", "--set", "engine.scheduler.policy=priority")
    chat, embedder = options.models
    assert (chat.model, chat.engines, chat.dtype) == ("org/chat", 2, "float32")
    assert (embedder.model_name, dict(embedder.aliases), embedder.dtype) == ("small", {"tiny": "small"}, "float32")
    assert embedder.kv_cache_memory == 64 * 2**20
    found = specs(options)
    assert [found[f"engine-{number}"].config["executor"]["num_threads"] for number in range(3)] == [3, 3, 2]
    schedulers = [found[f"engine-{number}"].config["scheduler"] for number in (0, 2)]
    assert schedulers == [{"policy": "priority"}, {"policy": "priority", "max_num_seqs": 8}]
    (further,) = read(FrontendConfig, found["frontend"], tmp_path).models
    assert (further.model.tool_parser, further.model.aliases) == ("hermes", {"tiny": "small"})


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "MODEL is required"),
        (["org/a", "other/a"], "several models have the name 'a'"),
        (["org/a", "org/b", "--served-model-name", "x"], "--served-model-name belongs to one model"),
        (["org/a", "org/b", "--speculative", "ngram"], "--speculative belongs to one model"),
        (["org/a", "org/b", "--data-parallel-size", "2"], "a group needs a penstock serve of its own"),
        (["org/a", "--models", "FILE"], "MODEL org/a and --models are both given"),
        (["--models", "/none"], "the file cannot be read: No such file or directory"),
    ],
)
def test_options_that_several_models_cannot_have_are_refused(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parsed(*words)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "the file must have only the key models"),
        ("models: []", "a list of at least one mapping"),
        ("models: [{engines: 2}]", r"models\[0\] must be a mapping with the key model"),
        ("models: [{model: a, engine: 2}]", "has the key 'engine'; known: .*; did you mean 'engines'"),
        ("models: [{model: a, grpc_port: 2}]", "has the key 'grpc_port'"),
        ("models: [{model: a, engines: many}]", r"models\[0\]: Expected `int`"),
        ("models: [{model: a, engines: 99}]", r"models\[0\]: "),
        ("models: [{model: a, kv_cache_memory: big}]", r"models\[0\].kv_cache_memory: 'big' is not a size"),
        ("models: [{model: a, set: [frontend.log.level=debug]}]", "frontend.log.level, which all models share"),
        ("models: [", "is not valid YAML"),
    ],
)
def test_errors_in_the_file_name_the_entry(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "models.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=said):
        parsed("--models", str(path))


def test_models_on_gpus_get_different_gpus() -> None:
    assert assign_all([(1, 1, "auto")], ["0"]) == [{}]
    visible = "CUDA_VISIBLE_DEVICES"
    given: list[Any] = assign_all([(1, 2, "auto"), (2, 1, "cpu"), (1, 1, "auto")], ["4", "5", "6"])
    assert given == [{visible: "4,5"}, {}, {}, {visible: "6"}]
    with pytest.raises(ConfigError, match="need 2 GPUs, one for each worker, and this machine shows 1"):
        assign_all([(1, 1, "auto"), (1, 1, "cuda")], ["0"])


def test_the_ready_message_names_each_model() -> None:
    options = parsed("org/a", "org/b")
    models = [Model(name=name, max_model_len=64, num_engines=1, capabilities=()) for name in ("a", "b")]
    said = ready_block(options, models, seconds=1.0)
    assert "    model   a, 1 engine, up to 64 tokens\n    model   b, 1 engine, up to 64 tokens\n" in said
    assert "penstock chat --model b" in said
