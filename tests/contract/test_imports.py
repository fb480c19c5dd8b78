"""The import rules of the architecture, read from the syntax trees of every module."""

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SERVICES = ROOT / "services"
SERVICE_PACKAGES = {"penstock_frontend", "penstock_enginecore", "penstock_coordinator"}


def modules(package: str) -> Iterator[Path]:
    directory = next(SERVICES.glob(f"*/{package}"))
    files = sorted(directory.rglob("*.py"))
    assert files, f"no module found in {directory}"
    yield from files


@functools.cache
def imported(path: Path) -> set[str]:
    """Return the names of all modules that the file imports, at any place in the file."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module or "")
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def offenders(paths: Iterator[Path], *forbidden: str) -> list[str]:
    return [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in paths
        for name in sorted(imported(path))
        if any(name == bad or name.startswith(bad + ".") for bad in forbidden)
    ]


def modules_of_core() -> Iterator[Path]:
    for path in modules("penstock_enginecore"):
        if "core" in path.parts[path.parts.index("penstock_enginecore") + 1 :]:
            yield path


def test_the_engines_core_imports_neither_torch_nor_grpc_nor_generated_stubs() -> None:
    forbidden = ("torch", "transformers", "grpc", "penstock", "google.protobuf", "penstock_common.rpc")
    assert offenders(modules_of_core(), *forbidden) == []


def test_the_engines_core_has_no_files_signals_sockets_or_processes() -> None:
    forbidden = ("os", "pathlib", "shutil", "tempfile", "signal", "socket", "subprocess", "multiprocessing", "asyncio")
    assert offenders(modules_of_core(), *forbidden) == []


def test_the_engines_core_imports_nothing_of_the_engine_but_its_settings() -> None:
    package = SERVICES / "enginecore/penstock_enginecore"
    rooms = {path.stem for path in package.iterdir() if path.is_dir() or path.suffix == ".py"} - {"core", "config"}
    forbidden = tuple(f"penstock_enginecore.{room}" for room in rooms)
    pure = tuple(f"penstock_enginecore.{room}.core" for room in rooms)
    outside = [
        line for line in offenders(modules_of_core(), *forbidden) if not line.split(" imports ")[1].startswith(pure)
    ]
    assert outside == []


@pytest.mark.parametrize("package", ["penstock_frontend", "penstock_coordinator", "penstock_common", "penstock_local"])
def test_only_the_engine_imports_torch(package: str) -> None:
    assert offenders(modules(package), "torch") == []


def test_llm_knows_only_the_doors_of_the_frontend() -> None:
    doors = {
        f"penstock_frontend.{door}"
        for door in (
            "app.assembly",
            "app.openai_calls",
            "call_types",
            "calls.scoring",
            "config",
            "in_process_media",
            "interfaces",
            "speech.formats",
            "speech.types",
        )
    }
    used = {
        name for path in modules("penstock_local") for name in imported(path) if name.startswith("penstock_frontend")
    }
    above = {door.rpartition(".")[0] for door in doors}
    known = tuple(f"{door}." for door in doors)
    assert {name for name in used - above if not f"{name}.".startswith(known)} == set()


def test_an_engines_port_answers_before_torch_is_imported() -> None:
    check = (
        "import sys, unittest.mock, penstock_enginecore.__main__ as main\n"
        "main.Children = unittest.mock.Mock()\n"
        "main.run = lambda *parts: print('torch' in sys.modules)\n"
        "sys.argv = ['penstock-enginecore', '--model.path', 'm']\n"
        "sys.exit(main.main())\n"
    )
    ran = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=120)
    assert ran.stdout == "False\n", ran.stdout + ran.stderr


@pytest.mark.parametrize("package", sorted(SERVICE_PACKAGES | {"penstock_common", "penstock_local"}))
def test_generated_messages_live_in_rpc_and_api_packages_only(package: str) -> None:
    elsewhere = (path for path in modules(package) if not {"rpc", "api"} & set(path.parts))
    assert offenders(elsewhere, "penstock", "google.protobuf", "google.rpc", "smg_grpc_proto") == []


@pytest.mark.parametrize("package", sorted(SERVICE_PACKAGES))
def test_no_service_imports_another(package: str) -> None:
    others = SERVICE_PACKAGES - {package} | {"penstock_local"}
    assert offenders(modules(package), *others) == []


def test_common_imports_no_service() -> None:
    assert offenders(modules("penstock_common"), *SERVICE_PACKAGES, "penstock_local", "torch", "transformers") == []


def test_the_client_needs_nothing_else_of_the_project() -> None:
    others = SERVICE_PACKAGES | {"penstock_common", "penstock_local"}
    assert offenders(modules("penstock_client"), *others, "google.rpc") == []


def test_the_clients_modules_do_not_import_the_package_that_gathers_them() -> None:
    inside = (path for path in modules("penstock_client") if path.name != "__init__.py")
    assert [str(path) for path in inside if "penstock_client" in imported(path)] == []


@pytest.mark.parametrize("package", sorted(SERVICE_PACKAGES | {"penstock_common", "penstock_local"}))
def test_kubernetes_is_imported_in_the_coordinators_one_module_alone(package: str) -> None:
    elsewhere = (path for path in modules(package) if not str(path).endswith("penstock_coordinator/kubernetes/api.py"))
    assert offenders(elsewhere, "lightkube") == []


@pytest.mark.parametrize("package", sorted(SERVICE_PACKAGES | {"penstock_common", "penstock_local"}))
def test_servers_of_others_are_called_over_http_in_two_modules_alone(package: str) -> None:
    callers = ("penstock_coordinator/kubernetes/api.py", "penstock_local/batch/backend.py")
    elsewhere = (path for path in modules(package) if not str(path).endswith(callers))
    assert offenders(elsewhere, "httpx2") == []


@pytest.mark.parametrize("package", sorted(SERVICE_PACKAGES | {"penstock_common", "penstock_local"}))
def test_opentelemetry_is_imported_in_one_module_alone(package: str) -> None:
    elsewhere = (path for path in modules(package) if path.name != "otel.py" or package != "penstock_common")
    assert offenders(elsewhere, "opentelemetry") == []


def test_services_that_make_no_traces_do_not_load_opentelemetry() -> None:
    check = (
        "import sys, penstock_frontend.app.app, penstock_enginecore.app, penstock_coordinator.app\n"
        "from penstock_common.config.sections import ServerConfig, TracingConfig\n"
        "from penstock_common.observability.tracer import make_tracer\n"
        "from penstock_coordinator.app import Coordinator\n"
        "from penstock_coordinator.config import CoordinatorConfig\n"
        "from penstock_enginecore.config import EngineCoreConfig, ModelConfig\n"
        "from penstock_enginecore.rpc.io_thread import IoThread\n"
        "Coordinator(CoordinatorConfig())\n"
        "io = IoThread(EngineCoreConfig(model=ModelConfig(path='m'), server=ServerConfig(host='127.0.0.1')))\n"
        "io.start()\n"
        "io.stop()\n"
        "assert make_tracer(TracingConfig(), service='frontend', instance='') is None\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])\n"
    )
    run = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=120)
    assert run.stdout.splitlines()[-1:] == ["[]"], run.stdout + run.stderr
