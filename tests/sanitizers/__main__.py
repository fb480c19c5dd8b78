"""Checks of the compiled code with AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer: ``make sanitize``.

First, every sanitizer must report programs with deliberate errors. Then ``threads.cpp`` stresses the thread pool under
TSan, and ``shared.cpp`` stresses the shared memory library under all three. The unit tests of both run with ASan and
UBSan, for every instruction set of the processor and for emulated matrix units. Sanitizers that the compiler lacks are
skipped, with the reason. The exit status is 1 if there was an unexpected report, or if a deliberate error was not
reported.
"""

import argparse
import importlib.util
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from penstock_enginecore.native.library import _CAPABILITIES as CAPABILITIES

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ENGINE = ROOT / "services" / "enginecore"
BUILD = ROOT / "build" / "sanitize"
SOURCES = sorted((ENGINE / "csrc").glob("*.cpp"))
EMULATION = ROOT / "tests" / "emulation"
EMULATED = {"amx", "avx512_bf16"}
"""Instruction sets whose kernels can be compiled with the emulation's header."""
TESTS = (
    "native/test_kernels.py",
    "native/test_decoder.py",
    "native/test_experts.py",
    "native/test_span_attention.py",
    "native/test_parts.py",
    "native/test_ownership.py",
    "attention/test_poisoned_pools.py",
    "executor/multiproc/test_ring.py",
    "parallel/test_shared_memory.py",
    "states/test_decays.py",
    "states/test_rows.py",
)
COMMON = ("-std=c++20", "-O1", "-g", "-fno-omit-frame-pointer", "-Wno-psabi", "-pthread", f"-I{ENGINE / 'csrc'}")
MEMORY = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
THREADS = ("-fsanitize=thread",)
ONE_SET = ("-DPENSTOCK_LANES=4", "-DPENSTOCK_TILE=6")
BROKEN = {
    MEMORY: {
        "read_out_of_bounds.cpp": "heap-buffer-overflow",
        "shift_too_far.cpp": "runtime error: shift exponent",
        "ring_too_short.cpp": "heap-buffer-overflow",
    },
    THREADS: {
        "race.cpp": "WARNING: ThreadSanitizer: data race",
        "unordered_counters.cpp": "WARNING: ThreadSanitizer: data race",
        "unordered_exchange.cpp": "WARNING: ThreadSanitizer: data race",
    },
}
"""Programs and the reports that they must cause, by compiler flags."""
NAMES = {MEMORY: "AddressSanitizer and UndefinedBehaviorSanitizer", THREADS: "ThreadSanitizer"}
OPTIONS = {
    # No leak check, because Python and torch free some memory only at exit.
    "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0:exitcode=99",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "exitcode=99",
}


