"""Cost of hostile grammars for their engine and for the other requests in its batch.

``python -m tests.benchmarks.hostile_grammars`` runs an engine in this process. The engine serves two neighbours, one
without a grammar and one with an ordinary schema. The neighbours run alone, and then with each hostile grammar in turn.
A hostile request starts again when it ends. For each grammar, the table has the seconds until the refusal or the first
token, the maximum processor milliseconds of one token, the final status, and the neighbours' milliseconds between two
tokens.
"""

import argparse
import itertools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from penstock_common.errors import RequestFailed
from penstock_common.types.outputs import FinishReason
from penstock_common.types.request import EngineCoreRequest
from penstock_common.types.sampling import SamplingParams, StructuredOutput
from penstock_enginecore.config import CacheConfig, EngineCoreConfig, ExecutorConfig, ModelConfig
from penstock_enginecore.core.engine_core import EngineCore
from penstock_enginecore.executor.uniproc import UniprocExecutor
from penstock_enginecore.structured_output.factory import make_grammar_backend
from tests.fakes.models.hostile_constraints import HOSTILE

MODEL = Path(__file__).resolve().parents[2] / "examples/demo_model/penstock-tiny"
SCHEMA = {"type": "array", "items": {"type": "object", "properties": {"name": {"type": "string"}}}, "minItems": 900}

_MOST = 1900
"""Maximum number of a neighbour's tokens, for slow hostile constraints."""


class Bench:
    """An engine, and the times at which each request got its tokens."""

    def __init__(self) -> None:
        config = EngineCoreConfig(
            model=ModelConfig(path=str(MODEL), device="cpu"),
            cache=CacheConfig(kv_cache_memory=128 * 1024 * 1024),
            executor=ExecutorConfig(num_threads=1),
            iteration_log_interval=0.0,
        )
        executor = UniprocExecutor(config)
        self.engine = EngineCore(config, executor, make_grammars=make_grammar_backend, progress=lambda line: None)
        self.times: dict[str, list[float]] = {}
        self.ends: dict[str, str] = {}
        self._number = 0

    def add(self, constraint: dict[str, Any] | None, max_tokens: int = 400) -> str:
        """Queue a request and return its id. A refused request counts as ended."""
        self._number += 1
        name = str(self._number)
        structured = StructuredOutput(**constraint) if constraint else None
        params = SamplingParams(
            temperature=1.0,
            seed=self._number,
            max_tokens=max_tokens,
            ignore_eos=not constraint,
            structured_output=structured,
        )
        request = EngineCoreRequest(request_id=name, prompt_token_ids=[5, 6, 7, 8], sampling_params=params)
        self.times[name] = []
        try:
            self.engine.add(self.engine.preprocess("bench", request))
        except RequestFailed as e:
            self.ends[name] = e.code
        return name

    def step(self) -> None:
        """Run one step, or wait a moment if there is no request."""
        for frame in self.engine.step(lambda: None).values():
            now = time.perf_counter()
            for output in frame.outputs:
                if output.new_token_ids:
                    self.times[output.request_id].append(now)
                if output.finish_reason is not None:
                    code = output.error.code if output.error else FinishReason(output.finish_reason).name
                    self.ends[output.request_id] = code
        if self.engine.stalled and self.engine.has_requests:
            self.engine.queues.get(block=True, timeout=0.1)

    def gaps(self, name: str) -> list[float]:
        """Return the milliseconds between a request's tokens."""
        times = self.times[name]
        return [1000 * (b - a) for a, b in itertools.pairwise(times)]

    def cost(self, name: str) -> float:
        """Return the CPU time of a request's last token in milliseconds."""
        for request in self.engine.scheduler._requests.by_key.values():  # type: ignore[attr-defined]
            if request.request_id == name and request.grammar is not None:
                return 1000 * float(getattr(request.grammar, "cost", 0.0))
        return 0.0

    def warm_up(self) -> None:
        """Start the grammar processes."""
        name = self.add({"json_schema": json.dumps(SCHEMA)}, 10)
        while name not in self.ends:
            self.step()

    def run(self, hostile: dict[str, Any] | None, tokens: int) -> dict[str, Any]:
        """Serve the two neighbours, with the hostile grammar if there is one."""
        names = [self.add(None, _MOST), self.add({"json_schema": json.dumps(SCHEMA)}, _MOST)]
        while not all(self.times[name] for name in names):
            self.step()
        begun = [len(self.times[name]) for name in names]
        started, first, worst, ended = time.perf_counter(), 0.0, 0.0, list[str]()
        current = self.add(hostile) if hostile else ""
        while not self._seen(names, begun, tokens, current, ended):
            self.step()
            if not current:
                continue
            worst = max(worst, self.cost(current))
            if not first and (self.times[current] or current in self.ends):
                first = time.perf_counter() - started
            if current in self.ends:
                ended.append(self.ends[current])
                current = self.add(hostile)
        self.engine.scheduler.abort_client("bench")
        while self.engine.has_work:
            self.step()
        gaps = [self.gaps(name)[count - 1 :] for name, count in zip(names, begun, strict=True)]
        itl = [(statistics.median(each), statistics.quantiles(each, n=100)[98]) for each in gaps]
        return {"first": first, "cost": worst, "verdict": sorted(set(ended)) or ["serves"], "itl": itl}

    def _seen(self, names: list[str], begun: list[int], tokens: int, current: str, ended: list[str]) -> bool:
        """Return whether the neighbours have enough tokens and the hostile grammar, if any, has a result."""
        counts = [len(self.times[name]) - count for name, count in zip(names, begun, strict=True)]
        if any(name in self.ends for name in names):
            return True
        return min(counts) >= tokens and (not current or bool(ended) or len(self.times[current]) >= 40)


def main() -> int:
    """Print the table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=400, help="tokens of each neighbour")
    tokens = parser.parse_args().tokens
    bench = Bench()
    bench.warm_up()
    rows = [("nothing", bench.run(None, tokens))]
    rows += [(name, bench.run(constraint, tokens)) for name, (constraint, _) in HOSTILE.items()]
    rows.append(("nothing", bench.run(None, tokens)))
    bench.engine.shutdown()
    print("| beside | compiled s | token ms | verdict | free p50 | p99 | schema p50 | p99 |")
    print("|---|---|---|---|---|---|---|---|")
    for name, row in rows:
        (a, b), (c, d) = row["itl"]
        verdict = ", ".join(row["verdict"]) if name != "nothing" else ""
        print(
            f"| {name} | {row['first']:.2f} | {row['cost']:.1f} | {verdict} | {a:.1f} | {b:.1f} | {c:.1f} | {d:.1f} |"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
