"""Languages of the example clients: required programs, the build from the packages, and the client's command line."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import pytest
from filelock import FileLock

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "clients"
BUILD = ROOT / "build" / "clients"
RELEASED = os.environ.get("CLIENT_CONTRACTS", "")
"""Descriptor set in ``protos/released`` from which to build the clients, instead of the current contracts."""
OF_RELEASE = f"-{Path(RELEASED).stem}" if RELEASED else ""
"""Suffix of the names of built files."""


class Language(msgspec.Struct, frozen=True):
    """A language that has an example client.

    Attributes: needs: Names of the executables that the build needs. package: Whether ``protos/stubs`` has a
    package for the language. build: Function that builds the client and returns its command line. Its arguments are
    the folder of packages and a folder for the build.
    """

    name: str
    needs: tuple[str, ...]
    build: Callable[[Path, Path], list[str]]
    package: bool = True
    get: str = ""
    """Instructions for installing the programs in ``needs``, shown to people."""

    @property
    def missing(self) -> str:
        """Return the reason why this machine cannot build the client; empty if it can."""
        absent = [name for name in self.needs if shutil.which(name) is None]
        return (
            f"no {' and '.join(absent)} on PATH, for clients in {self.name}{self.get and f' ({self.get})'}"
            if absent
            else ""
        )

    def command(self) -> list[str]:
        """Return the client's command line, and build the client if necessary.

        Skips the test if a program is missing.
        """
        if self.missing:
            pytest.skip(self.missing)
        BUILD.mkdir(parents=True, exist_ok=True)
        with FileLock(BUILD / "lock"):  # several processes run tests
            return self._built()

    def _built(self) -> list[str]:
        stubs, out = BUILD / f"stubs{OF_RELEASE}", BUILD / f"{self.name}{OF_RELEASE}"
        done = BUILD / f"{self.name}{OF_RELEASE}.built"
        if done.exists() and (run_id := os.environ.get("PYTEST_XDIST_TESTRUNUID")):
            built = json.loads(done.read_text())
            if built["run"] == run_id:
                return list(built["command"])
        if self.package:
            released = ["--released", RELEASED] if RELEASED else []
            run([sys.executable, str(ROOT / "protos/stubs"), "--out", str(stubs), *released, self.name])
        out.mkdir(parents=True, exist_ok=True)
        command = self.build(stubs, out)
        done.write_text(json.dumps({"run": os.environ.get("PYTEST_XDIST_TESTRUNUID"), "command": command}))
        return command


def run(command: list[str], folder: Path = ROOT, **env: str) -> None:
    """Run a step of a build. Raises AssertionError with the step's output if it fails."""
    done = subprocess.run(command, cwd=folder, env={**os.environ, **env}, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}"


