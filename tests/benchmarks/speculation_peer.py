"""Speculative decoding compared with vLLM's CPU build: the same checkpoints, methods and requests, one server after the
other.

``python -m tests.benchmarks.speculation_peer --peer DIR --model PADDED --drafter DRAFTER --json RUNS`` needs vLLM's CPU
build in ``DIR/venv``, with arctic-inference for ``suffix``. Every server runs without drafts and with each method. It
gets 24 requests alone and 64 at 8 streams, greedy and at temperature 0.8 with a seed each. All prompts are in its
prefix cache.

Requests are sent in small groups. A group is repeated if other processes used more than a tenth of the processors
meanwhile. All runs are added to the JSON file. The least disturbed run of a group counts, and a later call measures the
missing groups. ``--minutes`` bounds a call. ``--servers``, ``--methods`` and ``--dtypes`` limit the measurements.
``--report`` only prints the table.

vLLM 0.32 without triton-cpu samples drafted requests at a temperature that was never written (``repaired``): texts are
noise and no draft is accepted. ``--repair`` writes three lines into its virtual environment that replace its Triton
kernel.
"""

import argparse
import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec

from tests.benchmarks.peers import ALL_CORES, KV_CACHE, Server, machine, vllm_environment
from tests.benchmarks.speculation import run, served, stories
from tests.benchmarks.speculation_runs import QUIET, SERVERS, Place, Run, draft_counts, lacks, rate, read_runs, report
from tests.fakes.network.ports import free_port

TOKENS = 120
REQUESTS = {1: 24, 8: 64}
AT_ONCE = {1: 8, 8: 32}
"""Requests, and how many of them are sent and timed together, by streams."""
TEMPERATURES = (0.0, 0.8)
WORKLOADS = {"off": ("stories", "records"), "ngram": ("records",)}
"""By method; every other one gets stories."""
SETTLE = 2.0
"""Seconds until counts of drafts have reached the metrics."""
TRIES = 20
WAIT = 20.0
"""Seconds to wait for others to end."""
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


def repaired(source: str) -> str:
    """Return vLLM's ``cpu_triton_utils.py`` with a fix for per-request values of tokens. If the fault is absent, the
    text is unchanged.

    The original kernel writes into a copy of its output, as integers.
    """
    return source.replace(FAULT, REPAIR)


def records(count: int, **fields: Any) -> list[dict[str, Any]]:
    """Return requests to write a sentence as JSON, each with three examples in the prompt, so that lookup methods find
    matches.
    """
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
    """The requests of a workload, as many as are sent with most streams."""
    count, fields = max(REQUESTS.values()), {"temperature": temperature, "model": "m"}
    return records(count, **fields) if workload == "records" else stories(count, TOKENS, **fields)


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


def wait_for_others() -> bool:
    """Return when other processes leave the processors alone, or after a while: whether they do."""
    until, quiet = time.monotonic() + WAIT, False
    while not quiet and time.monotonic() < until:
        everybody, own = busy_seconds()
        time.sleep(1)
        everybody_after, own_after = busy_seconds()
        quiet = (everybody_after - everybody) - (own_after - own) < QUIET * (os.cpu_count() or 1)
    return quiet


