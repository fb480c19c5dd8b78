"""Speculation beside vLLM's CPU build: the same checkpoints, methods and requests, one server after the other.

``python -m tests.benchmarks.speculation_peer --peer DIR --model PADDED --drafter DRAFTER --json RUNS`` needs vLLM's CPU build in
``DIR/venv``, and arctic-inference there for ``suffix``. Every server, without drafts and with each method, gets 64 requests
alone and 64 at 8 streams, greedy and at temperature 0.8 with a seed each. Runs are added to the JSON file, so that ``--servers``,
``--methods`` and ``--dtypes`` may measure a part at a time; ``--report`` prints the table of what the file has.

vLLM 0.32 without triton-cpu samples drafted requests at a temperature that was never written (``repaired``): texts are noise and
no draft holds. ``--repair`` writes three lines into its virtual environment that do what its Triton kernel does.
"""

import argparse
import asyncio
import contextlib
import json
import os
import re
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec

from tests.benchmarks.peers import KV_CACHE, Server, machine
from tests.benchmarks.speculation import run, served, stories
from tests.fakes.network.ports import free_port

REQUESTS, TOKENS = 64, 120
CELLS = tuple((streams, temperature) for streams in (1, 8) for temperature in (0.0, 0.8))
SERVERS = ("vLLM", "Penstock")
WORKLOADS = {"off": ("stories", "records"), "ngram": ("records",)}
"""By method; every other one gets stories."""
QUIET = 0.05
"""Share of the processors that other processes may take of a run that counts."""
SETTLE = 3.0
"""Seconds until counts of drafts have reached the metrics."""
SAMPLER = "lib/python3*/site-packages/vllm/utils/cpu_triton_utils.py"
FAULT = """    torch.ops._C.expand_kernel_impl(
        _ensure_int64(output),
        _ensure_int64(input_val),
        _ensure_int64(cu_num_tokens),
        replace_from,
        replace_to,
    )
"""
REPAIR = """    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    values = torch.where(input_val == replace_from, replace_to, input_val)
    output.copy_(values.repeat_interleave(counts))
"""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """All requests of a workload once. ``drafts``: times that a request had some in a step; ``others``: share of the processors
    that processes of others took meanwhile.
    """

    server: str
    method: str
    dtype: str
    workload: str
    streams: int
    temperature: float
    tokens: int
    seconds: float
    drafts: float
    accepted: float
    others: float
    settings: str
    texts: list[str]

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


def repaired(source: str) -> str:
    """vLLM's ``cpu_triton_utils.py`` with per-request values that reach their tokens: the kernel behind it writes into a copy
    of its output, as integers. As it was where the fault is not there.
    """
    return source.replace(FAULT, REPAIR)


def draft_counts(metrics: str) -> tuple[float, float]:
    """Of a server's metrics: how often a request had drafts in a step, and how many of the tokens held."""

    def total(name: str) -> float:
        pattern = rf"^vllm:spec_decode_num_{name}_total(?:\{{[^}}]*\}})? (\S+)"
        return sum(float(value) for value in re.findall(pattern, metrics, re.MULTILINE))

    return total("drafts"), total("accepted_tokens")


def changed_share(before: Sequence[str], after: Sequence[str]) -> float:
    """Of requests in the same order, the share whose texts differ. ValueError unless there are as many of both."""
    if len(before) != len(after):
        raise ValueError(f"{len(before)} texts beside {len(after)}")
    return sum(a != b for a, b in zip(before, after, strict=True)) / max(len(before), 1)


def counting(runs: list[Run]) -> list[Run]:
    """Those of ``runs`` that were not disturbed, or the one that was least."""
    return [each for each in runs if each.others <= QUIET] or sorted(runs, key=lambda each: each.others)[:1]


def cell(runs: list[Run], before: list[Run]) -> dict[str, float]:
    """Of the rounds of one server with a method, and without (``before``): tokens/s of both, tokens per step that had drafts,
    the share of texts that differ between the two, and between rounds without (NaN where there is one round).
    """
    drafts = sum(each.drafts for each in runs)
    return {
        "off": statistics.median(each.rate for each in counting(before)),
        "on": statistics.median(each.rate for each in counting(runs)),
        "length": 1 + sum(each.accepted for each in runs) / drafts if drafts else 1.0,
        "per step": sum(each.tokens for each in runs) / sum(each.tokens - each.accepted for each in runs),
        "changed": statistics.mean(changed_share(a.texts, b.texts) for a, b in zip(before, runs, strict=False)),
        "again": changed_share(before[0].texts, before[1].texts) if len(before) > 1 else float("nan"),
        "others": max(each.others for kept in (counting(before), counting(runs)) for each in kept),
    }


