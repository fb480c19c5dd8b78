"""Loading of KV blocks compared with vLLM's CPU build: the same model, prompts and threads, in turn.

``python -m tests.benchmarks.kv_peer MODEL --peer DIR``: ``make_model`` makes MODEL, and vLLM's CPU build is in
``DIR/venv``. Requests go directly to the engines, without servers. Times are from the arrival of a request to its first
token. Every round uses a new prompt, in these rows:

- vLLM without a connector computes it. A vLLM with ``ExampleConnector`` computes it and saves it in files. Another one
with the
  same folder loads it (``files``), and then has it in its KV cache.
- A vLLM with a small KV cache computes the prompt, then three other prompts, and loads the first one (``files, own``).
- ``kv_transfer`` and ``kv_tiers`` do the same with Penstock: from another engine (``grpc``, ``shared_memory``), and
after three
  other prompts (``host``, ``disk``).

vLLM's prompts are two tokens longer, because its connector loads full blocks of 32 tokens, without the last token.
``--connectors`` starts vLLM with each of its connectors and prints the result. ``--damage`` loads damaged or lost
files.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

from tests.benchmarks import kv_tiers, kv_transfer
from tests.benchmarks.peers import machine, vllm_environment

BLOCK = 32
"""Tokens per block in vLLM: the smallest size that its kernels support."""
TOKENS = 8
"""Number of generated tokens, which are compared."""
MEMORY = 1 << 30
CONNECTORS: dict[str, dict[str, Any]] = {
    "ExampleConnector": {"shared_storage_path": "{folder}"},
    "OffloadingConnector": {"cpu_bytes_to_use": MEMORY},
    "OffloadingConnector, fs": {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": MEMORY,
        "secondary_tiers": [{"type": "fs", "root_dir": "{folder}"}],
    },
    "SimpleCPUOffloadConnector": {"cpu_bytes_to_use": MEMORY},
    "NixlConnector": {},
    "NixlPushConnector": {},
    "LMCacheConnectorV1": {},
    "LMCacheMPConnector": {},
    "MooncakeConnector": {},
    "MooncakeStoreConnector": {},
    "MoRIIOConnector": {},
    "FlexKVConnectorV1": {},
    "HF3FSKVConnector": {},
    "HiSparseConnector": {"host_pool_gib": 1},
}
"""Connectors that transfer blocks, with their configuration.

Other connectors wrap these (``MultiConnector``), generate values (``DecodeBenchConnector``) or transfer no KV blocks.
"""


class Peer:
    """vLLM in a separate process, which ``ends`` closes. ``connector`` is a key of ``CONNECTORS``."""

    def __init__(
        self,
        args: argparse.Namespace,
        name: str,
        ends: ExitStack,
        *,
        connector: str = "",
        folder: str = "",
        **more: Any,
    ) -> None:
        options = {
            "model": str(args.model.resolve()),
            "dtype": "float32",
            "max_model_len": args.tokens + 64,
            "max_num_batched_tokens": 2 * args.tokens,
            "max_num_seqs": 4,
            "block_size": BLOCK,
            "enforce_eager": args.eager,
            **more,
        }
        if connector:
            extra = json.loads(json.dumps(CONNECTORS[connector]).replace("{folder}", folder))
            kind = connector.partition(",")[0]
            options["kv_transfer_config"] = {
                "kv_connector": kind, "kv_role": "kv_both", "kv_connector_extra_config": extra
            }  # fmt: skip
        self._log = Path(args.scratch or tempfile.gettempdir()) / f"kv_peer_{name.replace(', ', '_')}.log"
        threads = f"0-{args.threads - 1}"
        environment = vllm_environment(kv_cache=1, threads=threads, libraries=args.peer)
        self._process = ends.enter_context(
            subprocess.Popen(
                [
                    str(args.peer / "venv/bin/python"),
                    str(Path(__file__).with_name("kv_peer_engine.py")),
                    json.dumps(options),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log.open("w"),
                env={**_plain_environment(), **environment},
                text=True,
            )
        )
        ends.callback(self._process.terminate)

    def answer(self) -> dict[str, Any]:
        """Return the next answer; the first comes when vLLM is ready. Raises RuntimeError with its last error if it has
        ended.
        """
        line = _output(self._process.stdout).readline()
        if not line:
            self._process.wait()
            said = [each for each in self._log.read_text().splitlines() if "Error: " in each or "Exception: " in each]
            raise RuntimeError(said[-1].removeprefix("[rank0]: ") if said else "it ended without an error")
        found: dict[str, Any] = json.loads(line)
        return found

    def ask(self, **asked: Any) -> dict[str, Any]:
        """Send a request in the format of ``kv_peer_engine``."""
        to = _output(self._process.stdin)
        to.write(json.dumps(asked) + "\n")
        to.flush()
        return self.answer()

    def generate(self, prompt: list[int]) -> dict[str, Any]:
        """Return the seconds to the first token, the tokens, and the number of loaded or cached prompt tokens."""
        return self.ask(prompt=prompt, tokens=TOKENS)

    def reset(self) -> None:
        """Clear the prefix cache."""
        assert self.ask(reset=True)["reset"]


def _output(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


def _plain_environment() -> dict[str, str]:
    """Return this process's environment without its thread and package settings."""
    return {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "PYTHONPATH")}


