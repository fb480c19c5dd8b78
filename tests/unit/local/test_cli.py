"""The command line itself."""

import subprocess
import sys

import pytest

from penstock_local.cli import main


@pytest.mark.parametrize("command", [[], ["serve"], ["generate"], ["chat"], ["bench"], ["status"], ["demo"]])
def test_help_explains_every_command(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main([*command, "--help"])
    assert exit_info.value.code == 0
    assert "penstock" in capsys.readouterr().out


def test_a_size_that_is_none_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "org/name", "--kv-cache-memory", "lots"]) == 2
    assert "--kv-cache-memory: 'lots' is not a size" in capsys.readouterr().err


@pytest.mark.parametrize("module", ["cli", "serve", "generate", "chat", "bench.bench", "status", "demo"])
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