def report(runs: list[Run]) -> str:
    """The table, in Markdown: a row for each type, method, number of streams and temperature that both servers have."""
    by: dict[tuple[Any, ...], list[Run]] = defaultdict(list)
    for each in runs:
        by[each.server, each.dtype, each.workload, each.streams, each.temperature, each.method].append(each)
    lines = [
        "| | streams | temperature | vLLM off | on | Penstock off | on | beside vLLM | length, vLLM | Penstock "
        "| changed, vLLM | Penstock | asked again, vLLM | Penstock | others |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for (server, *place, method), found in by.items():
        others = by.get((SERVERS[1], *place, method))
        if server != SERVERS[0] or method == "off" or not others:
            continue
        dtype, _, streams, temperature = place
        theirs, ours = (
            cell(each, by[name, *place, "off"]) for name, each in zip(SERVERS, (found, others), strict=True)
        )
        rates = [f"{each[key]:.0f}" for each in (theirs, ours) for key in ("off", "on")]
        lengths = [f"{each['length']:.2f}" for each in (theirs, ours)]
        shares = [f"{100 * each[key]:.0f} %" for key in ("changed", "again") for each in (theirs, ours)]
        cells = [f"{method}, {dtype}", str(streams), f"{temperature:g}", *rates]
        cells += [f"{ours['on'] / theirs['on']:.2f}", *lengths, *shares]
        cells.append(f"{100 * max(theirs['others'], ours['others']):.0f} %")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def records(count: int, **fields: Any) -> list[dict[str, Any]]:
    """Requests to write a sentence as JSON, behind three that have been: what is looked up has something to be found in."""
    names, cities = ("Nora", "Theo", "Rosa", "Omar", "Clara", "Adam", "Luca"), ("Prague", "Dublin", "Cairo", "Lisbon")
    jobs = ("gardener", "baker", "teacher", "farmer", "painter")

    def pair(number: int) -> tuple[str, str]:
        name, city, job = names[number % 7], cities[number % 4], jobs[number % 5]
        age = 20 + number * 7 % 60
        said = f"Convert to JSON: {name} is {age} years old, lives in {city} and works as a {job}."
        return said, json.dumps({"name": name, "age": age, "city": city, "job": job})

    def messages(number: int) -> Iterator[dict[str, str]]:
        for each in (number + 11, number + 23, number + 38):
            said, answer = pair(each)
            yield {"role": "user", "content": said}
            yield {"role": "assistant", "content": answer}
        yield {"role": "user", "content": pair(number)[0]}

    return [{"messages": list(messages(n)), "max_tokens": TOKENS, "seed": n, **fields} for n in range(count)]


def bodies(workload: str, temperature: float) -> list[dict[str, Any]]:
    """The requests of a workload."""
    fields = {"temperature": temperature, "model": "m"}
    return records(REQUESTS, **fields) if workload == "records" else stories(REQUESTS, TOKENS, **fields)


def busy_seconds() -> tuple[float, float]:
    """Seconds of the processors so far: of everybody's processes, and of this one's and its descendants."""
    ticks = os.sysconf("SC_CLK_TCK")
    user, nice, system, _, _, *rest = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9])
    parents, times = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            values = path.read_text().rsplit(") ", 1)[1].split()
            parents[int(path.parent.name)] = int(values[1])
            times[int(path.parent.name)] = int(values[11]) + int(values[12])

    def ours(pid: int) -> bool:
        return pid == os.getpid() or (pid in parents and ours(parents[pid]))

    return (user + nice + system + sum(rest)) / ticks, sum(t for pid, t in times.items() if ours(pid)) / ticks


