"""Generated code for languages without an example client, in the packages that the contracts name."""

import shutil
import subprocess
from pathlib import Path

import pytest

OPTIONS = {"csharp": ["--csharp_opt=base_namespace="]}
"""Options of protoc by language. C# needs a folder per namespace, since packages have files with the same names."""
PROTOS = Path(__file__).resolve().parents[2] / "protos"
NAMES = {
    "csharp": b"namespace Penstock.Inference.V1 {",
    "php": rb"namespace Penstock\Inference\V1;",
    "ruby": b"module Penstock",
}


@pytest.mark.skipif(shutil.which("protoc") is None, reason="no protoc on PATH (apt-get install protobuf-compiler)")
@pytest.mark.parametrize("language", NAMES)
def test_code_is_generated_under_names_of_the_contracts(language: str, tmp_path: Path) -> None:
    files = sorted(str(path.relative_to(PROTOS)) for path in (PROTOS / "penstock").rglob("v*/*.proto"))
    command = ["protoc", f"-I{PROTOS}", f"--{language}_out={tmp_path}", *OPTIONS.get(language, []), *files]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert any(NAMES[language] in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
