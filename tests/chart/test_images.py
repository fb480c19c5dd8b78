"""The Dockerfiles, as far as they can be checked without building them."""

import fnmatch
import importlib.util
import json
import re
import tomllib
from pathlib import Path

import pytest

from tests.chart.rendering import DEMO, SERVICES, release

ROOT = Path(__file__).resolve().parents[2]


def instructions(service: str) -> list[tuple[str, str]]:
    """The Dockerfile's instructions with continuation lines joined and comments dropped."""
    text = (ROOT / "services" / service / "Dockerfile").read_text(encoding="utf-8")
    text = re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    split = (line.split(maxsplit=1) for line in text.splitlines() if line.strip())
    return [(name, " ".join(rest.split())) for name, rest in split]


def copied(service: str) -> list[str]:
    """What is copied out of the repository."""
    lines = [rest for name, rest in instructions(service) if name == "COPY" and not rest.startswith("--from")]
    return [source for line in lines for source in line.split()[:-1]]


def ignored(path: str) -> bool:
    """Whether .dockerignore keeps ``path`` out of the build; the last pattern that matches decides."""
    verdict = False
    for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines():
        if not line or line.startswith("#"):
            continue
        pattern = line.removeprefix("!").removeprefix("**/")
        parents = [str(p) for p in (Path(path), *Path(path).parents) if str(p) != "."]
        names = Path(path).parts if "**/" in line else []
        if any(fnmatch.fnmatch(candidate, pattern) for candidate in (*parents, *names)):
            verdict = not line.startswith("!")
    return verdict


@pytest.mark.parametrize("service", SERVICES)
def test_everything_that_is_copied_is_there_and_not_ignored(service: str):
    for source in copied(service):
        assert (ROOT / source).exists(), source
        assert not ignored(source), source


def test_the_build_gets_nothing_else():
    for path in ("README.md", "tests/chart", ".git/config", "examples/clients", "services/common/x/__pycache__/a.pyc"):
        assert ignored(path), path
    assert not ignored("services/common/penstock_common/config.py")


@pytest.mark.parametrize("service", SERVICES)
def test_an_image_holds_its_own_service_and_what_that_depends_on(service: str):
    built = {source for source in copied(service) if (ROOT / source / "pyproject.toml").exists()}
    assert built == {"protos", "services/common", f"services/{service}"}
    project = tomllib.loads((ROOT / "services" / service / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    own = {re.split(r"[<>=!~ ]", name)[0] for name in project["dependencies"]}
    assert {name for name in own if name.startswith("penstock")} <= {"penstock-protos", "penstock-common"}
    (build,) = [rest for name, rest in instructions(service) if name == "RUN" and "pip wheel" in rest]
    for source in built:
        assert f"./{source}" in build
    assert "--constraint constraints.txt" in build


@pytest.mark.parametrize("service", SERVICES)
def test_the_entry_point_is_a_module_of_the_service(service: str):
    (entry,) = [json.loads(rest) for name, rest in instructions(service) if name == "ENTRYPOINT"]
    assert entry == ["tini", "--", "python", "-m", f"penstock_{service}"]
    assert importlib.util.find_spec(f"penstock_{service}.__main__") is not None


@pytest.mark.parametrize("service", SERVICES)
def test_images_run_as_the_user_the_chart_expects(service: str):
    security = release(DEMO).pod_spec(service)["securityContext"]
    (user,) = [rest for name, rest in instructions(service) if name == "USER"]
    assert user == f"{security['runAsUser']}:{security['runAsGroup']}"


@pytest.mark.parametrize("service", SERVICES)
def test_images_expose_the_ports_the_chart_uses(service: str):
    (exposed,) = [rest for name, rest in instructions(service) if name == "EXPOSE"]
    ports = [str(port["containerPort"]) for port in release(DEMO).container(service)["ports"]]
    assert exposed.split() == ports


@pytest.mark.parametrize("service", SERVICES)
def test_the_base_image_is_pinned_and_no_package_index_is_named(service: str):
    (base,) = [rest for name, rest in instructions(service) if name == "ARG" and rest.startswith("PYTHON_IMAGE=")]
    assert re.fullmatch(r"PYTHON_IMAGE=python:3\.11-slim-\w+", base)
    assert [rest.split()[0] for name, rest in instructions(service) if name == "FROM"] == ["${PYTHON_IMAGE}"] * 2
    assert "://" not in (ROOT / "services" / service / "Dockerfile").read_text(encoding="utf-8")


def test_a_frontend_image_with_torch_does_not_build():
    assert any("find_spec('torch')" in rest for name, rest in instructions("frontend") if name == "RUN")
    assert not any("find_spec('torch')" in rest for name, rest in instructions("enginecore") if name == "RUN")


@pytest.mark.parametrize("service", ["frontend", "enginecore"])
def test_the_demo_model_is_where_the_cpu_profile_looks_for_it(service: str):
    destination = release(DEMO).config(service)["model"]["path"]
    assert ("COPY", f"examples/demo_model/penstock-tiny {destination}") in instructions(service)


def test_where_torch_comes_from_is_the_builders_choice():
    engine = instructions("enginecore")
    assert ("ARG", 'TORCH_INDEX_URL=""') in engine
    assert any("${TORCH_INDEX_URL:+--index-url" in rest for name, rest in engine if name == "RUN")
    assert not any(
        "TORCH_INDEX_URL" in rest for service in ("frontend", "coordinator") for _, rest in instructions(service)
    )
