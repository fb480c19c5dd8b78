"""The Dockerfile, as far as it can be checked without a build: the contents of each service's image, stage by stage."""

import fnmatch
import importlib.util
import json
import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from charts import lint
from charts.image_tag import image_tag
from tests.chart.rendering import DEMO, HUB, SERVICES, VALUE_SETS, release

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "Dockerfile"
INSTALL = "pip --python /opt/penstock/venv/bin/python install"


class Stage:
    """One stage: its base and its instructions."""

    def __init__(self, base: str) -> None:
        self.base = base
        self.instructions: list[tuple[str, str]] = []


def stages() -> dict[str, Stage]:
    """Return the stages by name, with continuation lines joined and comments dropped; "" is the text before the first
    stage.
    """
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILE.read_text(encoding="utf-8"), flags=re.MULTILINE).replace("\\\n", " ")
    found = {"": Stage("")}
    name = ""
    for word, rest in (line.split(maxsplit=1) for line in text.splitlines() if line.strip()):
        if word == "FROM":
            base, name = rest.split(" AS ")
            found[name] = Stage(base)
        else:
            found[name].instructions.append((word, " ".join(rest.split())))
    return found


def in_image(service: str) -> list[str]:
    """Return the stages of the image itself: its own stage and the stages that it derives from."""
    names = [service]
    while (base := stages()[names[0]].base) in stages():
        names.insert(0, base)
    return names


def behind(service: str) -> list[str]:
    """Return all stages that an image needs, including stages from which it only copies."""
    names: list[str] = []

    def add(name: str) -> None:
        stage = stages()[name]
        origins = [
            m[1] for word, rest in stage.instructions if word == "COPY" and (m := re.match(r"--from=(\S+)", rest))
        ]
        for needed in (stage.base, *origins):
            if needed in stages() and needed not in names:
                add(needed)
        names.append(name)

    add(service)
    return names


def instructions(service: str) -> list[tuple[str, str]]:
    """Return all instructions that build the image, in the order of execution."""
    return [instruction for name in behind(service) for instruction in stages()[name].instructions]


def copied(service: str) -> list[str]:
    """Return the sources of the COPY instructions that copy from the repository."""
    lines = [rest for name, rest in instructions(service) if name == "COPY" and not rest.startswith("--from")]
    return [source for line in lines for source in line.split()[:-1]]


def ignored(path: str) -> bool:
    """Return whether .dockerignore excludes ``path`` from the build; the last matching pattern decides."""
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
    assert not ignored("services/common/penstock_common/errors.py")


