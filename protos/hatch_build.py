"""Build hook that generates the Python stubs from the .proto files, so that stubs are never committed."""

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


def files_of(descriptors: Path) -> list[str]:
    """Return the names of a descriptor set's files that are below "penstock/"."""
    from google.protobuf.descriptor_pb2 import FileDescriptorSet

    found = FileDescriptorSet.FromString(descriptors.read_bytes())
    return [file.name for file in found.file if file.name.startswith("penstock/")]


class GenerateStubs(BuildHookInterface[Any]):
    """Generates messages, services and their type stubs with protoc, and puts them into the wheel with the service
    config.
    """

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002 - hatchling's signature
        """Generate the stubs into a temporary folder, and add the files to the wheel."""
        import grpc_tools
        from grpc_tools import protoc

        root = Path(self.root)
        self._out = tempfile.TemporaryDirectory()
        out = Path(self._out.name)
        # compiled contracts of a given version, put here by protos/stubs/python.py
        if (descriptors := root / "descriptors.binpb").exists():
            protos, read = files_of(descriptors), [f"--descriptor_set_in={descriptors}"]
        else:
            protos = sorted(str(p.relative_to(root)) for p in (root / "penstock").rglob("*.proto"))
            read = [f"-I{root}", f"-I{Path(grpc_tools.__file__).parent / '_proto'}"]
        outputs = [f"--{kind}_out={out}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
        # The mypy plugins are in the interpreter's folder, or on PATH in an isolated build.
        search = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        plugins = [
            f"--plugin={name}={shutil.which(name, path=search) or name}"
            for name in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")
        ]
        code = protoc.main(["protoc", *read, *plugins, *outputs, *protos])
        if code != 0:
            raise RuntimeError(f"protoc failed with exit status {code}")
        for package in {
            out / "penstock",
            *((out / p).parent for p in protos),
            *((out / p).parent.parent for p in protos),
        }:
            (package / "__init__.py").touch()
        (out / "penstock" / "py.typed").touch()
        shutil.copy(root / "service_config.json", out / "penstock")
        for path in out.rglob("*"):
            if path.is_file():
                build_data["force_include"][str(path)] = str(path.relative_to(out))

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002
        """Remove the temporary folder."""
        self._out.cleanup()