class Peers:
    """Starts either server as its users would. ``peer``: the folder with vLLM's environment."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._peer: Path = options.peer.resolve()
        self._folder = Path("build/speculation_peer")
        self._folder.mkdir(parents=True, exist_ok=True)

    def config(self, method: str) -> list[str]:
        """Flags of a method, the same for both servers."""
        if method == "off":
            return []
        config: dict[str, Any] = {"method": method, "num_speculative_tokens": self._options.tokens}
        if method in ("draft_model", "eagle3"):
            config["model"] = str(self._options.head if method == "eagle3" else self._options.drafter)
        if method == "ngram":
            config |= {"prompt_lookup_max": 5, "prompt_lookup_min": 2}
        return ["--speculative-config", json.dumps(config)]

    def settings(self, server: str) -> str:
        """What distinguishes runs of a server."""
        if server != "vLLM":
            return ""
        return f"{'eager' if self._options.peer_eager else 'compiled'}, threads {self._options.peer_threads}"

    @contextlib.contextmanager
    def serve(self, server: str, method: str, dtype: str) -> Iterator[str]:
        """The base URL of a server that answers."""
        flags = ["--dtype", dtype, "--max-model-len", "2048", "--served-model-name", "m", *self.config(method)]
        if server == "Penstock":
            flags += ["--kv-cache-memory", KV_CACHE]
            with served(f"penstock-{method}", self._options.model, flags, self._folder) as url:
                yield url
            return
        port = free_port()
        command = [str(self._peer / "venv/bin/vllm"), "serve", str(self._options.model), "--port", str(port), *flags]
        command += ["--enforce-eager"] if self._options.peer_eager else []
        libraries = [next(iter(self._peer.rglob(name)), None) for name in ("libtcmalloc_minimal.so.4", "libiomp5.so")]
        env = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
        env |= {"LD_PRELOAD": ":".join(str(path) for path in libraries if path), "PYTHONPATH": ""}
        env["VLLM_CPU_OMP_THREADS_BIND"] = self._options.peer_threads
        process, url = Server("vLLM", command, env, self._folder / f"vllm-{method}.log"), f"http://127.0.0.1:{port}"
        try:
            process.wait(lambda: _healthy(url))
            yield url
        finally:
            process.close()

    def measure(self, server: str, method: str, dtype: str) -> Iterator[Run]:
        """One round of a server with a method."""
        with self.serve(server, method, dtype) as url:
            for workload in WORKLOADS.get(method, ("stories",)):
                for streams in (1, 8):  # compiled code, caches, and for ``suffix`` answers that come again
                    warm = bodies(workload, 0.0)[:: 1 if method == "suffix" and streams == 8 else 8]
                    asyncio.run(run(url, warm, streams))
                for streams, temperature in CELLS:
                    yield self._cell(url, server, method, dtype, workload, streams, temperature)

    def _cell(
        self, url: str, server: str, method: str, dtype: str, workload: str, streams: int, temperature: float
    ) -> Run:
        time.sleep(SETTLE)
        before, (all_before, own_before) = draft_counts(httpx.get(f"{url}/metrics").text), busy_seconds()
        began = time.perf_counter()
        answers = asyncio.run(run(url, bodies(workload, temperature), streams))
        seconds = time.perf_counter() - began
        all_after, own_after = busy_seconds()
        time.sleep(SETTLE)
        after = draft_counts(httpx.get(f"{url}/metrics").text)
        others = ((all_after - all_before) - (own_after - own_before)) / seconds / (os.cpu_count() or 1)
        return Run(
            server=server,
            method=method,
            dtype=dtype,
            workload=workload,
            streams=streams,
            temperature=temperature,
            tokens=answers.tokens,
            seconds=seconds,
            drafts=after[0] - before[0],
            accepted=after[1] - before[1],
            others=max(others, 0.0),
            settings=self.settings(server),
            texts=answers.texts,
        )


def _healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


def read_runs(path: Path) -> list[Run]:
    """What is in the file; nothing where there is none."""
    return msgspec.json.decode(path.read_bytes(), type=list[Run]) if path.exists() else []


def main() -> int:
    """Measure what is asked for, add it to the file, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, required=True, help="folder whose venv/ holds vLLM's CPU build")
    parser.add_argument("--json", type=Path, required=True, help="the file of runs")
    parser.add_argument("--model", type=Path, help="the checkpoint that both serve")
    parser.add_argument("--drafter", type=Path, help="the draft model")
    parser.add_argument("--head", type=Path, help="EAGLE-3's head, in speculators' layout")
    parser.add_argument("--servers", default=",".join(SERVERS))
    parser.add_argument("--methods", default="off,draft_model,ngram,suffix", help="of off, and vLLM's names")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=5, help="drafts of a request in a step")
    parser.add_argument("--peer-eager", action="store_true", help="vLLM without compilation")
    parser.add_argument("--peer-threads", default=f"0-{(os.cpu_count() or 1) - 1}", help="VLLM_CPU_OMP_THREADS_BIND")
    parser.add_argument("--repair", action="store_true", help="mend vLLM's sampling without triton-cpu, see above")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    options = parser.parse_args()
    if options.repair:
        for path in (options.peer / "venv").glob(SAMPLER):
            path.write_text(repaired(path.read_text()))
    peers = Peers(options)
    for dtype in [] if options.report else options.dtypes.split(","):
        for method in options.methods.split(",") * options.rounds:
            for server in options.servers.split(","):
                for found in peers.measure(server, method, dtype):
                    fields = msgspec.to_builtins(found)
                    print(
                        json.dumps({k: v for k, v in fields.items() if k != "texts"} | {"rate": found.rate}), flush=True
                    )
                    options.json.write_bytes(msgspec.json.encode([*read_runs(options.json), found]))
    print(f"{machine()}\n\n{report(read_runs(options.json))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
