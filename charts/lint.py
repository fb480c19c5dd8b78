"""Checks the chart: ``python -m charts.lint``. Prints what it does; the exit code is 1 when anything is wrong.

Every value set under ``ci/`` and ``profiles/`` goes through ``helm lint --strict``, is rendered for several versions of
Kubernetes, and the manifests are validated against that version's schemas.
"""

import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

from charts import leader_worker_set

CHART = Path(__file__).resolve().parent / "penstock"
KUBE_VERSIONS = ("1.30", "1.33", "1.36", "1.37")
"""The oldest version that Chart.yaml admits, and newer ones up to the newest that is known."""

_NEEDS = re.compile(r"# Needs Kubernetes (1\.\d+)")

FOREIGN = ("gateway.networking.k8s.io", "inference.networking.k8s.io", "cert-manager.io", "monitoring.coreos.com")
"""API groups that other projects define: no version of Kubernetes has schemas of theirs."""

# It reads megabytes of schemas anew for each manifest.
kubernetes_validate.utils.schema_contents = functools.cache(kubernetes_validate.utils.schema_contents)


class ChartError(Exception):
    """The chart, or a value set, is wrong. The message is helm's or the validator's."""


class _YamlLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Refuses a key that stands twice: the last one would win without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        if twice := {key for key in keys if keys.count(key) > 1}:
            raise ChartError(f"a manifest has {', '.join(sorted(twice))} twice in one place")
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


def value_sets() -> list[Path]:
    """The values files that are checked."""
    return sorted([*CHART.glob("ci/*.yaml"), *CHART.glob("profiles/*.yaml")])


def kube_versions(values: Path) -> list[str]:
    """The versions that a values file is checked for: those from the one on that its first line says it needs."""
    needed = _NEEDS.match(values.read_text(encoding="utf-8"))
    if needed is None:
        return list(KUBE_VERSIONS)
    return sorted(
        {needed[1], *(version for version in KUBE_VERSIONS if _minor(version) > _minor(needed[1]))}, key=_minor
    )


def _minor(version: str) -> int:
    return int(version.partition(".")[2])


def helm(*arguments: str) -> str:
    """Return the output of helm. Raises ChartError with helm's error."""
    beside_python = shutil.which("helm", path=str(Path(sys.executable).parent))
    program = beside_python or shutil.which("helm")
    if program is None:
        raise ChartError("helm is not installed; the Python distribution helm-binary has it")
    env = {"GOGC": "off", **os.environ}  # it ends before it has garbage worth a collection
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False, env=env)  # noqa: S603 - our own words
    if done.returncode != 0:
        raise ChartError((done.stdout + done.stderr).strip())
    return done.stdout


def render(
    *values: Path, settings: Sequence[str] = (), kube_version: str = KUBE_VERSIONS[0], chart: Path = CHART
) -> list[dict[str, Any]]:
    """The manifests of a release ``demo`` in the namespace ``serving``. ``settings`` are ``key=value``. Raises ChartError."""
    files = [f"--values={path}" for path in values]
    sets = [f"--set={setting}" for setting in settings]
    text = helm("template", "demo", str(chart), "--namespace=serving", f"--kube-version={kube_version}", *files, *sets)
    return [manifest for manifest in yaml.load_all(text, Loader=_YamlLoader) if manifest]


def validate(manifest: dict[str, Any], kube_version: str) -> None:
    """Raise ChartError when Kubernetes of that version would refuse ``manifest``, unknown fields included. Of a foreign group
    it knows nothing, and takes all.
    """
    if manifest["apiVersion"].partition("/")[0] in FOREIGN:
        return
    try:
        if manifest["apiVersion"] == leader_worker_set.API_VERSION:
            leader_worker_set.check(manifest)
            for pod in leader_worker_set.pods(manifest):
                validate(pod, kube_version)
            return
        kubernetes_validate.validate(manifest, kube_version, strict=True)
    except (jsonschema.ValidationError, kubernetes_validate.ValidationError) as e:
        where = ".".join(map(str, e.path))
        name = f"{manifest['kind']} {manifest['metadata']['name']}"
        raise ChartError(f"{name}: {where}: {e.message}") from None
    except kubernetes_validate.SchemaNotFoundError as e:
        raise ChartError(e.message) from None


def check(values: Path) -> list[str]:
    """Return the faults of the chart under one values file."""
    problems = []
    try:
        newest = KUBE_VERSIONS[-1]
        helm("lint", "--strict", "--quiet", str(CHART), f"--values={values}", f"--kube-version={newest}")
        print("  helm lint --strict: ok")
    except ChartError as e:
        problems.append(f"helm lint: {e}")
    for version in kube_versions(values):
        try:
            manifests = render(values, kube_version=version)
            for manifest in manifests:
                validate(manifest, version)
            print(f"  Kubernetes {version}: {len(manifests)} manifests valid")
        except ChartError as e:
            problems.append(f"Kubernetes {version}: {e}")
    return problems


def main() -> int:
    """The exit code."""
    failed = 0
    for values in value_sets():
        print(f"{values.relative_to(CHART)}", flush=True)
        for problem in check(values):
            failed += 1
            print(f"  FAILED {problem}")
    print(f"{failed} problem(s)" if failed else "the chart is fine")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