def build_hook() -> Any:
    """Import the build hook, which compiles the kernels."""
    spec = importlib.util.spec_from_file_location("hatch_build", ENGINE / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


HOOK = build_hook()


def compile_with(flags: tuple[str, ...], sources: list[Path], to: Path) -> str | None:
    """Compile the sources. Returns None, or the compiler's error output."""
    to.parent.mkdir(parents=True, exist_ok=True)
    command = [HOOK._compiler(), *COMMON, *flags, *map(str, sources), "-o", str(to)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else done.stderr.strip()


def run(command: list[str], extra: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command, if possible without address space randomization, which conflicts with the shadow memory of older
    runtimes.
    """
    fixed = ["setarch", platform.machine(), "-R"]
    if subprocess.run([*fixed, "true"], capture_output=True, check=False).returncode == 0:
        command = [*fixed, *command]
    environment = {**os.environ, **OPTIONS, **(extra or {})}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def lacking(flags: tuple[str, ...]) -> str | None:
    """Return the reason why the compiler lacks the sanitizer; None if it is supported."""
    empty = BUILD / "empty.cpp"
    empty.parent.mkdir(parents=True, exist_ok=True)
    empty.write_text("int main() {}\n")
    return compile_with(flags, [empty], BUILD / "empty")


def can_fail(flags: tuple[str, ...]) -> bool:
    """Return whether every deliberate error is reported."""
    return all(is_reported(source, flags, report) for source, report in BROKEN[flags].items())


def is_reported(source: str, flags: tuple[str, ...], report: str) -> bool:
    """Return whether the sanitizers report the program's error."""
    program = BUILD / source.removesuffix(".cpp")
    if words := compile_with((*flags, *ONE_SET), [HERE / "broken" / source, ENGINE / "csrc" / "pool.cpp"], program):
        print(words)
        return False
    done = run([str(program)])
    found = done.returncode != 0 and report in done.stderr
    print(f"{NAMES[flags]}: {'reports' if found else 'DOES NOT REPORT'} {source}")
    return found


def runtime(name: str) -> str:
    """Return the path of a shared library of the compiler."""
    return subprocess.run(
        [HOOK._compiler(), f"-print-file-name={name}"], capture_output=True, text=True, check=True
    ).stdout.strip()


def libraries() -> list[str] | None:
    """Compile the libraries, one per processor at a time.

    Returns their instruction sets; None if a compilation fails.
    """
    kinds = HOOK._X86 if platform.machine().lower() in ("x86_64", "amd64") else HOOK._OTHER
    has = torch.cpu.get_capabilities()
    flags = (*MEMORY, "-fPIC", "-shared", "-fvisibility=hidden")
    builds = {}
    for isa, own in kinds.items():
        if missing := [need for need in CAPABILITIES[isa] if not has.get(need, False)]:
            print(f"{isa}: skipped, this processor has no {', '.join(missing)}")
        else:
            builds[isa] = ((*flags, *own), BUILD / f"kernels_{isa}.so")
    for isa in sorted(EMULATED & kinds.keys()):
        defined = [flag for flag in kinds[isa] if flag.startswith("-D")]
        builds[f"{isa}, emulated"] = ((*flags, f"-I{EMULATION}", *defined), BUILD / "emulated" / f"kernels_{isa}.so")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        said = list(pool.map(lambda build: compile_with(build[0], SOURCES, build[1]), builds.values()))
    for what, words in zip(builds, said, strict=True):
        if words:
            print(f"{what}: does not compile: {words}")
    return None if any(said) else list(builds)


def shared_memory(flags: tuple[str, ...], rounds: int) -> bool:
    """Stress the shared memory library with threads."""
    program = BUILD / f"shared_{'memory' if flags is MEMORY else 'threads'}"
    if words := compile_with(flags, [HERE / "shared.cpp"], program):
        print(words)
        return False
    return told(f"shared memory, {NAMES[flags]}", run([str(program), str(rounds)]))


def memory(tests: list[str], rounds: int) -> bool:
    """Check shared memory, and run the unit tests with sanitized libraries, for every instruction set of this
    processor.
    """
    if reason := lacking(MEMORY):
        print(f"{NAMES[MEMORY]}: skipped, the compiler lacks them: {reason}")
        return True
    if not (can_fail(MEMORY) and shared_memory(MEMORY, rounds)):
        return False
    if (built := libraries()) is None:
        return False
    files = tests or [f"tests/unit/enginecore/{name}" for name in TESTS]
    done = run(
        # Do not mix failures of this run into pytest's cache.
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.sanitizers.plugin", *files],
        {
            "LD_PRELOAD": f"{runtime('libasan.so')} {runtime('libubsan.so')} {runtime('libstdc++.so.6')}",
            "PENSTOCK_SANITIZED": str(BUILD),
            "PYTHONMALLOC": "malloc",
            "OMP_NUM_THREADS": "1",
        },
    )
    return told(f"{', '.join(built)}: {NAMES[MEMORY]}", done)


def threads(rounds: int) -> bool:
    """Check the thread pool and shared memory under TSan."""
    if reason := lacking(THREADS):
        print(f"{NAMES[THREADS]}: skipped, the compiler lacks it: {reason}")
        return True
    if not can_fail(THREADS):
        return False
    program = BUILD / "threads"
    if words := compile_with((*THREADS, *ONE_SET), [HERE / "threads.cpp", *SOURCES], program):
        print(words)
        return False
    good = told(f"thread pool, {NAMES[THREADS]}", run([str(program), str(rounds)]))
    return shared_memory(THREADS, rounds) and good


def told(what: str, done: subprocess.CompletedProcess[str]) -> bool:
    """Print the result of a command. Prints the complete output if the command failed."""
    if done.returncode == 0:
        print(f"{what}: {(done.stdout.strip() or 'nothing').splitlines()[-1]}")
        return True
    print(f"{what}: FAILED ({done.returncode}): {shlex.join(map(str, done.args))}\n{done.stdout}\n{done.stderr}")
    return False


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("memory", "threads"))
    parser.add_argument("--rounds", type=int, default=150, help="of the programs (default: 150)")
    options, tests = parser.parse_known_args()  # other arguments go to pytest and replace the kernels' unit tests
    good = True
    if options.only != "memory":
        good &= threads(options.rounds)
    if options.only != "threads":
        good &= memory(tests, options.rounds)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
