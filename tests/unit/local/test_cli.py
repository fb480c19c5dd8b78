"""The command line itself."""

import subprocess
import sys

import pytest

from penstock_local.cli import main


@pytest.mark.parametrize("command", [[], ["serve"], ["generate"], ["chat"], ["bench"], ["status"], ["scale"], ["demo"]])
def test_help_explains_every_command(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main([*command, "--help"])
    assert exit_info.value.code == 0
    assert "penstock" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("serve", "--engines N Number of engine processes. Each loads the model. (from 1 to 64; default: 1)"),
        ("serve", "--device {auto,cpu,cuda} Device of the engines"),
        ("bench", "--channels N Number of connections to the server. (from 1 to 256; default: 1)"),
        ("bench", "--end-at-eos Let outputs end at the end-of-sequence token"),
    ],
)
def test_help_tells_what_the_options_say_of_themselves(
    command: str, told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert told in " ".join(capsys.readouterr().out.split())


def test_a_size_that_is_none_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "org/name", "--kv-cache-memory", "lots"]) == 2
    assert "--kv-cache-memory: 'lots' is not a size" in capsys.readouterr().err


@pytest.mark.parametrize(
    "module",
    [
        "cli",
        "serving.serve",
        "commands.generate",
        "commands.chat",
        "bench.bench",
        "commands.status",
        "commands.scale",
        "commands.demo",
    ],
)
def test_the_command_imports_neither_torch_nor_transformers(module: str) -> None:
    heavy = {"torch", "transformers", "numpy", "matplotlib"}
    check = f"import sys, penstock_local.{module}; sys.exit(bool({heavy} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", check], check=True)


def test_the_library_is_imported_when_it_is_asked_for() -> None:
    check = (
        "import sys, penstock_local; from penstock_local import SamplingParams; "
        "assert not {'torch', 'grpc'} & set(sys.modules); from penstock_local import LLM; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", check], check=True)


def test_a_name_that_the_library_does_not_have_is_said_so() -> None:
    with pytest.raises(ImportError, match="cannot import name 'LLMs'"):
        from penstock_local import LLMs  # type: ignore[attr-defined]  # noqa: F401


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["serve", "m", "--engine", "2"], "did you mean '--engines'?"),
        (["serve", "m", "--port", "80"], "use --http-port for the OpenAI API and --grpc-port for the gRPC API"),
        (["serve", "m", "--max-num-seqs=8"], "it is a setting: --set engine.scheduler.max_num_seqs=VALUE"),
        (["serve", "m", "--gpu-memory-utilization", "0.5"], "--set engine.cache.memory_utilization=VALUE"),
        (["serve", "m", "--tool-call-parser", "hermes"], "--set frontend.model.tool_parser=VALUE"),
        (["serve", "--model", "m"], "give MODEL without a flag: penstock serve MODEL"),
        (["serve", "m", "--model", "m"], "give MODEL without a flag: penstock serve MODEL"),
        (["serve", "m", "--api-key", "k"], "--set frontend.auth.api_keys=FILE"),
        (["serve", "m", "--enable-auto-tool-choice"], "if the chat template supports tools"),
        (["serve", "m", "--enforce-eager"], "leave it out"),
        (["serve", "m", "-tp", "2"], "use --tensor-parallel-size N"),
        (["serve", "m", "--enable-lora"], "arguments: --enable-lora; load adapters with --lora NAME=PATH"),
        (
            ["serve", "m", "--enable-lora", "--max-loras", "1", "--lora-modules", "a=b"],
            "--enable-lora, --lora-modules: load adapters with --lora NAME=PATH or --lora-directory DIR; "
            "--max-loras: it is a setting: --set engine.lora.max_loras=VALUE",
        ),
        (["serve", "m", "--engine", "2", "--xyzzy"], "arguments: --engine 2 --xyzzy; --engine: did you mean"),
        (["generate", "hi", "--max-token", "3"], "did you mean '--max-tokens'?"),
        (["bench", "--concurency", "3"], "did you mean '--concurrency'?"),
    ],
)
def test_a_flag_that_is_not_there_gets_what_may_have_been_meant(
    command: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(command)
    assert exit_info.value.code == 2
    told = capsys.readouterr().err
    assert said in told
    assert f"usage: penstock {command[0]}" in told


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (
            ["serv", "m"],
            "'serv' is not known; known: serve, generate, transcribe, chat, status, scale, bench, models, pull, lora, batch, "
            "demo; did you mean 'serve'?",
        ),
        (["serve", "m", "--device", "gpu"], "--device: 'gpu' is not known; known: auto, cpu, cuda; GPUs are cuda here"),
        (
            ["serve", "m", "--quantization", "awq"],
            "known: auto, int8, fp8; a quantized checkpoint is recognized by its files",
        ),
        (
            ["serve", "m", "--kv-transfer", "rdma"],
            "--kv-transfer: 'rdma' is not known; known: auto, grpc, shared_memory",
        ),
        (["serve", "m", "--dtype", "fp16"], "--dtype: 'fp16' is not known; known: auto, float32, bfloat16, float16"),
    ],
)
def test_a_word_that_is_not_known_gets_the_nearest(
    command: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(command)
    assert exit_info.value.code == 2
    assert said in capsys.readouterr().err


def test_without_a_command_the_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main([])
    assert exit_info.value.code == 2
    assert "serve a model on this machine" in capsys.readouterr().err