@pytest.mark.parametrize("service", SERVICES)
def test_an_image_holds_its_own_service_and_what_that_depends_on(service: str):
    built = {source for source in copied(service) if (ROOT / source / "pyproject.toml").exists()}
    assert built == {"protos", "services/common", f"services/{service}"}
    project = tomllib.loads((ROOT / "services" / service / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    own = {re.split(r"[<>=!~ ]", name)[0] for name in project["dependencies"]}
    assert {name for name in own if name.startswith("penstock")} <= {"penstock-protos", "penstock-common"}
    wheels = [rest for name, rest in instructions(service) if name == "RUN" and "pip wheel" in rest]
    for source in built:
        assert any(f"./{source}" in rest.split() for rest in wheels), source
    assert f"{INSTALL} --constraint constraints.txt /wheels/*.whl" in wheels[-1]
    assert "wheels" in behind(service)


@pytest.mark.parametrize("service", SERVICES)
def test_images_share_a_base_and_take_the_environment_from_their_own_build(service: str):
    assert in_image(service) == ["runtime", service]
    copies = [rest for name, rest in stages()[service].instructions if name == "COPY" and rest.startswith("--from")]
    # The stage that compiled the kernels with the image's environment.
    kernels = ["--from=kernels /opt/penstock/kernels /opt/penstock/kernels"]
    assert copies == [
        f"--from={service}-build /opt/penstock/sbom.json /usr/share/penstock/sbom.json",
        f"--from={service}-build /opt/penstock/venv /opt/penstock/venv",
        *(kernels if service == "enginecore" else []),
    ]


@pytest.mark.parametrize("service", SERVICES)
def test_an_image_says_what_it_is_and_what_it_holds(service: str):
    labels = " ".join(
        rest for stage in in_image(service) for name, rest in stages()[stage].instructions if name == "LABEL"
    )
    assert f"org.opencontainers.image.title=penstock-{service} " in labels
    assert "org.opencontainers.image.licenses=Apache-2.0" in labels
    assert re.search(r'org\.opencontainers\.image\.description="[^"]{20,}"', labels)
    (written,) = [rest for name, rest in instructions(service) if name == "RUN" and "cyclonedx-py" in rest.split()]
    assert written.index(INSTALL) < written.index("cyclonedx-py environment")
    assert "--output-file /opt/penstock/sbom.json /opt/penstock/venv/bin/python" in written


@pytest.mark.parametrize("service", SERVICES)
def test_the_services_environment_has_no_pip(service: str):
    made = [rest for name, rest in instructions(service) if name == "RUN" and "-m venv" in rest]
    assert made == ["python -m venv /opt/build && python -m venv --without-pip /opt/penstock/venv"]
    (base,) = [rest for name, rest in stages()["runtime"].instructions if name == "RUN"]
    assert "/usr/local/bin/pip*" in base


def test_builders_of_all_stages_before_the_target_build_torch_only_for_the_engine():
    names = [name for name in stages() if name]
    assert names.index("frontend") < names.index("torch")
    assert names.index("coordinator") < names.index("torch")


def test_packages_are_kept_for_the_next_build_and_not_in_layers():
    for name, stage in stages().items():
        for word, rest in stage.instructions:
            if word == "RUN" and re.search(r"\bpip (--python \S+ )?(wheel|install)\b", rest):
                assert rest.startswith("--mount=type=cache,target=/root/.cache/pip "), (name, rest)


def test_the_common_part_of_all_images_is_written_once():
    text = DOCKERFILE.read_text(encoding="utf-8")
    for part in (
        "python:3.11",
        "useradd",
        "USER ",
        "tini \\\n",
        "python -m venv --without-pip",
        "install --constraint constraints.txt cyclonedx-bom",
        "PYTHONUNBUFFERED",
    ):
        assert text.count(part) == 1, part


def test_every_stage_that_uses_pip_can_be_given_a_package_index():
    for name, stage in stages().items():
        uses_pip = any(
            word == "RUN" and re.search(r"\bpip (--python \S+ )?(wheel|install)\b", rest)
            for word, rest in stage.instructions
        )
        assert uses_pip == (("ARG", "PIP_INDEX_URL") in stage.instructions), name


@pytest.mark.parametrize("service", SERVICES)
def test_the_entry_point_is_a_module_of_the_service(service: str):
    (entry,) = [json.loads(rest) for name, rest in instructions(service) if name == "ENTRYPOINT"]
    assert entry == ["tini", "--", "python", "-m", f"penstock_{service}"]
    assert importlib.util.find_spec(f"penstock_{service}.__main__") is not None


@pytest.mark.parametrize("service", SERVICES)
def test_images_run_as_the_user_the_chart_expects(service: str):
    security = release(DEMO).pod_spec(service)["securityContext"]
    (user,) = [rest for stage in in_image(service) for name, rest in stages()[stage].instructions if name == "USER"]
    assert user == f"{security['runAsUser']}:{security['runAsGroup']}"


@pytest.mark.parametrize("service", SERVICES)
def test_images_expose_the_ports_the_chart_uses(service: str):
    (exposed,) = [rest for name, rest in instructions(service) if name == "EXPOSE"]
    ports = [str(port["containerPort"]) for port in release(DEMO).container(service)["ports"]]
    assert exposed.split() == ports


def test_the_base_image_is_pinned_and_no_package_index_is_named():
    (base,) = [rest for name, rest in stages()[""].instructions if name == "ARG"]
    assert re.fullmatch(r"PYTHON_IMAGE=python:3\.11-slim-\w+", base)
    assert {stage.base for stage in stages().values()} - stages().keys() == {"${PYTHON_IMAGE}"}
    # The only address is Debian's mirror, which DEBIAN_MIRROR replaces.
    assert "://" not in DOCKERFILE.read_text(encoding="utf-8").replace("http://deb.debian.org", "")


def test_a_frontend_image_with_torch_does_not_build():
    checks = [
        i for i, (name, rest) in enumerate(instructions("frontend")) if name == "RUN" and "find_spec('torch')" in rest
    ]
    assert len(checks) == 1
    assert ("COPY", "--from=frontend-build /opt/penstock/venv /opt/penstock/venv") in instructions("frontend")[
        : checks[0]
    ]
    assert not any(
        "torch" in rest for stage in ("build", "wheels", "frontend-build") for _, rest in stages()[stage].instructions
    )
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


@pytest.mark.parametrize(("device", "values"), [("cpu", DEMO), ("cuda", HUB)])
def test_make_images_gives_them_the_names_that_the_chart_looks_for(device: str, values: str):
    command = ["make", "--dry-run", "images", f"DEVICE={device}", "REGISTRY=registry.test/team", "IMAGE_BUILDER=docker"]
    said = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    built = dict(re.findall(r"docker build --target (\S+) --tag (\S+)", said))
    rendered = release(values, "image.registry=registry.test/team", f"image.tag={image_tag(ROOT)}")
    assert built == {service: rendered.container(service)["image"] for service in SERVICES}


def test_make_images_passes_on_what_is_set_and_says_where_the_images_come_from():
    given = {"PYTHON_IMAGE": "base:1", "PIP_INDEX_URL": "pip.test/simple", "SOURCE": "code.test/penstock"}
    command = ["make", "--dry-run", "image-frontend", *(f"{name}={value}" for name, value in given.items())]
    said = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert '--build-arg PYTHON_IMAGE="base:1" --build-arg PIP_INDEX_URL="pip.test/simple"' in said
    assert "TORCH_INDEX_URL" not in said
    assert "--label org.opencontainers.image.source=code.test/penstock" in said
    assert re.search(r"--label org\.opencontainers\.image\.revision=[0-9a-f]{40}(-dirty)? ", said)


def test_stages_with_debian_packages_accept_a_mirror_and_leave_none_in_an_image():
    found = 0
    for name, stage in stages().items():
        for word, rest in stage.instructions:
            if word != "RUN" or "apt-get" not in rest:
                continue
            found += 1
            assert ("ARG", "DEBIAN_MIRROR") in stage.instructions, name
            assert rest.index("s|http://deb.debian.org|$DEBIAN_MIRROR|") < rest.index("apt-get update"), name
            if name in {each for service in SERVICES for each in in_image(service)}:
                assert "mv /etc/apt/sources.list.d/debian.sources.base" in rest, name
    assert found == 2


def test_every_stage_that_uses_pip_takes_the_indexes():
    for name, stage in stages().items():
        if any(
            word == "RUN" and "pip" in rest and "install " in rest and "apt" not in rest
            for word, rest in stage.instructions
        ):
            for argument in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_TRUSTED_HOST"):
                assert ("ARG", argument) in stage.instructions, (name, argument)


def make(*arguments: str, **environ: str) -> str:
    done = subprocess.run(
        ["make", "--dry-run", "--no-print-directory", *arguments],
        cwd=ROOT,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_make_hands_mirrors_and_proxies_to_the_builder():
    given = {
        "DEBIAN_MIRROR": "http://mirror",
        "HTTPS_PROXY": "http://proxy:1",
        "NO_PROXY": "a,b",
        "PIP_TRUSTED_HOST": "m",
    }
    lines = make("image-frontend", "TAG=1", **given)
    for name, value in given.items():
        assert f'--build-arg {name}="{value}"' in lines


def test_make_tags_by_what_is_built_and_tells_the_chart(tmp_path: Path):
    tag = image_tag(ROOT)
    assert f"penstock/frontend:{tag} " in make("image-frontend", "REGISTRY=")
    assert f"r/penstock/enginecore:{tag}-cpu " in make("image-enginecore", "REGISTRY=r", "DEVICE=cpu")
    assert "penstock/frontend:mine " in make("image-frontend", "TAG=mine")
    values = tmp_path / "values.yaml"
    subprocess.run(
        ["make", "-s", "image-values", "REGISTRY=r.example/t", f"IMAGE_VALUES={values}"], cwd=ROOT, check=True
    )
    manifests = lint.render(VALUE_SETS[HUB], values)
    images = {
        c["image"] for m in manifests if m["kind"] == "Deployment" for c in m["spec"]["template"]["spec"]["containers"]
    }
    assert images == {
        *(f"r.example/t/penstock/{service}:{tag}" for service in ("frontend", "coordinator")),
        f"r.example/t/penstock/enginecore:{tag}-cuda",
    }
