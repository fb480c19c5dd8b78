"""Schema of LeaderWorkerSets, which Kubernetes does not include. ``python -m charts.leader_worker_set CRD`` writes it.

The definition (CRD) consists mostly of two pod templates. The schemas of Kubernetes describe pods better, so pod
templates are validated as pods. This schema covers all other fields.
"""

import json
import sys
from pathlib import Path
from typing import Any

import jsonschema
import yaml

API_VERSION = "leaderworkerset.x-k8s.io/v1"
SCHEMA = Path(__file__).resolve().parent / "schemas" / "leaderworkerset.json"
TEMPLATES = ("leaderTemplate", "workerTemplate")
_KEPT = ("type", "enum", "required", "anyOf", "minimum", "maximum")


def made_from(definition: dict[str, Any]) -> dict[str, Any]:
    """Return a strict schema of a LeaderWorkerSet from its CRD, without descriptions, status and pod templates."""
    (version,) = [
        version for version in definition["spec"]["versions"] if version["name"] == API_VERSION.partition("/")[2]
    ]
    spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    pods = spec["properties"]["leaderWorkerTemplate"]["properties"]
    for template in (*TEMPLATES, "volumeClaimTemplates"):
        pods[template] = {"type": pods[template]["type"]}
    return {
        "type": "object",
        "required": ["spec"],
        "additionalProperties": False,
        "properties": {name: {} for name in ("apiVersion", "kind", "metadata")} | {"spec": _trimmed(spec)},
    }


def _trimmed(part: dict[str, Any]) -> dict[str, Any]:
    kept = {word: part[word] for word in _KEPT if word in part}
    if "properties" in part:
        kept["properties"] = {name: _trimmed(child) for name, child in part["properties"].items()}
        kept["additionalProperties"] = False
    return kept


def check(manifest: dict[str, Any]) -> None:
    """Raise jsonschema.ValidationError if the LeaderWorkerSet is invalid. Pod templates are not checked."""
    jsonschema.validate(manifest, json.loads(SCHEMA.read_text(encoding="utf-8")))


def pods(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the pods that the templates of a LeaderWorkerSet create."""
    name = manifest["metadata"]["name"]
    templates = manifest["spec"]["leaderWorkerTemplate"]
    return [
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": f"{name} {template}", **templates[template].get("metadata", {})},
            **{key: part for key, part in templates[template].items() if key != "metadata"},
        }
        for template in TEMPLATES
        if template in templates
    ]


if __name__ == "__main__":
    definition = yaml.safe_load(Path(sys.argv[1]).read_text(encoding="utf-8"))
    SCHEMA.write_text(json.dumps(made_from(definition), indent=2) + "\n", encoding="utf-8")
