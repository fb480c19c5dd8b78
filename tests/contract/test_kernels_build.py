"""The build hook of the kernels: with a working compiler, with a broken one, and without a compiler."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[2] / "services" / "enginecore"


@pytest.fixture
def hook(tmp_path: Path) -> Any:
    """Return the build hook for a new folder with one source that compiles quickly."""
    spec = importlib.util.spec_from_file_location("enginecore_hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "one.cpp").write_text("int one() { return PENSTOCK_LANES; }\n")
    (tmp_path / "penstock_enginecore" / "native").mkdir(parents=True)
    warnings: list[str] = []
    app = SimpleNamespace(display_warning=warnings.append)
    made = module.CompileKernels(str(tmp_path), {}, None, None, str(tmp_path), "wheel", app)
    made.warnings = warnings
    return made


def build(hook: Any) -> dict[str, Any]:
    data: dict[str, Any] = {"artifacts": []}
    hook.initialize("standard", data)
    return data


def test_the_libraries_go_into_a_wheel_for_this_platform_and_any_python(hook: Any) -> None:
    data = build(hook)
    assert hook.warnings == []
    assert "penstock_enginecore/native/kernels_baseline.so" in data["artifacts"]
    assert data["pure_python"] is False
    assert data["tag"].startswith("py3-none-")
    for artifact in data["artifacts"]:
        assert (Path(hook.root) / artifact).is_file()


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_without_a_working_compiler_the_build_has_no_kernels_and_says_so(
    hook: Any, compiler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.delenv("PENSTOCK_REQUIRE_KERNELS", raising=False)
    assert build(hook) == {"artifacts": []}
    [warning] = hook.warnings
    assert "the package is built without CPU kernels, so models will run slower" in warning
    assert compiler in warning
    monkeypatch.setenv("PENSTOCK_REQUIRE_KERNELS", "1")
    with pytest.raises(RuntimeError, match="the CPU kernels cannot be compiled"):
        build(hook)


def test_a_source_that_does_not_compile_is_an_error_with_the_compilers_words(
    hook: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_REQUIRE_KERNELS", "1")
    (Path(hook.root) / "csrc" / "one.cpp").write_text("int one( {\n")
    with pytest.raises(RuntimeError, match="error"):
        build(hook)


def test_a_source_distribution_carries_the_sources_and_compiles_nothing(hook: Any) -> None:
    hook._BuildHookInterface__target_name = "sdist"
    assert build(hook) == {"artifacts": []}
