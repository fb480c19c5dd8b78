"""Memory of ``LLM.generate_iter`` over a thousand prompts and over a million, from a generator, on an engine without a
model.

``python -m tests.benchmarks.offline_prompts`` prints the resident set after each. The engine is the fake one with known
tokens, so a million requests take about five minutes. Every eighth prompt is text, the others are token ids. Everything
else, including the tokenizer, is the same as in any ``LLM``. Use ``--prompts N`` for fewer prompts.
"""

import argparse
import ctypes
import gc
import importlib
import json
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DEMO = Path(__file__).resolve().parents[2] / "examples/demo_model/penstock-tiny"
LIMIT = 64 * 1024 * 1024
_VOCAB_SIZE = 2048


def resident() -> int:
    """Return the resident bytes of this process after freed memory was returned to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    fields = Path("/proc/self/statm").read_text(encoding="ascii").split()
    return int(fields[1]) * 4096


def _forgetful(fakes: Any) -> Any:
    """The fake executor without its record of all steps."""
    executor = fakes.FakeExecutor(vocab_size=_VOCAB_SIZE, block_size=16, check_kv=False)
    executor.steps = deque(maxlen=1)
    return executor


def measure(count: int) -> dict[str, Any]:
    """Run ``count`` prompts and print the memory before, after, and at its peak."""
    from penstock_enginecore.executor import factory
    from penstock_local import LLM

    fakes: Any = importlib.import_module("tests.fakes.engines.fake_executor")
    factory.make_executor = lambda config: _forgetful(fakes)

    def prompts() -> Iterator[str | list[int]]:
        for index in range(count):
            ids = [1 + index % 2000, 1 + index // 2000]
            yield ids if index % 8 else f"The number of this story is {index}."

    with LLM(str(DEMO), device="cpu", num_blocks=4096, max_num_seqs=256) as llm:
        before, began, highest, tokens = resident(), time.perf_counter(), 0, 0
        for done, (_, output) in enumerate(llm.generate_iter(prompts(), {"max_tokens": 1})):
            tokens += len(output.outputs[0].token_ids)
            if done % 20_000 == 0:
                highest = max(highest, now := resident())
                sys.stderr.write(
                    f"{done} of {count} prompts, {now / 2**20:.1f} MiB, {time.perf_counter() - began:.0f} s\n"
                )
        seconds = time.perf_counter() - began
        after = resident()
    return {
        "prompts": count,
        "tokens": tokens,
        "seconds": round(seconds, 1),
        "before_mib": round(before / 2**20, 1),
        "after_mib": round(after / 2**20, 1),
        "highest_mib": round(max(highest, after) / 2**20, 1),
    }


def main() -> int:
    """Measure each number in its own process and print both. Returns 1 if the larger exceeds the smaller by more than
    the limit.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=1_000_000)
    parser.add_argument("--only", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only:
        sys.stdout.write(json.dumps(measure(arguments.only)) + "\n")
        return 0
    results = []
    for count in (1000, arguments.prompts):
        command = [sys.executable, "-m", "tests.benchmarks.offline_prompts", "--only", str(count)]
        results.append(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout))
        sys.stdout.write(json.dumps(results[-1]) + "\n")
        sys.stdout.flush()
    more = (results[1]["highest_mib"] - results[0]["highest_mib"]) * 2**20
    sys.stdout.write(f"{more / 2**20:+.1f} MiB; at most {LIMIT // 2**20} are allowed\n")
    return int(more > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
