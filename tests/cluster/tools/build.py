"""Builds the test cluster's programs: ``python -m tests.cluster.tools.build [COMPONENT ...]``.

Each component gets its own Go module under ``build/cluster/src``, because components need different versions of k8s.io
modules. A component that already exists in its version is not built again.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tests.cluster.tools.components import COMPONENTS, READ, Component, OwnModule

ROOT = Path(__file__).resolve().parents[3] / "build" / "cluster"
SOURCES = ROOT / "src"
PROGRAMS = ROOT / "bin"


def download(module: str, version: str) -> Path:
    """Download a module and return its directory in the module cache."""
    said = subprocess.run(
        ["go", "mod", "download", "-json", f"{module}@{version}"], check=False, capture_output=True, text=True
    )
    try:
        found = json.loads(said.stdout)
    except json.JSONDecodeError as error:
        raise SystemExit(f"{module}@{version} cannot be downloaded: {said.stderr.strip()}") from error
    if "Dir" not in found:
        raise SystemExit(f"{module}@{version} cannot be downloaded: {found.get('Error', 'no reason given')}")
    return Path(found["Dir"])


def required_staging(go_mod: str) -> list[str]:
    """Return the modules that Kubernetes's ``go.mod`` requires at v0.0.0 and replaces by directories of its tree."""
    return sorted(set(re.findall(r"^\s+(k8s\.io/[\w.-]+) v0\.0\.0(?:\s|$)", go_mod, flags=re.MULTILINE)))


def replacements(go_mod: str) -> list[str]:
    """Return the ``replace`` lines of a ``go.mod``, without the lines that point to directories of its tree."""
    block = "\n".join(re.findall(r"^replace \(\n(.*?)^\)", go_mod, flags=re.MULTILINE | re.DOTALL))
    single = re.findall(r"^replace (.+=>.+)$", go_mod, flags=re.MULTILINE)
    lines = [line.split("//")[0].strip() for line in [*block.splitlines(), *single]]
    return [line for line in lines if "=>" in line and not line.split("=>")[1].strip().startswith(".")]


def go_mod(name: str, component: Component) -> str:
    """Return the text of the ``go.mod`` for building ``component``."""
    source = component.replaced.get(component.module, f"{component.module} {component.version}")
    theirs = (download(*source.split()) / "go.mod").read_text()
    go = re.search(r"^go (\S+)$", theirs, flags=re.MULTILINE)
    assert go, f"{component.module}: no go version in its go.mod"
    lines = [f"module penstock.test/{name}", "", f"go {go[1]}", ""]
    lines += re.findall(r"^godebug .*$", theirs, flags=re.MULTILINE)
    lines += [f"require {component.module} {component.version}"]
    if component.staging:
        parts = component.version.removeprefix("v").split(".")
        lines += [f"replace {path} => {path} v0.{parts[1]}.{parts[2]}" for path in required_staging(theirs)]
    if component.copies_replaces:
        stand_ins = {*component.replaced, *component.own}
        lines += [f"replace {line}" for line in replacements(theirs) if line.split()[0] not in stand_ins]
        lines += re.findall(r"^exclude .*$", theirs, flags=re.MULTILINE)
    lines += [f"replace {path} => {other}" for path, other in component.replaced.items()]
    lines += [f"replace {path} => ./{path}" for path in component.own]
    lines += [f"tool {package}" for package in component.packages.values()]
    return "\n".join(lines) + "\n"


def write_module(directory: Path, path: str, module: OwnModule) -> None:
    """Write ``module`` with the import path ``path`` into ``directory``."""
    if module.version:
        shutil.copytree(download(path, module.version), directory)
    else:
        directory.mkdir(parents=True)
        (directory / "go.mod").write_text(f"module {path}\n")
    for name, text in module.files.items():
        file = directory / name
        file.unlink(missing_ok=True)  # files copied from the module cache are read-only
        file.write_text(text)


def built_from(component: Component) -> str:
    """Return a hash of all inputs of the component's build."""
    return hashlib.sha256(component.recipe.encode()).hexdigest()


def build(name: str, component: Component, parallel: int) -> None:
    """Build the programs of ``component`` into ``build/cluster/bin/NAME`` unless they exist."""
    target = PROGRAMS / name
    stamp = target / ".built"
    if stamp.exists() and stamp.read_text() == built_from(component):
        print(f"{name}: {component.version} is there")
        return
    begun = time.monotonic()
    source = SOURCES / name
    shutil.rmtree(source, ignore_errors=True)
    source.mkdir(parents=True)
    target.mkdir(parents=True, exist_ok=True)
    (source / "go.mod").write_text(go_mod(name, component))
    for path, module in component.own.items():
        write_module(source / path, path, module)
    environment = {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "-mod=mod -buildvcs=false", "GOWORK": "off"}
    settings = " ".join(["-s", "-w", *(f"-X {key}={value}" for key, value in component.variables.items())])
    command = [
        "go",
        "build",
        f"-p={parallel}",
        "-trimpath",
        f"-ldflags={settings}",
        f"-tags={','.join(component.tags)}",
    ]
    for program, package in component.packages.items():
        subprocess.run([*command, "-o", str(target / program), package], cwd=source, env=environment, check=True)
    stamp.write_text(built_from(component))
    print(f"{name}: {component.version} built in {time.monotonic() - begun:.0f} s", flush=True)


def main() -> None:
    """Build the components that the command line names, or all components."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("components", nargs="*", metavar="COMPONENT", help=", ".join(COMPONENTS))
    parser.add_argument("--parallel", type=int, default=os.cpu_count() or 1, help="packages compiled at once")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.components) - set(COMPONENTS)):
        parser.error(f"{', '.join(unknown)}: there is only {', '.join(COMPONENTS)}")
    if shutil.which("go") is None:
        sys.exit("go is not installed: the test cluster is built from Go modules")
    for module, version in READ.items():
        download(module, version)
    for name in arguments.components or COMPONENTS:
        build(name, COMPONENTS[name], arguments.parallel)


if __name__ == "__main__":
    main()
