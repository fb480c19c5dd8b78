"""Package for Rust: the crate ``penstock-protos`` with generated code, so that its users need no protoc."""

import shutil
import subprocess
import tempfile
from pathlib import Path

from source import PROTOS, Source

NEEDS = ("cargo",)
TEMPLATE = Path(__file__).parent / "rust"
NAME = "penstock-protos"
TOOLS = PROTOS.parent / "build/stubs/tools/rust"
"""Build folder of the generator, shared by all versions so that it is compiled once."""


def build(source: Source, out: Path) -> Path:
    """Write ``out/rust/penstock-protos-VERSION.crate`` and return its path. Raises RuntimeError if cargo fails."""
    folder = out / "rust"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as temporary:
        crate = Path(temporary)
        shutil.copytree(TEMPLATE, crate, dirs_exist_ok=True, ignore=shutil.ignore_patterns("generator", "target"))
        for name in ("Cargo.toml", "README.md"):
            file = crate / name
            file.write_text(file.read_text().replace("VERSION", source.version))
        shutil.copy(PROTOS.parent / "LICENSE", crate)
        shutil.copy(source.service_config, crate / "src/service_config.json")
        generate(source, crate / "src")
        # Skip verification: users compile the crate's dependencies themselves.
        cargo("package", "--no-verify", "--allow-dirty", "--target-dir", str(TOOLS), folder=crate)
    packed = f"{NAME}-{source.version}.crate"
    return Path(shutil.copy(TOOLS / "package" / packed, folder / packed))


def generate(source: Source, sources: Path) -> None:
    """Write one file per package, e.g. ``inference/v1.rs`` for ``penstock.inference.v1``, and declare the modules in
    ``lib.rs``.
    """
    descriptors = str(source.descriptors.absolute())
    with tempfile.TemporaryDirectory() as generated:
        options = ["run", "--quiet", "--locked", "--target-dir", str(TOOLS), "--"]
        cargo(*options, descriptors, generated, *source.files, folder=TEMPLATE / "generator")
        with (sources / "lib.rs").open("a") as lib:
            for file in sorted(Path(generated).glob("*.rs")):
                _, area, version = file.stem.split(".")
                (sources / area).mkdir(exist_ok=True)
                shutil.copy(file, sources / area / f"{version}.rs")
                lib.write(f"/// The package `{file.stem}`.\npub mod {area} {{\n    pub mod {version};\n}}\n")


def cargo(*arguments: str, folder: Path) -> None:
    """Run cargo in ``folder``. Raises RuntimeError with its output if it fails."""
    done = subprocess.run(["cargo", *arguments], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(
            f"cargo {arguments[0]} failed with exit status {done.returncode}:\n{done.stdout}{done.stderr}"
        )