def places(method: str) -> list[Place]:
    """Return all loads with a method."""
    return [
        Place(workload=workload, streams=streams, temperature=temperature, part=part)
        for workload in WORKLOADS.get(method, ("stories",))
        for streams, at_once in AT_ONCE.items()
        for temperature in TEMPERATURES
        for part in range(REQUESTS[streams] // at_once)
    ]


class Peers:
    """Starts either server as its users would. ``peer``: the folder with vLLM's environment."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._peer: Path = options.peer.resolve()
        self._folder = Path("build/speculation_peer")
        self._folder.mkdir(parents=True, exist_ok=True)
        self._until = time.monotonic() + 60 * options.minutes

    def config(self, method: str) -> list[str]:
        """Flags of a method, the same for both servers."""
        if method == "off":
            return []
        tokens = 12 if method == "suffix" else self._options.tokens
        config: dict[str, Any] = {"method": method, "num_speculative_tokens": tokens}
        if method in ("draft_model", "eagle3"):
            config["model"] = str(self._options.head if method == "eagle3" else self._options.drafter)
        if method == "ngram":
            config |= {"prompt_lookup_max": 5, "prompt_lookup_min": 2}
        return ["--speculative-config", json.dumps(config)]

    def settings(self, server: str) -> str:
        """Return the settings that distinguish runs of a server."""
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
        env = vllm_environment(threads=self._options.peer_threads, libraries=self._peer)
        process, url = Server("vLLM", command, env, self._folder / f"vllm-{method}.log"), f"http://127.0.0.1:{port}"
        try:
            process.wait(lambda: _healthy(url))
            yield url
        finally:
            process.close()

    def measure(self, server: str, method: str, dtype: str) -> Iterator[Run]:
        """Run the loads that the file lacks for a server with a method, until the time is over. Without a method,
        several streams run twice.
        """
        missing = self._missing(server, method, dtype)
        if not missing or time.monotonic() > self._until:
            return
        with self.serve(server, method, dtype) as url:
            for workload in dict.fromkeys(place.workload for place in missing):
                self._warm_up(url, workload, again=method == "suffix")
            for _ in range(TRIES):
                asked = {each.place for each in self._said(server, method, dtype)}
                for place in self._missing(server, method, dtype):
                    if time.monotonic() < self._until and (wait_for_others() or place not in asked):
                        yield self._ask(url, server, method, dtype, place)

    def _said(self, server: str, method: str, dtype: str) -> list[Run]:
        return [each for each in read_runs(self._options.json) if each.of == (server, method, dtype)]

    def _missing(self, server: str, method: str, dtype: str) -> list[Place]:
        said = self._said(server, method, dtype)
        return [
            place
            for place in places(method)
            if lacks(said, place, times=2 if method == "off" and place.streams > 1 else 1)
        ]

    def _warm_up(self, url: str, workload: str, *, again: bool) -> None:
        """Compiled code, prompts in the prefix cache, and whole answers where requests come ``again``."""
        for temperature in TEMPERATURES:
            asked = bodies(workload, temperature)
            asyncio.run(run(url, [body if again else {**body, "max_tokens": 1} for body in asked], 8))
            for streams in (1, 8):
                asyncio.run(run(url, asked[::8], streams))

    def _ask(self, url: str, server: str, method: str, dtype: str, place: Place) -> Run:
        drafts, accepted = draft_counts(httpx.get(f"{url}/metrics").text)
        at_once = AT_ONCE[place.streams]
        asked = bodies(place.workload, place.temperature)[place.part * at_once :][:at_once]
        (all_before, own_before), began = busy_seconds(), time.perf_counter()
        answers = asyncio.run(run(url, asked, place.streams))
        (all_after, own_after), seconds = busy_seconds(), time.perf_counter() - began
        time.sleep(SETTLE)
        drafts_after, accepted_after = draft_counts(httpx.get(f"{url}/metrics").text)
        return Run(
            server=server,
            method=method,
            dtype=dtype,
            place=place,
            tokens=answers.tokens,
            seconds=seconds,
            drafts=drafts_after - drafts,
            accepted=accepted_after - accepted,
            others=max(all_after - all_before - own_after + own_before, 0.0) / seconds / (os.cpu_count() or 1),
            settings=self.settings(server),
            texts=answers.texts,
        )


def _healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


def main() -> int:
    """Run the selected measurements, add them to the file, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, required=True, help="folder whose venv/ holds vLLM's CPU build")
    parser.add_argument("--json", type=Path, required=True, help="the file of runs")
    parser.add_argument("--model", type=Path, help="the checkpoint that both serve")
    parser.add_argument("--drafter", type=Path, help="the draft model")
    parser.add_argument("--head", type=Path, help="EAGLE-3's head, in speculators' layout")
    parser.add_argument("--servers", default=",".join(SERVERS))
    parser.add_argument("--methods", default="off,draft_model,ngram,suffix", help="of off, and vLLM's names")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--minutes", type=float, default=60.0, help="minutes after which no measurement starts")
    parser.add_argument("--tokens", type=int, default=5, help="drafts per request and step; suffix: 12")
    parser.add_argument("--peer-eager", action="store_true", help="vLLM without compilation")
    parser.add_argument("--peer-threads", default=ALL_CORES, help="VLLM_CPU_OMP_THREADS_BIND")
    parser.add_argument("--repair", action="store_true", help="mend vLLM's sampling without triton-cpu, see above")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    options = parser.parse_args()
    if options.repair:
        for path in (options.peer / "venv").glob(SAMPLER):
            path.write_text(repaired(path.read_text()))
    peers = Peers(options)
    for dtype in [] if options.report else options.dtypes.split(","):
        for method in options.methods.split(","):
            for server in options.servers.split(","):
                for found in peers.measure(server, method, dtype):
                    line = {"server": server, "method": method, "dtype": dtype, **msgspec.to_builtins(found.place)}
                    print(json.dumps(line | {"rate": rate([found]), "others": found.others}), flush=True)
                    options.json.write_bytes(msgspec.json.encode([*read_runs(options.json), found]))
    print(f"{machine()}\n\n{report(read_runs(options.json))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
