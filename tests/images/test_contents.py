"""Contents and labels of the project's images."""

import json
import re
import stat

from tests.chart.rendering import DEMO, release
from tests.cluster.images.sources import chart_version
from tests.images.container import Image, normalized

COMPILERS = {"cc", "c++", "gcc", "g++", "clang", "clang++", "ld", "make"}
INSTALLERS = {"pip", "pip3", "pipx", "uv", "conda"}
TORCH = {"torch", "triton", "xgrammar"}


def component(image: Image) -> str:
    title: str = image.config["Labels"]["org.opencontainers.image.title"]
    return title.removeprefix("penstock-")


def test_the_user_is_a_number_that_is_not_roots(image: Image):
    """Checks that the user is numeric, because a kubelet with runAsNonRoot cannot resolve user names."""
    security = release(DEMO).pod_spec(component(image))["securityContext"]
    assert image.config["User"] == f"{security['runAsUser']}:{security['runAsGroup']}"


def test_labels_say_what_it_is_and_where_it_comes_from(image: Image):
    labels = {key.removeprefix("org.opencontainers.image."): value for key, value in image.config["Labels"].items()}
    assert labels["title"] in ("penstock-coordinator", "penstock-frontend", "penstock-enginecore")
    assert labels["version"] == chart_version()
    assert re.fullmatch(r"[0-9a-f]{40}", labels["revision"])
    assert labels["licenses"] == "Apache-2.0"
    assert "Penstock" in labels["description"]


def test_ports_are_those_of_the_chart(image: Image):
    ports = release(DEMO).container(component(image))["ports"]
    assert set(image.config["ExposedPorts"]) == {f"{port['containerPort']}/tcp" for port in ports}


def test_nothing_can_be_compiled_or_installed_in_it(image: Image):
    assert not image.programs & (COMPILERS | INSTALLERS)
    assert "pip" not in image.distributions
    done = image.run("python", "-c", "import pip")
    assert "No module named 'pip'" in done.stdout


def test_its_code_belongs_to_root(image: Image):
    """Checks that a service cannot change its code, even if the root file system is writable."""
    for path in (image.root / "opt").rglob("*"):
        status = path.lstat()
        assert (status.st_uid, status.st_gid) == (0, 0), path
        assert path.is_symlink() or not status.st_mode & (stat.S_IWOTH | stat.S_IWGRP), path


def test_torch_is_in_the_engines_image_alone(coordinator: Image, frontend: Image):
    assert not coordinator.distributions & TORCH
    assert not frontend.distributions & TORCH


def test_an_image_holds_its_own_service(image: Image):
    services = {name for name in image.distributions if name.startswith("penstock")}
    assert services == {f"penstock-{component(image)}", "penstock-common", "penstock-protos"}


def test_the_bill_of_materials_names_every_distribution_with_its_version(image: Image):
    bill = json.loads((image.root / "usr/share/penstock/sbom.json").read_text())
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    assert {normalized(component["name"]) for component in bill["components"]} == image.distributions
    assert all(component["version"] for component in bill["components"])
    licensed = [component for component in bill["components"] if component.get("licenses")]
    assert len(licensed) > len(bill["components"]) * 0.9