def install_wheel(stubs: Path, folder: Path) -> None:
    """Install only the contracts' wheel into an empty folder."""
    (wheel,) = (stubs / "python").glob("*.whl")
    shutil.rmtree(folder, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-deps"]
    run([*pip, "--target", str(folder), str(wheel)])


def python(stubs: Path, out: Path) -> list[str]:
    """Return a client that imports the wheel's contracts instead of the environment's contracts."""
    install_wheel(stubs, out / "site")
    return ["env", f"PYTHONPATH={out / 'site'}", sys.executable, "-W", "error", str(EXAMPLES / "python/client.py")]


def node(stubs: Path, out: Path) -> list[str]:
    """Compile the client with tsc, next to the built package."""
    shutil.copytree(EXAMPLES / "node", out, dirs_exist_ok=True, ignore=shutil.ignore_patterns("node_modules", "build"))
    (package,) = (stubs / "node").glob("penstock-protos-*.tgz")
    npm = shutil.which("npm") or "npm"
    if not (out / "node_modules/.package-lock.json").exists():
        run([npm, "ci", "--silent", "--no-audit", "--no-fund"], out)
    run([npm, "install", "--silent", "--no-audit", "--no-fund", "--no-save", str(package)], out)
    run([npm, "run", "--silent", "build"], out)
    return ["node", "--throw-deprecation", str(out / "build/client.js")]


def go(stubs: Path, out: Path) -> list[str]:
    """Build the Go client. The contracts' module is fetched from a local proxy into a separate cache.

    A common cache would be stale, because the module's files change during development while its version stays the
    same.
    """
    cache = out / "modules"
    shutil.rmtree(cache / "penstock.io", ignore_errors=True)
    shutil.rmtree(cache / "cache/download/penstock.io", ignore_errors=True)
    asked = ["go", "env", "GOMODCACHE", "GOPROXY"]
    known, proxy = subprocess.run(asked, check=True, capture_output=True, text=True).stdout.split()
    env = {
        "GOFLAGS": "-mod=mod -modcacherw -trimpath -buildvcs=false",
        "GOMODCACHE": str(cache),
        "GONOSUMDB": "penstock.io",
        "GOPROXY": f"{(stubs / 'go').as_uri()},{Path(known).as_uri()}/cache/download,{proxy}",
        "GOWORK": "off",
    }
    source = out / "source"
    shutil.rmtree(source, ignore_errors=True)
    shutil.copytree(EXAMPLES / "go", source)
    run(["go", "get", "penstock.io/protos"], source, **env)
    run(["go", "vet", "./..."], source, **env)
    run(["go", "build", "-o", str(out / "client"), "."], source, **env)
    return [str(out / "client")]


def cpp(stubs: Path, out: Path) -> list[str]:
    """Compile the client with code that its own build generates. A package would fit only one compiler and one library
    version.
    """
    released = f"-DPENSTOCK_DESCRIPTORS={(ROOT / RELEASED).resolve() if RELEASED else ''}"
    run(["cmake", "-S", str(EXAMPLES / "cpp"), "-B", str(out), released])
    run(["cmake", "--build", str(out)])
    return [str(out / "client")]


def rust(stubs: Path, out: Path) -> list[str]:
    """Unpack the crate into the example's folder. All versions of the contracts share the compiled dependencies."""
    (crate,) = (stubs / "rust").glob("*.crate")
    source, target = out / "source", BUILD / "rust-target"
    ignored = shutil.ignore_patterns("penstock-protos", "target")
    shutil.copytree(EXAMPLES / "rust", source, ignore=ignored, dirs_exist_ok=True)
    unpacked, known = source / "penstock-protos", out / "unpacked.crate"
    if not known.exists() or known.read_bytes() != crate.read_bytes():
        shutil.rmtree(unpacked, ignore_errors=True)
        shutil.unpack_archive(crate, source, "gztar", filter="data")
        (source / crate.stem).rename(unpacked)
        (
            unpacked / "src/lib.rs"
        ).touch()  # all files of a crate have the same time, and cargo compiles only newer files
        shutil.copy(crate, known)
    run(["cargo", "build", "--target-dir", str(target)], source, CARGO_INCREMENTAL="0")
    return [shutil.copy(str(target / "debug/client"), str(out / "client"))]


def jvm(language: str, stubs: Path, out: Path) -> list[str]:
    """Package a jar next to the jars that it needs. The flags make it start faster."""
    folders = [f"-Dpenstock.repository={(stubs / language).as_uri()}", f"-Dtarget={out}"]
    run(["mvn", "-B", "-q", "-ntp", "package", *folders], EXAMPLES / language)
    return ["java", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-jar", str(out / "penstock-client.jar")]


LANGUAGES = (
    Language("python", ("python3",), python),
    Language("node", ("node", "npm"), node, get="apt-get install nodejs npm"),
    Language("go", ("go",), go, get="1.25 or later"),
    Language(
        "cpp",
        ("cmake", "c++", "protoc", "grpc_cpp_plugin"),
        cpp,
        package=False,
        get="apt-get install cmake g++ libgrpc++-dev libprotobuf-dev protobuf-compiler-grpc",
    ),
    Language("rust", ("cargo",), rust, get="Rust 1.88 or later, from rustup.rs"),
    Language("java", ("mvn", "javac"), partial(jvm, "java"), get="apt-get install maven openjdk-17-jdk-headless"),
    Language("kotlin", ("mvn", "javac"), partial(jvm, "kotlin"), get="apt-get install maven openjdk-17-jdk-headless"),
)
