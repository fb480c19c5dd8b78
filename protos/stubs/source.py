"""What the packages of every language are built from: a descriptor set, and what goes into each package beside it."""

import tomllib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

PROTOS = Path(__file__).resolve().parents[1]
OURS = "penstock."
"""Packages that begin with this are published; contracts of others are not."""
OUTER = "Proto"
"""What the name of a file's own class in Java ends with."""


@dataclass(frozen=True)
class Source:
    """The contracts of one version. ``descriptors`` is a FileDescriptorSet in a file, with all that is imported."""

    descriptors: Path
    version: str
    service_config: Path = PROTOS / "service_config.json"

    @cached_property
    def files(self) -> list[str]:
        """The names of the files to generate from, as protoc takes them."""
        found = FileDescriptorSet.FromString(self.descriptors.read_bytes())
        return [file.name for file in found.file if file.package.startswith(OURS)]


def current(folder: Path) -> Source:
    """The contracts as they are, compiled into ``folder``. Raises RuntimeError if protoc refuses them."""
    import grpc_tools
    from grpc_tools import protoc

    out = folder / "descriptors.binpb"
    folder.mkdir(parents=True, exist_ok=True)
    well_known = Path(grpc_tools.__file__).parent / "_proto"
    files = sorted(str(path.relative_to(PROTOS)) for path in (PROTOS / "penstock").rglob("v*/*.proto"))
    flags = ["--include_imports", "--include_source_info", f"--descriptor_set_out={out}"]
    if code := protoc.main(["protoc", f"-I{PROTOS}", f"-I{well_known}", *flags, *files]):
        raise RuntimeError(f"protoc ended with {code}")
    project = tomllib.loads((PROTOS / "pyproject.toml").read_text())["project"]
    return Source(out, project["version"])


def released(path: Path, folder: Path) -> Source:
    """Those of a release, ``released/vVERSION.binpb``. Files of 0.1.0 had no options: they get those of today."""
    found = FileDescriptorSet.FromString(path.read_bytes())
    for file in found.file:
        if file.package.startswith(OURS) and not file.options.go_package:
            set_options(file)
    out = folder / path.name
    folder.mkdir(parents=True, exist_ok=True)
    out.write_bytes(found.SerializeToString())
    return Source(out, path.stem.removeprefix("v"))


def set_options(file: FileDescriptorProto) -> None:
    """Name the packages that the file's code is generated into."""
    _, area, version = file.package.split(".")
    title = {"enginecore": "EngineCore"}.get(area, area.capitalize())
    stem = Path(file.name).stem
    options = file.options
    options.csharp_namespace = f"Penstock.{title}.{version.upper()}"
    options.go_package = f"penstock.io/protos/{area}/{version};{area}{version}"
    options.java_multiple_files = True
    options.java_outer_classname = "".join(part.capitalize() for part in stem.split("_")) + OUTER
    options.java_package = f"io.penstock.{area}.{version}"
    options.objc_class_prefix = f"PST{title}"
