"""Values: refused values and their error messages; every value is documented."""

import json
from collections.abc import Iterator

import jsonschema
import pytest
import yaml

from charts import lint, values_table
from tests.chart.rendering import HUB, release


def read_schema() -> dict:
    return json.loads((lint.CHART / "values.schema.json").read_text())


def objects(part: dict, path: str = "values") -> Iterator[tuple[str, dict]]:
    """Yield every part of the schema that describes a value."""
    for key, child in part.get("properties", {}).items():
        yield f"{path}.{key}", child
        yield from objects(child, f"{path}.{key}")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("enginecore.replica=2", "enginecore: Additional property replica is not allowed"),
        (
            "enginecore.config.cache.block_sice=2",
            "enginecore.config.cache: Additional property block_sice is not allowed",
        ),
        ("engine.replicas=2", "Additional property engine is not allowed"),
        ("enginecore.replicas=two", r"enginecore.replicas: Invalid type. Expected: integer, given: string"),
        ("enginecore.replicas=-1", "enginecore.replicas: Must be greater than or equal to 0"),
        ("metrics.enabled=1", "metrics.enabled: Invalid type. Expected: boolean, given: integer"),
        (
            "model.source=s3",
            'model.source must be one of the following: "hub", "pvc", "oci", "hostPath", "init", "image"',
        ),
        ("model.pvc.path=/abs", "model.pvc.path: Does not match pattern"),
        ("enginecore.config.model.dtype=fp8", "enginecore.config.model.dtype must be one of"),
        ("enginecore.config.cache.memory_utilization=90", "memory_utilization: Must be less than or equal to 1"),
        ("frontend.image.digest=latest", "frontend.image.digest: Does not match pattern"),
        ("frontend.rollingUpdate.maxSurge=half", "frontend.rollingUpdate.maxSurge: Does not match pattern"),
        ("frontend.service.type=ExternalName", "frontend.service.type must be one of"),
        ("frontend.podLabels.app\\.kubernetes\\.io/name=x", "frontend.podLabels"),
        ("enginecore.gpu=null", "enginecore: gpu is required"),
        ("coordinator.replicas=2", "coordinator: Additional property replicas is not allowed"),
        ("fullnameOverride=Big_Name", "fullnameOverride: Does not match pattern"),
    ],
)
def test_wrong_values_are_refused_by_name(setting: str, message: str):
    with pytest.raises(lint.ChartError) as caught:
        release(HUB, setting)
    assert message in str(caught.value)


def test_the_defaults_satisfy_the_schema():
    jsonschema.validate(yaml.safe_load((lint.CHART / "values.yaml").read_text()), read_schema())


def test_the_schema_itself_is_valid():
    jsonschema.Draft7Validator.check_schema(read_schema())


def test_every_value_is_described():
    schema = read_schema()
    for path in values_table.leaves(schema, schema):
        for depth in range(1, len(path) + 1):
            assert values_table.part_at(schema, path[:depth])["description"], path


def test_every_object_is_closed_or_is_one_of_kubernetes():
    """Checks that the chart's objects allow no unknown keys.

    The schema defines no keys for objects that the chart passes to Kubernetes.
    """
    schema = read_schema()
    parts = [("values", schema), *objects(schema)]
    parts += [item for name, part in schema["definitions"].items() for item in [(name, part), *objects(part, name)]]
    for path, part in parts:
        if "properties" in part:
            assert part["additionalProperties"] is False, path


def places(schema: dict, part: dict, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the paths of objects with defined keys in the schema. The pool in paths is called ``a``."""
    part = values_table.resolve(schema, part)
    if part.get("properties"):
        yield path
    for key, child in part.get("properties", {}).items():
        if isinstance(child.get("additionalProperties"), dict):  # a map of pools
            yield from places(schema, child["additionalProperties"], (*path, key, "a"))
        else:
            yield from places(schema, child, (*path, key))


def test_a_typo_is_refused_in_every_place():
    schema = read_schema()
    checked = jsonschema.Draft7Validator(schema)
    found = list(places(schema, schema))
    assert ("enginecore", "pools", "a", "probes", "startup") in found
    assert ("enginecore", "pools", "a", "config", "scheduler") in found
    for path in found:
        values = values_table.default_values()
        here = values
        for key in path:
            here = here.setdefault(key, {})
        assert checked.is_valid(values), path
        here["tpyo"] = 1
        assert not checked.is_valid(values), path


def test_every_default_has_a_place_in_the_schema_and_every_plain_value_a_default():
    schema, values = read_schema(), yaml.safe_load((lint.CHART / "values.yaml").read_text())
    for path in values_table.leaves(schema, schema):
        has_default = values_table.default(values, path) != ""
        assert has_default != ("config" in path or path == ("global",)), path


def test_the_readme_lists_all_values():
    readme = values_table.README.read_text(encoding="utf-8")
    for path in values_table.leaves(read_schema(), read_schema()):
        assert f"| `{'.'.join(path)}` |" in readme


def test_an_old_cluster_is_refused():
    with pytest.raises(lint.ChartError, match=r"requires kubeVersion: >=1.30.0-0"):
        release(HUB, kube_version="1.29")
