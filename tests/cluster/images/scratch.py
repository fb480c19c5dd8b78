"""Writes images of static programs without a builder: one layer, in the OCI image layout."""

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"
CONFIG = "application/vnd.oci.image.config.v1+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"


def write_image(
    archive: Path,
    name: str,
    files: Mapping[str, Path],
    entrypoint: Sequence[str],
    *,
    user: str = "65534:65534",
) -> Path:
    """Write the image ``name`` into ``archive``.

    Args:
        files: Files of this machine, by their paths in the image. The files become executable.
    """
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w") as layer:
        for directory in ("tmp", "etc"):
            entry = tarfile.TarInfo(directory)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if directory == "tmp" else 0o755
            layer.addfile(entry)
        for path, source in files.items():
            entry = tarfile.TarInfo(path.lstrip("/"))
            entry.size, entry.mode = source.stat().st_size, 0o755
            with source.open("rb") as opened:
                layer.addfile(entry, opened)
    compressed = gzip.compress(tar.getvalue(), compresslevel=1, mtime=0)
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Entrypoint": list(entrypoint), "User": user, "Env": ["PATH=/"]},
        "rootfs": {"type": "layers", "diff_ids": [_digest(tar.getvalue())]},
    }
    blobs: dict[str, bytes] = {}
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": _blob(blobs, CONFIG, json.dumps(config).encode()),
        "layers": [_blob(blobs, LAYER, compressed)],
    }
    index = {
        "schemaVersion": 2,
        "manifests": [
            {
                **_blob(blobs, MANIFEST, json.dumps(manifest).encode()),
                "annotations": {"io.containerd.image.name": name, "org.opencontainers.image.ref.name": name},
            }
        ],
    }
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive, "w") as out:
        _member(out, "oci-layout", json.dumps({"imageLayoutVersion": "1.0.0"}).encode())
        _member(out, "index.json", json.dumps(index).encode())
        for digest, content in blobs.items():
            _member(out, f"blobs/sha256/{digest.removeprefix('sha256:')}", content)
    return archive


def _digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def _blob(blobs: dict[str, bytes], media_type: str, content: bytes) -> dict[str, object]:
    digest = _digest(content)
    blobs[digest] = content
    return {"mediaType": media_type, "digest": digest, "size": len(content)}


def _member(out: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    out.addfile(entry, io.BytesIO(content))
