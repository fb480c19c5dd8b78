"""Inputs from which the packages of all languages are built: a descriptor set, a version and the service config."""

import tomllib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

PROTOS = Path(__file__).resolve().parents[1]
OURS = "penstock."
"""Prefix of the proto packages that are published. Contracts of other projects are not."""
OUTER = "Proto"
"""Suffix of the outer class that Java code has for each proto file."""


@dataclass(frozen=True)
class Source:
    """Contracts of one version, from which the packages are built.

    Attributes:
        descriptors: File with a FileDescriptorSet that includes all imports.
        version: Version of the packages.
        service_config: File with the gRPC service config that goes into each package.
    """

    descriptors: Path
    version: str
    service_config: Path = PROTOS / "service_config.json"

    @cached_property
    def files(self) -> list[str]:
        """Names of the proto files to generate code from, as protoc takes them."""
        found = FileDescriptorSet.FromString(self.descriptors.read_bytes())
        return [file.name for file in found.file if file.package.startswith(OURS)]


def current(folder: Path) -> Source:
    """Compile the current contracts into ``folder``. Raises RuntimeError if protoc fails."""
    import grpc_tools
    from grpc_tools import protoc

    out = folder / "descriptors.binpb"
    folder.mkdir(parents=True, exist_ok=True)
    well_known = Path(grpc_tools.__file__).parent / "_proto"
    files = sorted(str(path.relative_to(PROTOS)) for path in (PROTOS / "penstock").rglob("v*/*.proto"))
    flags = ["--include_imports", "--include_source_info", f"--descriptor_set_out={out}"]
    if code := protoc.main(["protoc", f"-I{PROTOS}", f"-I{well_known}", *flags, *files]):
        raise RuntimeError(f"protoc failed with exit status {code}")
    project = tomllib.loads((PROTOS / "pyproject.toml").read_text())["project"]
    return Source(out, project["version"])


def released(path: Path, folder: Path) -> Source:
    """Return the contracts of a release, from ``released/vVERSION.binpb``.

    Files of 0.1.0 have no file options (Go, Java and C# packages), so the current ones are added.
    """
    found = FileDescriptorSet.FromString(path.read_bytes())
    for file in found.file:
        if file.package.startswith(OURS) and not file.options.go_package:
            set_options(file)
    out = folder / path.name
    folder.mkdir(parents=True, exist_ok=True)
    out.write_bytes(found.SerializeToString())
    return Source(out, path.stem.removeprefix("v"))


def set_options(file: FileDescriptorProto) -> None:
    """Set the file options that name the packages of the generated code."""
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