def peer_prompt(args: argparse.Namespace, number: int) -> list[int]:
    """Return a different prompt for each number, with two tokens after the last full block."""
    return [3 + (number * 7919 + place * 31) % 900 for place in range(args.tokens + 2)]


class Peers:
    """vLLM in four processes: without a connector, saving, loading, and with a small KV cache."""

    def __init__(self, args: argparse.Namespace, folder: str, ends: ExitStack) -> None:
        self._args = args
        with_files = {"connector": "ExampleConnector", "folder": folder}
        small = 2 * (args.tokens // BLOCK + 2)
        self._plain = Peer(args, "plain", ends)
        self._source = Peer(args, "source", ends, **with_files)
        self._target = Peer(args, "target", ends, **with_files)
        self._own = Peer(args, "own", ends, num_gpu_blocks_override=small, **with_files)
        for each in (self._plain, self._source, self._target, self._own):
            each.answer()

    def run(self, number: int) -> Iterator[tuple[str, str, float]]:
        """Yield row, measured quantity and seconds. Raises AssertionError if a prompt was computed that should have
        been loaded.
        """
        prompt = peer_prompt(self._args, number)
        plain = self._plain.generate(prompt)
        saved = self._source.generate(prompt)
        loaded = self._target.generate(prompt)
        cached = self._target.generate(prompt)
        self._target.reset()
        assert plain["cached"] == saved["cached"] == 0, (plain, saved)
        assert loaded["cached"] == cached["cached"] == self._args.tokens, (loaded, cached)
        for each in (saved, loaded, cached):
            self._compare(plain, each)
        yield from self._row("files", plain, loaded, cached)
        yield "files", "saved", saved["seconds"]
        prompt = peer_prompt(self._args, 500 + number)
        plain = self._plain.generate(prompt)
        self._own.generate(prompt)
        for other in range(3):
            self._own.generate(peer_prompt(self._args, 1000 + 10 * number + other))
        loaded = self._own.generate(prompt)
        cached = self._own.generate(prompt)
        assert loaded["cached"] == self._args.tokens, loaded
        self._compare(plain, loaded)
        yield from self._row("files, own", plain, loaded, cached)

    def _row(self, name: str, *found: dict[str, Any]) -> Iterator[tuple[str, str, float]]:
        for timed, each in zip(("computed", "loaded", "cached"), found, strict=True):
            yield name, timed, each["seconds"]

    @staticmethod
    def _compare(plain: dict[str, Any], other: dict[str, Any]) -> None:
        assert plain["tokens"] == other["tokens"], (plain, other)


class Ours:
    """Penstock's engines: two pairs, and two with tiers."""

    def __init__(self, args: argparse.Namespace, folder: str, ends: ExitStack) -> None:
        self._pairs = {name: kv_transfer.Pair(args, name, ends) for name in ("grpc", "shared_memory")}
        self._tiers = {name: ends.enter_context(kv_tiers.loading(args, name, folder)) for name in ("host", "disk")}

    def run(self, number: int) -> Iterator[tuple[str, str, float]]:
        """See ``Peers``."""
        for name, pair in self._pairs.items():
            for timed, seconds in pair.run()._asdict().items():
                yield name, timed, seconds
        for name, bench in self._tiers.items():
            for timed, seconds in kv_tiers.load(bench, number).items():
                yield name, timed, seconds


def compare(args: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Return seconds by row and measured quantity, of each round but the first."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    with ExitStack() as ends:
        folder = ends.enter_context(tempfile.TemporaryDirectory(dir=args.scratch))
        (Path(folder) / "files").mkdir()
        peers, ours = Peers(args, f"{folder}/files", ends), Ours(args, folder, ends)
        for number in range(args.rounds + 1):
            for server, each in (("vLLM", peers), ("Penstock", ours)):
                for row, timed, seconds in each.run(number):
                    print(f"{number} {server}, {row}, {timed}: {seconds * 1000:.1f} ms", file=sys.stderr, flush=True)
                    if number:
                        found[f"{server}, {row}"][timed].append(seconds)
    return found


def connectors(args: argparse.Namespace) -> Iterator[str]:
    """Yield vLLM's result with each of its connectors."""
    for name in CONNECTORS:
        if args.only not in name:
            continue
        with tempfile.TemporaryDirectory(dir=args.scratch) as folder, ExitStack() as ends:
            peer = Peer(args, name, ends, connector=name, folder=folder)
            try:
                peer.answer()
                peer.generate(peer_prompt(args, 0))
            except RuntimeError as e:
                yield f"{name}: {e}"
            else:
                yield f"{name}: runs"


def lost(path: Path) -> None:
    """Delete the file of a layer."""
    path.unlink()


def cut(path: Path) -> None:
    """Cut a file in half."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flipped(path: Path) -> None:
    """Flip the highest exponent bit of a number in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[-(len(data) // 8) * 4 - 1] ^= 0x40
    path.write_bytes(data)


def damage(args: argparse.Namespace) -> Iterator[str]:
    """Yield the results of a prompt with a damaged file, and of the next prompt."""
    with tempfile.TemporaryDirectory(dir=args.scratch) as folder, ExitStack() as ends:
        source = Peer(args, "source", ends, connector="ExampleConnector", folder=folder)
        source.answer()
        for number, how in enumerate((flipped, cut, lost)):
            before = set(Path(folder).iterdir())
            expected = source.generate(peer_prompt(args, number))["tokens"]
            (saved,) = set(Path(folder).iterdir()) - before
            how(sorted(saved.iterdir())[0])
            target = Peer(args, "target", ends, connector="ExampleConnector", folder=folder)
            target.answer()
            try:
                tokens = target.generate(peer_prompt(args, number))["tokens"]
            except RuntimeError as e:
                yield f"{how.__name__}: its engine ends: {e}"
            else:
                yield f"{how.__name__}: {'the same' if tokens == expected else 'other'} tokens, {tokens} for {expected}"


def report(found: dict[str, dict[str, list[float]]]) -> Iterator[str]:
    """Print medians in milliseconds, and percentages of the computing time."""
    yield f"{machine()}; medians, smallest to largest"
    for row, timed in found.items():
        medians = {name: statistics.median(values) for name, values in timed.items()}
        said = ", ".join(
            f"{name} {medians[name] * 1000:.1f} ms ({min(values) * 1000:.1f} to {max(values) * 1000:.1f})"
            for name, values in timed.items()
        )
        computed, load = medians["computed"], medians["loaded"] - medians["cached"]
        yield f"{row}: {said}; whole {medians['loaded'] / computed:.1%}, load {load * 1000:.1f} ms, {load / computed:.1%}"


def main() -> int:
    """Print the selected results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--peer", type=Path, required=True, help="folder whose venv/ holds vLLM's CPU build")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of a prompt, a multiple of 32")
    parser.add_argument(
        "--threads", type=int, default=2, help="threads of each engine; only one engine computes at a time"
    )
    parser.add_argument("--rounds", type=int, default=7, help="number of rounds after a warm-up round")
    parser.add_argument("--scratch", default=None, help="a directory for files that are loaded, and logs")
    parser.add_argument("--eager", action="store_true", help="vLLM without compilation")
    parser.add_argument("--connectors", action="store_true", help="only start vLLM with each connector")
    parser.add_argument("--only", default="", help="connectors whose name contains this")
    parser.add_argument("--damage", action="store_true", help="load only damaged files")
    args = parser.parse_args()
    args.peer = args.peer.resolve()
    if args.connectors or args.damage:
        for line in connectors(args) if args.connectors else damage(args):
            print(line, flush=True)
        return 0
    for line in report(compare(args)):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main())
